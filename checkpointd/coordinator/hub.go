package coordinator

import (
	"context"
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
	// Connection returns a context that ends with the connection of a request, from the request's own. Nil, or a nil
	// context: that is not known. It is to be set before the first request.
	Connection func(context.Context) context.Context

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

// Lost reports that the launcher of a node is dead, by the node's number in the world of a round. Agreements of the
// round stop waiting for the node as soon as its daemon is gone, too. Do not call it for a node that has merely left:
// its daemon still takes part when its workers have ended. Lost does not block, and does nothing on a hub that is
// closed or full.
func (h *Hub) Lost(run string, term uint64, round, node int) {
	time.AfterFunc(0, func() {
		if r, err := h.run(run); err == nil {
			_ = r.apply(lostEvent{seat{fmt.Sprintf("%d.%d", term, round), node}}) // else patience does it
		}
	})
}

// attend records that the daemon of a node speaks over the connection of a request.
func (h *Hub) attend(ctx context.Context, r *run, at seat) {
	if h.Connection == nil || at.of == "" {
		return
	}
	if conn := h.Connection(ctx); conn != nil {
		r.attend(conn, at)
	}
}

// Summary describes a run; an unknown one is empty.
func (h *Hub) Summary(run string) Summary {
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
