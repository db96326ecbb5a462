// Package serve is the meeting point of the nodes that check each other: the shell around one netcheck.Check for each
// run. It gives the Checks their time, holds the nodes' requests until there is an assignment, and hands both ends of a
// test their key.
//
// A node takes part through a Transport: a Hub in its own process, or a remote one over HTTP. It sends its message
// (Request) and gets its newest assignment, at once if it does not know that assignment yet. Lost answers are repeated,
// and every request may be repeated.
//
// Only a launcher that the rendezvous has told to be checked (Expect) may take part. The launcher's ID authenticates
// its requests. Nobody else learns the ID: the other end of a test and the readers of a Picture get its netcheck.Alias.
//
// Goroutines: one for each run with something to report (Config.Bar, Config.Note) until it is reported; one for each
// HTTP server that has held a request, one for each idle connection from which such a request came, and one that
// answers. Close ends them.
package serve

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/longpoll"
	"dlrover-run/internal/runhost"
	"dlrover-run/netcheck"
)

// Transport carries a node's requests to the service of a run's checks. It returns the newest assignment of the node as
// soon as it has another number than the request; after some time, or at once with NoWait, one with the duty Rest and
// the request's own number. A Hub is a Transport.
type Transport interface {
	Next(ctx context.Context, run string, req Request) (netcheck.Assignment, error)
}

const (
	// hold is how long a request waits for an assignment. A client has to be more patient.
	hold = 20 * time.Second
	// obeyTime bounds an excluded node's own report to the rendezvous.
	obeyTime = 3 * time.Second
	// retention is how long the Picture of a run is kept that Config.Keep does not know.
	retention = 10 * time.Minute
)

// Config has the callbacks and settings from the server of the rendezvous. Bar and Note are called without a lock, one
// at a time for each run and in order.
type Config struct {
	// Spec returns the check settings of a run, on which its nodes have agreed. It is called when a check begins.
	Spec func(run string) (netcheck.Spec, error)
	// Names returns the known names of the nodes of a run, by their launchers' IDs; nil knows none. It is called when
	// nodes are expected: a node that never comes does not give its name itself.
	Names func(run string, ids []string) map[string]string
	// Topology names the leaf switch of a node, "" for unknown; nil knows none. It must be safe for concurrent use.
	Topology func(netcheck.Node) string
	// Bar bars a node that did not take part, or does not obey a verdict that leaves it out. The aspect is that of the
	// verdict.
	Bar func(run, id, aspect, reason string)
	// Note takes a line for the run's timeline.
	Note func(run string, n job.Note)
	// Keep reports whether the rendezvous knows the run; nil knows none. It is called now and then.
	Keep func(run string) bool
	Log  *slog.Logger

	check func(netcheck.Config) check // netcheck.New, in all but tests
}

// check is a netcheck.Check.
type check interface {
	Step(now time.Time, ev netcheck.Event) []netcheck.Action
	Next() time.Time
	Picture() netcheck.Picture
	Progress() string
}

// Hub keeps the checks of all runs of one rendezvous. It has no memory on disk: to a new one the nodes introduce
// themselves again, and are checked anew.
type Hub struct {
	cfg   Config
	stats stats
	large chan struct{} // one place for each sender of a large request
	pool  longpoll.Pool // of requests that are held
	runs  *runhost.Host[*run]
}

// New returns a Hub without runs.
func New(cfg Config) *Hub {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.check == nil {
		cfg.check = func(c netcheck.Config) check { return netcheck.New(c) }
	}
	h := &Hub{cfg: cfg, large: make(chan struct{}, maxLarge)}
	full := fmt.Errorf("%w: %d runs", errLimit, runhost.MaxRuns)
	h.runs = runhost.New[*run](runhost.Config{Closed: errClosed, Full: full, Forgotten: unknownRun})
	return h
}

// Close ends every held request and every timer. It waits for calls of Bar and Note that are under way.
func (h *Hub) Close() {
	h.runs.Close()
}

// Expect announces nodes, by their launchers' IDs, that the rendezvous has told to be checked. Helpers have passed
// before and only help. It fails if the run's Spec is not available, or there are too many runs: then these nodes
// cannot take part.
func (h *Hub) Expect(id string, subjects, helpers []string) error {
	r, err := h.open(id)
	if err == nil {
		err = r.expect(subjects, helpers)
	}
	if err != nil {
		h.cfg.Log.Error("the nodes cannot be checked", "run_id", id, "nodes", len(subjects), "err", err)
	}
	return err
}

// Gone reports that the launcher has left the run, or has another directive than to be checked. It does not block, and
// calls neither Bar nor Note itself.
func (h *Hub) Gone(run, id string) {
	if r := h.runs.Get(run); r != nil {
		r.gone(id)
	}
}

// Next implements Transport.
func (h *Hub) Next(ctx context.Context, run string, req Request) (netcheck.Assignment, error) {
	if err := req.check(); err != nil {
		return netcheck.Assignment{}, err
	}
	r, err := h.runs.Find(run, notTold)
	if err != nil {
		return netcheck.Assignment{}, err
	}
	return r.next(ctx, req)
}

// Picture returns the state of a run's checks, with aliases for the launchers' IDs.
func (h *Hub) Picture(run string) (netcheck.Picture, error) {
	r, err := h.runs.Find(run, unknownRun)
	if err != nil {
		return netcheck.Picture{}, err
	}
	return r.picture()
}

// Progress is how far the check of a run is, in words; "" while there is none.
func (h *Hub) Progress(run string) string {
	r := h.runs.Get(run)
	if r == nil {
		return ""
	}
	r.Lock()
	defer r.Unlock()
	if r.Err() != nil || r.check == nil {
		return ""
	}
	return r.check.Progress()
}

func unknownRun(id string) error { return fmt.Errorf("%w in run %q", ErrUnknownRun, id) }

func notTold(run string) error {
	return fmt.Errorf("%w in run %q: the rendezvous has not told it to (yet), or it has left", errNotTold, run)
}

// open returns a run, a new one if need be.
func (h *Hub) open(id string) (*run, error) {
	now := time.Now()
	h.runs.Prune(now, false, h.cfg.Keep)
	return h.runs.Open(id, func() *run {
		return &run{hub: h, id: id, nodes: map[string]*member{}, keys: map[string]*key{}, seq: uint64(now.UnixNano())}
	})
}
