package coordinator

import (
	"crypto/rand"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"dlrover-run/internal/runhost"
)

// Hub keeps the coordinators of all runs of a master. It has no memory on disk: when it starts empty, the daemons
// repeat everything.
type Hub struct {
	term string // names this Hub, so that clients notice another one

	switches atomic.Pointer[map[string]string]
	runs     *runhost.Host[*run]
}

// NewHub returns a Hub without runs.
func NewHub() *Hub {
	full := fmt.Errorf("%w: the hub keeps %d runs already", ErrLimit, runhost.MaxRuns)
	return &Hub{term: rand.Text(), runs: runhost.New[*run](runhost.Config{Closed: errClosed, Full: full,
		Forgotten: func(string) error { return errClosed }})}
}

// SetSwitches sets the switch of each node, by its address without port, for peers that do not know their own. It
// applies to later calls of Peers. The map is not changed afterwards.
func (h *Hub) SetSwitches(m map[string]string) { h.switches.Store(&m) }

// switchOf is "" for an address that is not known.
func (h *Hub) switchOf(host string) string {
	m := h.switches.Load()
	if m == nil {
		return ""
	}
	return (*m)[host]
}

// Close ends every held request. Clients treat the hub as one that is away, and keep trying.
func (h *Hub) Close() { h.runs.Close() }

// lostGrace is the time that the daemon of a dead launcher needs to notice the death and to announce its holdings.
const lostGrace = time.Second

// Lost reports that a node, by its number in the world of a round, is dead. Agreements of the round stop waiting for it
// after lostGrace, in which a daemon that outlives its launcher can still announce itself. Do not call it for a node
// that has merely left: its daemon still takes part when its workers have ended. Lost does not block, and does nothing
// on a hub that is closed or full.
func (h *Hub) Lost(run string, term uint64, round, node int) {
	time.AfterFunc(lostGrace, func() {
		if r, err := h.run(run); err == nil {
			_ = r.apply(Participation{Of: fmt.Sprintf("%d.%d", term, round), Node: node}) // else patience does it
		}
	})
}

// summary describes a run; an unknown one is empty.
func (h *Hub) Summary(run string) summary {
	if r := h.runs.Get(run); r != nil {
		return r.summary()
	}
	return newState().summary()
}

// Runs are the names of the runs with recent requests, in no order.
func (h *Hub) Runs() []string { return slices.Collect(maps.Keys(h.runs.All())) }

// run returns that of a name, a new one if need be.
func (h *Hub) run(run string) (*run, error) {
	h.runs.Prune(time.Now(), false, nil)
	return h.runs.Open(run, newRun)
}
