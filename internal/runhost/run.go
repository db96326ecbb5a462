package runhost

import (
	"sync"
	"time"
)

// Machine is what a package knows of one run. It embeds Run, and its methods are called with the run locked.
type Machine interface {
	// Tick is called when the time that was given to Arm has come. The timer is spent.
	Tick(now time.Time)
	// Idle reports whether the run may be forgotten. It tells nothing.
	Idle(now time.Time) bool
	// Closed ends whatever is held. Err says why.
	Closed()

	run() *Run
}

// Run is the shell of one Machine: its lock, its timer, and what it tells. The zero value is a Run without a Host,
// which has neither timer nor anybody to tell.
type Run struct {
	mu      sync.Mutex
	machine Machine
	tellers *sync.WaitGroup // goroutines that tell; nil: the caller of Unlock tells
	timer   *time.Timer
	due     time.Time
	outbox  []func()
	telling bool
	err     error
}

func (r *Run) run() *Run { return r }

// Lock locks the run.
func (r *Run) Lock() { r.mu.Lock() }

// Unlock unlocks the run, and has told what Tell was given meanwhile.
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

// Tell has f called when the run is unlocked, after what was given to Tell before, and unless the run is closed first.
// The run must be locked. While f runs, f may use the run, and what is given to Tell waits.
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

// Err is why the run is closed, or nil. The run must be locked.
func (r *Run) Err() error { return r.err }

// Arm has the Machine ticked at next, and at no other time; never if that is zero. The run must be locked.
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

// Expire ticks the Machine now, if the run is open. A timer that was stopped too late does so, and any caller may.
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
