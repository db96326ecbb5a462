// Package runhost is the shell around the state machines of a daemon, one for each run. A Host finds runs by their ids,
// bounds how many there are, forgets idle ones and closes all. A Run has a lock and a timer, and calls others in order,
// one call at a time and without locks.
//
// Locks are taken in the order Host, Run.
package runhost

import (
	"maps"
	"sync"
	"time"
)

// MaxRuns bounds the runs that one Host keeps, finished ones included.
const MaxRuns = 4096

// pruneEvery is how often runs are looked for that may be forgotten.
const pruneEvery = time.Minute

// Config is how a Host answers and calls.
type Config struct {
	// Closed is the error of a closed Host and of its runs, and Full that of a Host with MaxRuns runs.
	Closed, Full error
	// Forgotten is the error of a run that Drop or Prune has closed.
	Forgotten func(id string) error
	// Waits: Unlock itself makes the calls of Tell, unless another Unlock does so already. Otherwise a goroutine makes
	// them.
	Waits bool
}

// Host keeps the runs of one daemon.
type Host[M Machine] struct {
	cfg     Config
	tellers sync.WaitGroup // of goroutines that make the calls of Tell

	mu     sync.Mutex
	runs   map[string]M
	pruned time.Time
	closed bool
}

// New returns a Host without runs.
func New[M Machine](cfg Config) *Host[M] { return &Host[M]{cfg: cfg, runs: map[string]M{}} }

// Get returns the run with the id, or the zero value. A closed Host still has its runs.
func (h *Host[M]) Get(id string) M {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.runs[id]
}

// Find returns the run with the id. Without one, the error is that of absent.
func (h *Host[M]) Find(id string, absent func(id string) error) (m M, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	found, ok := h.runs[id]
	switch {
	case h.closed:
		return m, h.cfg.Closed
	case !ok:
		return m, absent(id)
	}
	return found, nil
}

// Open returns the run with the id, a new one if need be. It calls create with the Host locked.
func (h *Host[M]) Open(id string, create func() M) (m M, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch found, ok := h.runs[id]; {
	case h.closed:
		return m, h.cfg.Closed
	case ok:
		return found, nil
	case len(h.runs) >= MaxRuns:
		return m, h.cfg.Full
	}
	m = create()
	r := m.run()
	r.machine = m
	if !h.cfg.Waits {
		r.tellers = &h.tellers
	}
	h.runs[id] = m
	return m, nil
}

// Len is how many runs there are.
func (h *Host[M]) Len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.runs)
}

// All are the runs by their ids. The caller owns the map.
func (h *Host[M]) All() map[string]M {
	h.mu.Lock()
	defer h.mu.Unlock()
	return maps.Clone(h.runs)
}

// Drop closes and forgets a run if may allows it, which is called with the Host and the run locked. Nil allows it.
func (h *Host[M]) Drop(id string, may func(M) bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m, ok := h.runs[id]
	if !ok {
		return
	}
	r := m.run()
	r.Lock()
	defer r.Unlock()
	if may == nil || may(m) {
		r.close(h.cfg.Forgotten(id))
		delete(h.runs, id)
	}
}

// Prune drops the idle runs, but for those that keep wants. It calls keep without locks; nil wants none. It does so at
// most once a minute, unless it is urgent, and reports whether it did.
func (h *Host[M]) Prune(now time.Time, urgent bool, keep func(id string) bool) bool {
	ids, due := h.idle(now, urgent)
	for _, id := range ids {
		if keep == nil || !keep(id) {
			h.Drop(id, func(m M) bool { return m.Idle(now) })
		}
	}
	return due
}

func (h *Host[M]) idle(now time.Time, urgent bool) (ids []string, due bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || now.Sub(h.pruned) <= pruneEvery && !urgent {
		return nil, false
	}
	h.pruned = now
	for id, m := range h.runs {
		r := m.run()
		r.Lock()
		if m.Idle(now) {
			ids = append(ids, id)
		}
		r.Unlock()
	}
	return ids, true
}

// Close closes every run, and waits for calls that goroutines make for Tell.
func (h *Host[M]) Close() {
	h.mu.Lock()
	h.closed = true
	for _, m := range h.runs {
		r := m.run()
		r.Lock()
		r.close(h.cfg.Closed)
		r.Unlock()
	}
	h.mu.Unlock()
	h.tellers.Wait()
}
