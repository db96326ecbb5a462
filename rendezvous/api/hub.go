// Package api serves rendezvous Rounds over HTTP/1.1 and JSON, and speaks to them.
//
// Hub is the shell around the Rounds of any number of runs: it gives them time,
// holds the long-polls and hands out directives. Handler serves a Hub over HTTP,
// Client is its other side, and both are a Service. Session keeps one launcher in
// one run over any Service. The wire is described in docs/reference/rendezvous-api.md.
//
// Goroutines: a Hub has one timer a run, and a few that look whether launchers live; a Session owns one until Close.
package api

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"dlrover-run/internal/conns"
	"dlrover-run/internal/job"
	"dlrover-run/internal/runhost"
	"dlrover-run/internal/stable"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/ledger"
)

// Service is the rendezvous as a launcher uses it: a Hub in its own process, or a Client of one elsewhere.
type Service interface {
	// Join asks for a place in the next world of run. It does not wait for one.
	Join(ctx context.Context, run string, ev rendezvous.Join) error
	// Watch waits for a directive other than the one in after or, if after asks for them, for notices; the answer has the
	// present directive in either case. It returns ErrNothingNew when the service has held the request for long enough.
	// With after.Join it is Join and Watch in one request; ErrNothingNew then means that the node has joined.
	Watch(ctx context.Context, run, id string, after Cursor) (News, error)
	// Report delivers a Ready, Failing, Success, Cleared, Barred, Doubt or Leaving.
	Report(ctx context.Context, run string, ev rendezvous.Event) error
	// Leave takes the node out of the run and returns the evidence about its end.
	Leave(ctx context.Context, run string, ev rendezvous.Leave) (job.Evidence, error)
	// World is the table of the newest sealed world.
	World(ctx context.Context, run string) ([]job.Member, error)
}

// Errors of a Service.
var (
	// ErrNothingNew ends a Watch without news; watch again.
	ErrNothingNew = errors.New("api: nothing new")
	// ErrUnauthorized: the token is missing or wrong. Trying again is useless.
	ErrUnauthorized = errors.New("the job token was not accepted")
	// ErrBadRequest: the service could not read the request. Trying again is useless.
	ErrBadRequest = errors.New("the rendezvous cannot be spoken to")
	// errTooManyRuns: the daemon keeps as many runs as it may.
	errTooManyRuns = errors.New("the rendezvous daemon keeps too many runs")
	// ErrClosed: the Hub has shut down.
	ErrClosed = errors.New("api: closed")
	// ErrUnknownRun answers orders, notices and questions about events of an unknown run.
	ErrUnknownRun = errors.New("the rendezvous daemon has no such run")
	// ErrNotEnded: a run that has not ended cannot be forgotten.
	ErrNotEnded = errors.New("the run has not ended")
	// errNoNotices: the launchers of the node do not read notices.
	errNoNotices = errors.New("the node's launcher is of a version without notices")
	// ErrNotFound: the service has nothing under this path. Trying again is useless.
	ErrNotFound = fmt.Errorf("%w: not found", ErrBadRequest)
)

// retention is how long a run that is paused or has barred nodes is kept for launchers that come late, and an ended one
// without HubConfig.Keep.
const retention = 10 * time.Minute

// Bounds of the runs without nodes, and of the nodes of ended runs: above them, the runs that emptied first are
// forgotten.
const (
	maxLeftRuns  = 1024
	maxLeftNodes = 16384
)

// nameless is the id of the run of jobs that were given none: torchrun's default. It never means the same job again.
const nameless = "none"

// HubConfig connects a Hub to the rest of its program.
type HubConfig struct {
	// Topology is the first one; SetTopology replaces it.
	Topology rendezvous.Topology
	// Observe receives every note of every run in order, with the run locked: it
	// must be quick and must not call the Hub. Nil drops them.
	Observe func(run string, n rendezvous.Note)
	// Gate receives the IDs of nodes of a run that have just got a Check, in order and one call at a time for each run.
	// Helpers are cleared already and only help to examine the subjects; a Cleared releases them, and the gate does not
	// wait for them. Gate may call the Hub, and must be quick: the request that led here waits. With nil the nodes alone
	// answer.
	Gate func(run string, subjects, helpers []string)
	// Released receives, as Gate does and in order with it, the IDs of nodes that have got another directive instead of
	// their Check before they answered: their answers are no longer needed. It may be nil. Nodes that go away are in the
	// notes instead.
	Released func(run string, ids []string)
	// Saved returns the newest step of which all workers of a run have a checkpoint, if there is one. It completes the
	// Progress in nodes' reports of an epoch's end. It must be quick, and must not call the Hub. Nil: there are none.
	Saved func(run string) (step int64, known bool)
	// Cleared receives the launcher's ID whenever the check of a node of a run has passed in company, or alone where it
	// needs none. It must be quick, and may call the Hub. It may be nil.
	Cleared func(run, id string, covered []string)
	// Suspicious is the Rounds'. It is called with the run locked, and must not call the Hub.
	Suspicious func(job.Evidence) string
	// Suspect is the Rounds', and called as Suspicious is.
	Suspect func(machine string) bool
	// Keep is how long a run is kept that has ended, or that all nodes have left: for people and, if it has succeeded, for
	// launchers that are started later under its name, which get its result. With 0, a run with a history is kept for ten
	// minutes at least, and launchers open the run anew.
	Keep time.Duration
	// Avoid are the machines that pods of a replacement should avoid, for RunStatus. Nil knows of none.
	Avoid func() []string
	// Waits are the things that a run without workers waits for, in words; nil: nobody says. It is called without locks,
	// must be quick, and must not call the Hub.
	Waits func(RunStatus) []string
	// Keeper keeps the decisions about the runs; nil: nobody does.
	Keeper Keeper
}

// Hub keeps the Rounds of all runs of one daemon.
type Hub struct {
	cfg      HubConfig
	topology atomic.Pointer[rendezvous.Topology]
	server   atomic.Pointer[rendezvous.Server] // nil: no launcher
	runs     *runhost.Host[*run]
	lines    *archive
	lives    *lives
	looking  atomic.Bool // soon, for runs that miss each other's nodes
}

// NewHub returns a Hub without runs.
func NewHub(cfg HubConfig) *Hub {
	h := &Hub{cfg: cfg, lines: newArchive(maxLines), lives: newLives()}
	h.topology.Store(&cfg.Topology)
	full := fmt.Errorf("%w: %d", errTooManyRuns, runhost.MaxRuns)
	h.runs = runhost.New[*run](runhost.Config{Closed: ErrClosed, Full: full, Forgotten: unknownRun, Waits: true})
	return h
}

// Close ends every held request, every timer and every look at a node.
func (h *Hub) Close() {
	h.runs.Close()
	h.lives.close()
}

// find returns a run that exists, or the error of absent.
func (h *Hub) find(id string, absent func(id string) error) (*run, error) {
	if h.cfg.Keep > 0 {
		h.prune(time.Now(), false)
	}
	return h.runs.Find(id, absent)
}

// runsOfOne is how many runs nodes of one conns.Origin may begin: half of the room is for others.
const runsOfOne = runhost.MaxRuns / 2

// open returns a run, a new one if need be. Its first node is from a conns.Origin, "" for unknown.
func (h *Hub) open(id, from string) (*run, error) {
	create := h.runs.Get(id) == nil
	if h.cfg.Keep > 0 || create {
		h.prune(time.Now(), create && h.runs.Len() >= runhost.MaxRuns)
	}
	if create && from != "" && h.runs.Len() >= runsOfOne {
		begun := 0
		for _, r := range h.runs.All() {
			if r.from == from {
				begun++
			}
		}
		if begun >= runsOfOne {
			return nil, fmt.Errorf("%w: %d that %s has begun, and half of the room is for others", errTooManyRuns, begun, from)
		}
	}
	return h.runs.Open(id, func() *run {
		r := h.newRun(id, nil)
		r.from = from
		return r
	})
}

// prune forgets runs, once a minute at most unless it is urgent.
func (h *Hub) prune(now time.Time, urgent bool) {
	if !h.runs.Prune(now, urgent, nil) {
		return
	}
	all := h.runs.All()
	var left []leftRun
	for _, r := range all {
		if l, ok := r.left(); ok {
			left = append(left, l)
		}
	}
	stable.Sort(left, func(a, b leftRun) int { return b.at.Compare(a.at) }) // the newest first
	runs, nodes := min(maxLeftRuns, max(runhost.MaxRuns-1-(len(all)-len(left)), 0)), 0
	for i, l := range left {
		if i >= runs || nodes > 0 && nodes+l.nodes > maxLeftNodes {
			h.dropLeft(l.run)
			continue
		}
		nodes += l.nodes
	}
}

// leftRun is a run without nodes: since when, and how many nodes are kept of it.
type leftRun struct {
	run   *run
	at    time.Time
	nodes int
}

// dropLeft drops a run if no node is in it.
func (h *Hub) dropLeft(r *run) {
	h.runs.Drop(r.id, func(kept *run) bool { return kept == r && !r.idle.IsZero() })
}

// Forget drops a run that has ended. ErrUnknownRun, ErrNotEnded, rendezvous.ErrFinishing, while its last nodes leave,
// and ErrClosed are the errors.
func (h *Hub) Forget(id string) error {
	r, err := h.existing(id)
	if err != nil {
		return err
	}
	switch s := r.status(false); {
	case s.Outcome == "":
		return fmt.Errorf("%w: %q", ErrNotEnded, id)
	case s.Members+s.Waiting > 0:
		return rendezvous.ErrFinishing
	}
	h.dropLeft(r)
	return nil
}

func unknownRun(id string) error { return fmt.Errorf("%w: %q", ErrUnknownRun, id) }

// existing returns a run that exists, or ErrUnknownRun.
func (h *Hub) existing(id string) (*run, error) { return h.find(id, unknownRun) }

// member returns a run that exists, or ErrUnknownNode.
func (h *Hub) member(id string) (*run, error) {
	return h.find(id, func(string) error { return rendezvous.ErrUnknownNode })
}

// Join implements Service.
func (h *Hub) Join(_ context.Context, id string, ev rendezvous.Join) error {
	r, err := h.open(id, conns.Origin(ev.Node.Peer))
	if err != nil {
		return err
	}
	if ev.Stopped.Round > 0 {
		ev.Progress = h.cfg.saved(id, ev.Progress)
	}
	if err = r.step(ev); err != nil {
		h.forgetUnused(r)
		return err
	}
	h.lookForOtherRuns(r)
	return nil
}

// forgetUnused drops a run that was made for a node that it then refused. One that has had nodes, or an order, keeps
// its state. A node that joins the run at this moment tries again.
func (h *Hub) forgetUnused(r *run) {
	h.runs.Drop(r.id, func(kept *run) bool { return kept == r && !r.used && !r.tellsLocked() })
}

// Report implements Service.
func (h *Hub) Report(_ context.Context, id string, ev rendezvous.Event) error {
	r, err := h.member(id)
	if err != nil {
		return err
	}
	if f, ok := ev.(rendezvous.Failing); ok {
		f.Progress = h.cfg.saved(id, f.Progress)
		ev = f
	}
	if err := r.step(ev); err != nil {
		return err
	}
	if c, ok := ev.(rendezvous.Cleared); ok && h.cfg.Cleared != nil && tellsOfACheck(c, time.Now()) {
		h.cfg.Cleared(id, c.ID, c.Covered)
	}
	if departs(ev) {
		return h.cfg.settle(id)
	}
	return nil
}

// tellsOfACheck reports whether c is the result of a test: one that holds no longer than until its end had no partner
// for the node.
func tellsOfACheck(c rendezvous.Cleared, now time.Time) bool {
	return !c.Unchecked && (c.Until.IsZero() || c.Until.After(now))
}

// saved adds to p the step of the run's checkpoints.
func (c *HubConfig) saved(run string, p job.Progress) job.Progress {
	if c.Saved == nil {
		return p
	}
	if step, known := c.Saved(run); known && step > 0 {
		p.Checkpoint, p.Saving = max(p.Checkpoint, step), true
	}
	return p
}

// Leave implements Service.
func (h *Hub) Leave(_ context.Context, id string, ev rendezvous.Leave) (job.Evidence, error) {
	r, err := h.member(id)
	if err != nil {
		return job.Evidence{}, err
	}
	over, e, err := r.leave(ev)
	if err == nil && !over {
		err = h.cfg.settle(id) // else a later daemon waits for the node
	}
	return e, err
}

// World implements Service.
func (h *Hub) World(_ context.Context, id string) ([]job.Member, error) {
	r, err := h.member(id)
	if err != nil {
		return nil, err
	}
	r.Lock()
	defer r.Unlock()
	return r.round.World(), nil
}

// Params are the rules of a run, those of New before any node has joined it. ErrUnknownRun and ErrClosed are the
// errors.
func (h *Hub) Params(id string) (rendezvous.Params, error) {
	r, err := h.existing(id)
	if err != nil {
		return rendezvous.Params{}, err
	}
	r.Lock()
	defer r.Unlock()
	return rendezvous.ParamsOf(r.round), nil
}

// Seat is the place of a node, by its launcher's ID, in the newest sealed world of a run. ErrUnknownNode: it has none.
func (h *Hub) Seat(id, node string) (rendezvous.Seat, error) {
	r, err := h.member(id)
	if err != nil {
		return rendezvous.Seat{}, err
	}
	r.Lock()
	defer r.Unlock()
	return r.round.Seat(node)
}

// Crew is the world with running workers, by group rank, and its epoch. ErrUnknownRun and rendezvous.ErrNotRunning are
// the errors.
func (h *Hub) Crew(id string) (job.EpochID, []job.Member, error) {
	r, err := h.existing(id)
	if err != nil {
		return job.EpochID{}, nil, err
	}
	r.Lock()
	defer r.Unlock()
	epoch, runs := r.round.Running()
	if !runs {
		return job.EpochID{}, nil, rendezvous.ErrNotRunning
	}
	return epoch, r.round.World(), nil
}

// Roster are the nodes of a run that are here, in no order. ErrUnknownRun is the only error.
func (h *Hub) Roster(id string) ([]rendezvous.Member, error) {
	r, err := h.existing(id)
	if err != nil {
		return nil, err
	}
	r.Lock()
	defer r.Unlock()
	return slices.Collect(r.round.Members()), nil
}

// IDs are those of the launchers that are in a run, in no order. They must not be sent to nodes.
func (h *Hub) IDs(id string) []string {
	r, err := h.existing(id)
	if err != nil {
		return nil
	}
	r.Lock()
	defer r.Unlock()
	var ids []string
	for m := range r.round.Members() {
		ids = append(ids, m.ID)
	}
	return ids
}

// Names are those of the nodes of a run with ids, as far as they are here.
func (h *Hub) Names(id string, ids []string) map[string]string {
	r, err := h.existing(id)
	if err != nil {
		return nil
	}
	r.Lock()
	defer r.Unlock()
	names := make(map[string]string, len(ids))
	for _, id := range ids {
		if m, err := r.round.Member(id); err == nil {
			names[id] = m.Name
		}
	}
	return names
}

// Annotate adds a line to the timeline of a run, as if the run had noted it: for mounted handlers. Node is the name of
// a node, or "". The event must be none of the run's own. Observe receives it, so it must not call Annotate.
// ErrUnknownRun and ErrClosed are the errors.
func (h *Hub) Annotate(id string, event job.Event, node, text string) error {
	r, err := h.existing(id)
	if err != nil {
		return err
	}
	r.Lock()
	defer r.Unlock()
	return r.annotateLocked(time.Now(), event, node, text)
}

// Told is Annotate for a node's reports about itself. In ten minutes, it drops all above 8 lines of an event by a node,
// or 64 by all of its run. It may precede the first join: the run then begins with the line, and is kept for ten
// minutes for its nodes. errTooManyRuns and ErrClosed are the errors.
func (h *Hub) Told(id string, event job.Event, node, text string) error {
	r, err := h.open(id, "")
	if err != nil {
		return err
	}
	return r.told(event, node, text)
}

// Order gives an order to a run. Besides the errors of the Round there are ErrUnknownRun and ErrClosed.
func (h *Hub) Order(id string, o rendezvous.Order) error {
	r, err := h.existing(id)
	if err != nil {
		return err
	}
	if err := r.step(o); err != nil {
		return err
	}
	return h.cfg.settle(id)
}

// SetTopology replaces the topology of every run, from its next seal on, and of those to come.
func (h *Hub) SetTopology(t rendezvous.Topology) {
	h.topology.Store(&t) // before the runs are listed: no new one misses it
	for _, r := range h.runs.All() {
		_ = r.step(rendezvous.Rewire{Topology: t}) // only a run that has ended meanwhile refuses
	}
}

// ServedBy says that a launcher serves the runs of h that are opened from now on: their members learn which of them may
// serve next.
func ServedBy(h *Hub, s rendezvous.Server) { h.server.Store(&s) }

// Watch implements Service. While it waits the node counts as present; when ctx ends
// it counts as suspect.
func (h *Hub) Watch(ctx context.Context, id, node string, after Cursor) (News, error) {
	if after.Join != nil {
		if err := h.Join(ctx, id, *after.Join); err != nil {
			return News{}, err
		}
		after.Join = nil
	}
	n, err := h.watch(ctx, id, node, after, nil)
	if err != nil {
		return News{}, err
	}
	return *n, nil
}

// watch is Watch without large values on the stack, for goroutines that wait in it. Over is the connection, if it is
// known.
func (h *Hub) watch(ctx context.Context, id, node string, after Cursor, over *line) (*News, error) {
	w, hold, err := begin(h, id, node, after, over)
	if err != nil {
		return nil, err
	}
	n, err := w.run.await(ctx, node, w.after, hold)
	return w.end(n, err, err != nil && ctx.Err() != nil)
}

// visit is a Watch that is under way.
type visit struct {
	hub   *Hub
	run   *run
	node  string
	after Cursor
	over  *line
}

// begin begins a Watch, and returns how long it is held.
func begin(h *Hub, id, node string, after Cursor, over *line) (w visit, hold time.Duration, err error) {
	r, err := h.member(id)
	if err != nil {
		return w, 0, err
	}
	if hold, err = r.attach(node, &after); err != nil {
		return w, 0, err
	}
	over.watched(h, id, node)
	return visit{h, r, node, after, over}, hold, nil
}

// end ends a Watch with its result; broken: the launcher does not receive it.
func (w *visit) end(n *News, err error, broken bool) (*News, error) {
	if err == nil && decides(&n.Directive) {
		err = w.hub.cfg.settle(w.run.id)
	}
	if err == nil && w.after.Waits > 0 {
		n.Waiting = w.run.waiting(time.Now(), n.Kind)
	}
	silent := broken && w.over.silent()
	w.run.detach(rendezvous.Detach{ID: w.node, Broken: broken, Silent: silent})
	switch {
	case !broken:
		w.over.recheck()
	case !silent:
		w.hub.confirm(w.over, w.run, w.node)
	}
	return n, err
}

// RunStatus is a run for the status page and for metrics.
type RunStatus struct {
	Run string `json:"run"`
	rendezvous.Status
	Nodes []rendezvous.NodeStatus `json:"nodes,omitempty"`
	// Ended are the nodes of a run that has ended, as they were then.
	Ended []rendezvous.NodeStatus `json:"ended,omitempty"`
	// Waits are the things that a run without workers waits for, in words.
	Waits []string `json:"waits,omitempty"`
	// Ledger is the account of the run's time; nil: no node has joined.
	Ledger *ledger.Report `json:"ledger,omitempty"`
	// Avoid are the machines that replacement pods should avoid, in any run.
	Avoid []string `json:"avoid,omitempty"`
}

func (c *HubConfig) avoid() []string {
	if c.Avoid == nil {
		return nil
	}
	return c.Avoid()
}

// Runs describes every run, by name; with nodes, every node of each, and machines to avoid.
func (h *Hub) Runs(nodes bool) []RunStatus {
	var avoid []string
	if nodes {
		avoid = h.cfg.avoid()
	}
	if h.cfg.Keep > 0 {
		h.prune(time.Now(), false)
	}
	all := h.runs.All()
	out := make([]RunStatus, 0, len(all))
	for _, id := range slices.Sorted(maps.Keys(all)) {
		s := all[id].status(nodes)
		s.Avoid = avoid
		out = append(out, s)
	}
	return out
}

// Run describes a run and every node of it. ErrUnknownRun and ErrClosed are the errors.
func (h *Hub) Run(id string) (RunStatus, error) {
	r, err := h.existing(id)
	if err != nil {
		return RunStatus{}, err
	}
	s := r.status(true)
	s.Avoid = h.cfg.avoid()
	return s, nil
}

// Idle reports whether no node is in any run: a launcher that serves the rendezvous
// waits for this before it exits.
func (h *Hub) Idle() bool {
	for _, s := range h.Runs(false) {
		if s.Members+s.Waiting > 0 {
			return false
		}
	}
	return true
}
