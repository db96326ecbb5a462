// Package serve hosts the judges of hangs: the shell around one hang.Incident for each run with reports. It gives the
// Incidents their time, delivers their messages, and bounds the memory that nodes may use.
//
// A node takes part through a Transport: a Hub in its own process, or one elsewhere over HTTP. It reports its
// suspicions and the evidence that it was asked for; it is asked by a notice of the rendezvous, or by the answer to
// its report. Only a launcher of the world of running workers may report. The launcher's ID proves that a report is
// its own; no other client knows it.
//
// A run without reports costs nothing here. Goroutines: one for each run with something to deliver (Config.Notify and
// the like) until it is delivered.
package serve

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/hang"
	"dlrover-run/internal/job"
	"dlrover-run/internal/runhost"
)

// Transport carries a node's reports to the judge of its run. A Hub is a Transport.
type Transport interface {
	// Post delivers a report, which belongs to the receiver from then on. The answer is another question of the judge
	// to this node, as in a notice; Seq is 0 if there is none. A report may be repeated. ErrNotMember: the launcher
	// is in no running world, or in one of another epoch (yet); it repeats its suspicions with the epoch of its
	// newest directive.
	Post(ctx context.Context, run string, r hang.Report) (hang.Ask, error)
	// Picture is the known state of the run's hangs, with evidence only if that is set: the caller must not write to
	// memory that it refers to. ErrUnknownRun: no node has reported anything.
	Picture(ctx context.Context, run string, evidence bool) (hang.Picture, error)
	// Collect asks all nodes of the run for stacks, though nothing may hang, and returns the Ask.Seq of that. Picture has
	// them when its Collection is that and Collected is set, which is within 20 seconds. ErrNotMember: no workers run.
	Collect(ctx context.Context, run string) (uint64, error)
}

// Bounds of a Hub's memory.
const (
	// maxHeld is about how many bytes of evidence are kept of all runs, and maxRunHeld of one. Evidence beyond is
	// taken without its stacks, and then not at all.
	maxHeld    = 512 << 20
	maxRunHeld = 192 << 20
	// retention is how long the state of a run is kept that Config.Keep does not know.
	retention = 10 * time.Minute
)

// Config connects a Hub with the server of the rendezvous. Notify, Note, Slowed, Order, Doubt and Drain are called
// without a lock, one at a time for each run and in order.
type Config struct {
	// Spec is the one from the run's first node. It is asked for at the first report.
	Spec func(run string) (hang.Spec, error)
	// Seat is a launcher's place in the newest world of the run.
	Seat func(run, id string) (Seat, error)
	// World is the one with the running workers.
	World func(run string) (hang.World, error)
	// Saved is the run's newest checkpoint; false: none is known. It is called with the run locked, and must be quick. Nil
	// knows none.
	Saved func(run string) (step int64, known bool)
	// Notify sends an Ask to all nodes of the run, or to Ask.To.
	Notify func(run string, a hang.Ask)
	// Note takes a line for the run's timeline.
	Note func(run string, n job.Note)
	// Slowed takes how many steps fewer the world of an epoch makes in a second because of ranks that slow it; 0: none do.
	// Nil takes nothing.
	Slowed func(run string, e job.EpochID, fewer float64)
	// Order gives an order to the run.
	Order func(run string, o hang.Order)
	// Doubt has all nodes of the run checked when nodes are checked next.
	Doubt func(run, why string)
	// Drain has a node leave that slows the job, or says why not. Spec.Slow asks for it.
	Drain func(run string, d hang.Drain) error
	// Kept is what an earlier Hub had to say of the run; nil: nothing.
	Kept func(run string) hang.Kept
	// Keep reports whether the rendezvous knows the run; nil knows none. It is called now and then.
	Keep func(run string) bool
	Log  *slog.Logger

	// In all but tests hang.Judge, maxHeld and maxRunHeld.
	judge               func(hang.World, iter.Seq[hang.Evidence], []hang.StoreWait) hang.Verdict
	maxHeld, maxRunHeld int
}

// Seat is a launcher's place in a world.
type Seat struct {
	Epoch     job.EpochID
	GroupRank int
	Name      string // of the node
	Running   bool   // its workers run, or have succeeded while others run
}

// Hub keeps the judges of all runs of one rendezvous. It has no memory on disk: the nodes repeat their suspicions to
// a new one.
type Hub struct {
	cfg      Config
	stats    stats
	held     atomic.Int64  // bytes of evidence, of all runs
	decoding chan struct{} // a place for every report that is unpacked now
	reading  chan struct{} // a place for every large body that is read now
	sending  chan struct{} // a place for every file of evidence that is sent now
	senders  sync.Map      // of large bodies that are read now: run and launcher
	runs     *runhost.Host[*run]

	mu     sync.Mutex
	unread map[string]bool // runs with an unreadable Spec, which was logged
}

// New returns a Hub without runs.
func New(cfg Config) *Hub {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.judge == nil {
		cfg.judge = hang.Judge
	}
	cfg.maxHeld, cfg.maxRunHeld = cmp.Or(cfg.maxHeld, maxHeld), cmp.Or(cfg.maxRunHeld, maxRunHeld)
	return &Hub{
		cfg: cfg, unread: map[string]bool{},
		runs: runhost.New[*run](runhost.Config{Closed: errClosed, Full: tooMuch("%d runs", runhost.MaxRuns),
			Forgotten: func(string) error { return errClosed }}),
		decoding: make(chan struct{}, runtime.GOMAXPROCS(0)+1),
		reading:  make(chan struct{}, maxReading), sending: make(chan struct{}, maxSending),
	}
}

// judge is Config.judge. A panic on unexpected evidence must not end the whole service.
func (h *Hub) judge(run string, w hang.World, es iter.Seq[hang.Evidence], store []hang.StoreWait) (v hang.Verdict) {
	defer func() {
		if p := recover(); p != nil {
			h.cfg.Log.Error("the evidence of a hang cannot be judged", "run_id", run, "err", p, "stack", string(debug.Stack()))
			v = hang.Verdict{}
		}
	}()
	return h.cfg.judge(w, es, store)
}

// Close ends every timer. It waits for calls of Config's functions that are under way.
func (h *Hub) Close() { h.runs.Close() }

// Ended notes that an epoch of the run has ended. It does not block: the rendezvous may call it with its own lock
// held.
func (h *Hub) Ended(run string, e job.EpochID) {
	if r := h.runs.Get(run); r != nil {
		r.ended.Store(&e)
		time.AfterFunc(0, r.Expire)
	}
}

// Forget drops all that is known of a run.
func (h *Hub) Forget(run string) {
	h.runs.Drop(run, nil)
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.unread, run)
}

// Post implements Transport.
func (h *Hub) Post(_ context.Context, run string, r hang.Report) (hang.Ask, error) {
	fit(&r)
	return h.take(run, r.ID, &parcel{report: r})
}

// take delivers the data from a node.
func (h *Hub) take(run, id string, p *parcel) (hang.Ask, error) {
	seat, err := h.cfg.Seat(run, id)
	switch {
	case err != nil:
		return hang.Ask{}, notMember(run, err)
	case seat.Epoch != p.report.Epoch:
		return hang.Ask{}, notMember(run, errOtherEpoch)
	case !seat.Running:
		return hang.Ask{}, notMember(run, errStopped)
	}
	r, err := h.open(run)
	if err != nil {
		return hang.Ask{}, err
	}
	return r.take(seat, p)
}

// Kept is what a later Hub has to know of the run; the zero value without hangs, or before the first report.
func (h *Hub) Kept(run string) hang.Kept {
	r := h.runs.Get(run)
	if r == nil {
		return hang.Kept{}
	}
	r.Lock()
	defer r.Unlock()
	return r.of.Kept()
}

// Picture implements Transport.
func (h *Hub) Picture(_ context.Context, run string, evidence bool) (hang.Picture, error) {
	p, all, err := h.pictures(run, evidence)
	if err == nil && evidence {
		p.Evidence = slices.Collect(all)
	}
	return p, err
}

// pictures returns a picture and its evidence apart; the evidence is made on demand.
func (h *Hub) pictures(run string, evidence bool) (hang.Picture, iter.Seq[hang.Evidence], error) {
	r, err := h.runs.Find(run, unknownRun)
	if err != nil {
		return hang.Picture{}, nil, err
	}
	return r.picture(evidence)
}

// Collect implements Transport.
func (h *Hub) Collect(_ context.Context, run string) (uint64, error) {
	w, err := h.cfg.World(run)
	if err != nil {
		return 0, notMember(run, err)
	}
	r, err := h.open(run)
	if err != nil {
		return 0, err
	}
	return r.collect(w)
}

// open returns a run, a new one if need be.
func (h *Hub) open(id string) (*run, error) {
	if r := h.runs.Get(id); r != nil {
		return r, nil
	}
	spec, err := h.cfg.Spec(id)
	if err != nil {
		return nil, h.refuse(id, err)
	}
	h.runs.Prune(time.Now(), false, h.cfg.Keep)
	return h.runs.Open(id, func() *run { return h.newRun(id, spec) })
}

// refuse is why a run without a Spec is not judged. That its Spec cannot be read is logged once.
func (h *Hub) refuse(run string, err error) error {
	if !errors.Is(err, hang.ErrSpec) {
		return notMember(run, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.unread[run] && len(h.unread) < runhost.MaxRuns {
		h.unread[run] = true
		h.cfg.Log.Warn("no hang of the run is found: its launchers and this daemon need the same version", "run_id", run,
			"err", err)
	}
	return fmt.Errorf("%w in run %q: %w", ErrBadRequest, run, err)
}
