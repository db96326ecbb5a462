// Package runhost is the shell around the state machines of a daemon, one for each run: it finds and bounds the runs,
// locks one at a time, gives it its time, tells others what it wants told, and forgets it.
//
// Locks are taken in the order Host, Run. What a Run tells is told without locks, in order and one call at a time.
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

// Config is what a Host is told about its runs.
type Config struct {
	// Closed is the error of a closed Host and of its runs, and Full that of a Host with MaxRuns runs.
	Closed, Full error
	// Forgotten is the error of a run that was dropped.
	Forgotten func(id string) error
	// Waits has the caller of Unlock tell what is to be told, and wait for it. Without it a goroutine tells.
	Waits bool
}

// Host keeps the runs of one daemon.
type Host[M Machine] struct {
	cfg     Config
	tellers sync.WaitGroup

	mu     sync.Mutex
	runs   map[string]M
	pruned time.Time
	closed bool
}

// New returns a Host without runs.
func New[M Machine](cfg Config) *Host[M] { return &Host[M]{cfg: cfg, runs: map[string]M{}} }

// Get returns the run with the id, or the zero value; the runs of a closed Host are there.
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

// Drop forgets a run if may, which is called with the Host and the run locked, agrees. Nil agrees.
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

// Prune forgets the runs that are idle and that keep, which is called without locks, does not want kept; nil keeps
// none. It does so once a minute unless it is urgent, and reports whether it has.
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

// Close closes every run. It waits for goroutines that tell.
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
