package runhost

import (
	"sync"
	"time"
)

// Machine is the state of one run. It embeds Run. The Host calls its methods with the run locked.
type Machine interface {
	// Tick is called at the time that Arm was given, and has to call Arm for the next one.
	Tick(now time.Time)
	// Idle reports whether the run may be forgotten. It must not call Tell.
	Idle(now time.Time) bool
	// Closed is called once, when the run is closed. It ends held requests with Err, and must not call Tell.
	Closed()

	run() *Run
}

// Run is the shell of one Machine: a lock, a timer, and a queue of calls to others. The zero value is a Run without a
// Host: it has the lock alone.
type Run struct {
	mu      sync.Mutex
	machine Machine
	tellers *sync.WaitGroup // of goroutines that make the calls of Tell; nil: Unlock makes them
	timer   *time.Timer
	due     time.Time // when it calls Tick; zero: never
	outbox  []func()
	telling bool // a goroutine makes the calls
	err     error
}

func (r *Run) run() *Run { return r }

// Lock locks the run.
func (r *Run) Lock() { r.mu.Lock() }

// Unlock unlocks the run. The calls that Tell was given are then made.
func (r *Run) Unlock() {
	begins := len(r.outbox) > 0 && !r.telling
	r.telling = r.telling || begins
	if begins && r.tellers != nil {
		r.tellers.Go(r.tellAll)
	}
	r.mu.Unlock()
	if begins && r.tellers == nil {
		r.tellAll()
	}
}

// Tell has f called once the run is unlocked, after every f before it has returned. A closed run calls nothing more.
// The run must be locked; f may lock it again, and Tell again.
func (r *Run) Tell(f func()) {
	if r.err == nil {
		r.outbox = append(r.outbox, f)
	}
}

func (r *Run) tellAll() {
	for {
		r.mu.Lock()
		if len(r.outbox) == 0 {
			r.outbox, r.telling = nil, false
			r.mu.Unlock()
			return
		}
		f := r.outbox[0]
		r.outbox = r.outbox[1:]
		r.mu.Unlock()
		f()
	}
}

// Err is why the run is closed, nil for an open one. The run must be locked.
func (r *Run) Err() error { return r.err }

// Arm sets the one timer of the run: Tick comes at next, or not at all if that is zero. The run must be locked.
func (r *Run) Arm(now, next time.Time) {
	if next.Equal(r.due) || r.err != nil {
		return
	}
	if r.timer != nil {
		r.timer.Stop()
	}
	r.due = next
	if !next.IsZero() {
		r.timer = time.AfterFunc(max(next.Sub(now), 0), r.Expire)
	}
}

// Expire calls Tick now, unless the run is closed. Any goroutine may call it, as the timer does; the run must not be
// locked.
func (r *Run) Expire() {
	r.Lock()
	defer r.Unlock()
	if r.err == nil {
		r.due = time.Time{}
		r.machine.Tick(time.Now())
	}
}

func (r *Run) close(err error) {
	if r.err != nil {
		return
	}
	r.err, r.outbox = err, nil
	if r.timer != nil {
		r.timer.Stop()
	}
	r.machine.Closed()
}
