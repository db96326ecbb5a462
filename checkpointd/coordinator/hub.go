package coordinator

import (
	"crypto/rand"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// MaxRuns bounds the runs that one Hub keeps.
const MaxRuns = 4096

// Hub keeps the coordinators of all runs of a master. It has no memory on disk: when it comes back empty, the daemons
// tell it everything again.
type Hub struct {
	term string // names this Hub, so that clients notice another one

	switches atomic.Pointer[map[string]string]

	mu     sync.Mutex // before run.mu, never after
	runs   map[string]*run
	pruned time.Time // when empty runs were last looked for
	closed bool
}

// NewHub returns a Hub without runs.
func NewHub() *Hub { return &Hub{term: rand.Text(), runs: map[string]*run{}} }

// SetSwitches tells, by the address of a node without port, the switch that it hangs on, for peers that do not know it
// themselves. It counts for whoever says from then on that it is here. The map is not changed afterwards.
func (h *Hub) SetSwitches(m map[string]string) { h.switches.Store(&m) }

// switchOf is "" for an address that is not known.
func (h *Hub) switchOf(host string) string {
	m := h.switches.Load()
	if m == nil {
		return ""
	}
	return (*m)[host]
}

// Close ends every held request. Clients take the hub for one that is away, and go on trying.
func (h *Hub) Close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for _, r := range h.runs {
		r.close()
	}
}

// lostGrace is what the daemon of a launcher that has died needs to notice, and to say what it holds.
const lostGrace = time.Second

// Lost says that a node, by its number in the world of a round, is dead: in a moment, which its daemon has if it alone
// lives, agreements of the round do not wait for it any more. Not for a node that has merely left: its daemon still
// speaks when its workers have ended. Lost does not block, and is of no use to a hub that is closed or full.
func (h *Hub) Lost(run string, term uint64, round, node int) {
	time.AfterFunc(lostGrace, func() {
		if r, err := h.run(run); err == nil {
			_ = r.tell(Attendance{Of: fmt.Sprintf("%d.%d", term, round), Node: node}) // else patience does it
		}
	})
}

// Summary describes a run; an unknown one is empty.
func (h *Hub) Summary(run string) Summary {
	h.mu.Lock()
	r := h.runs[run]
	h.mu.Unlock()
	if r == nil {
		return NewState().Summary()
	}
	return r.summary()
}

// Runs are the names of the runs that have been heard of lately, in no order.
func (h *Hub) Runs() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	names := make([]string, 0, len(h.runs))
	for name := range h.runs {
		names = append(names, name)
	}
	return names
}

// run returns that of a name, a new one if need be.
func (h *Hub) run(run string) (*run, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, errClosed
	}
	if now := time.Now(); now.Sub(h.pruned) > time.Minute {
		h.pruned = now
		h.pruneLocked()
	}
	r := h.runs[run]
	if r == nil {
		if len(h.runs) >= MaxRuns {
			return nil, fmt.Errorf("%w: the hub keeps %d runs already", ErrLimit, MaxRuns)
		}
		r = newRun()
		h.runs[run] = r
	}
	return r, nil
}

func (h *Hub) pruneLocked() {
	for name, r := range h.runs {
		if r.retire() {
			delete(h.runs, name)
		}
	}
}
