package checkpointd

import (
	"context"
	"sync"
	"time"
)

// Pace is how soon the memory of workers is to be written.
type Pace int

const (
	AtOnce       Pace = iota // they have ended
	Early                    // at once: they have been sent a signal to end, and the memory is written again at their end
	AfterRestart             // they have ended, and others start in their place, who need the CPUs more
)

// restartTime is how long a save of AfterRestart is put off, unless somebody waits for it. It stays in memory.
const restartTime = time.Second

// restart puts off what is not urgent while workers start again.
type restart struct {
	life *lifetime

	mu  sync.Mutex
	end time.Time
}

// begin does not prolong a restart whose workers have failed, too.
func (r *restart) begin() {
	if !r.left() {
		r.set(time.Now().Add(restartTime))
		time.AfterFunc(restartTime, r.life.notify)
	}
}

// over lets all continue: the workers have started, or somebody waits for what was put off.
func (r *restart) over() {
	if r.left() {
		r.set(time.Time{})
		r.life.notify()
	}
}

func (r *restart) set(end time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.end = end
}

// left reports whether there is something to wait for.
func (r *restart) left() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return time.Now().Before(r.end)
}

// wait returns when the restart is over, or ctx.
func (r *restart) wait(ctx context.Context) error {
	return r.life.until(ctx, func() bool { return !r.left() })
}
