// Package api serves rendezvous Rounds over HTTP/1.1 and JSON, and speaks to them.
//
// Hub is the shell around the Rounds of any number of runs: it gives them time,
// holds the long-polls and hands out directives. Handler serves a Hub over HTTP,
// Client is its other side, and both are a Service. Session keeps one launcher in
// one run over any Service. The wire is described in docs/rendezvous-api.md.
//
// Goroutines: a Hub starts none (one timer a run); a Session owns one until Close.
package api

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"dlrover-run/rendezvous"
)

// Service is what a launcher needs of a rendezvous: a Hub in its own process, or a
// Client of one elsewhere.
type Service interface {
	// Join asks for a place in the next world of run. It does not wait for one.
	Join(ctx context.Context, run string, ev rendezvous.Join) error
	// Watch waits for a directive other than the one that after names or, for who asks, for notices; the answer has the
	// present directive in either case. It returns ErrNothingNew when the service has held the request for long enough.
	Watch(ctx context.Context, run, id string, after Cursor) (News, error)
	// Report delivers a Ready, Failing, Success, Cleared or Barred.
	Report(ctx context.Context, run string, ev rendezvous.Event) error
	// Leave takes the node out of the run and returns what is known about its end.
	Leave(ctx context.Context, run string, ev rendezvous.Leave) (rendezvous.Evidence, error)
	// World is the table of the newest sealed world.
	World(ctx context.Context, run string) ([]rendezvous.Member, error)
}

// Errors of a Service.
var (
	// ErrNothingNew ends a Watch without news; watch again.
	ErrNothingNew = errors.New("api: nothing new")
	// ErrUnauthorized: the token is missing or wrong. Trying again is useless.
	ErrUnauthorized = errors.New("the job token was not accepted")
	// ErrBadRequest: the service could not read the request. Trying again is useless.
	ErrBadRequest = errors.New("the rendezvous cannot be spoken to")
	// ErrTooManyRuns: the daemon keeps MaxRuns runs already.
	ErrTooManyRuns = errors.New("the rendezvous daemon keeps too many runs")
	// ErrClosed: the Hub has shut down.
	ErrClosed = errors.New("api: closed")
	// ErrUnknownRun answers who is no node of the run: an order, a notice, or a question for its events.
	ErrUnknownRun = errors.New("the rendezvous daemon has no such run")
	// ErrNoNotices: the launchers of the node do not read notices.
	ErrNoNotices = errors.New("the node's launcher is of a version without notices")
	// ErrNotFound: the service has nothing under this path. Trying again is useless.
	ErrNotFound = fmt.Errorf("%w: not found", ErrBadRequest)
)

// MaxRuns bounds the runs that one Hub keeps, finished ones included.
const MaxRuns = 4096

// retention is how long a run that has ended, is paused or has barred nodes is kept for launchers that come late.
const retention = 10 * time.Minute

// HubConfig is what a Hub knows beyond its requests.
type HubConfig struct {
	// Topology is the first one; SetTopology replaces it.
	Topology rendezvous.Topology
	// Observe receives every note of every run in order, with the run locked: it
	// must be quick and must not call the Hub. Nil drops them.
	Observe func(run string, n rendezvous.Note)
	// Gate receives the IDs of nodes of a run that have just been told to check themselves, in order and one call at a time
	// for each run. It may call the Hub, and must be quick: the request that led here waits. With nil the nodes alone
	// answer.
	Gate func(run string, ids []string)
}

// Hub keeps the Rounds of all runs of one daemon.
type Hub struct {
	cfg    HubConfig
	mu     sync.Mutex // before run.mu, never after
	runs   map[string]*run
	lines  *archive
	pruned time.Time // when abandoned runs were last looked for
	closed bool
}

type run struct {
	id     string
	cfg    *HubConfig
	line   *timeline
	mu     sync.Mutex
	round  *rendezvous.Round
	wake   map[string]chan struct{} // closed when the node has a new directive or a notice
	timer  *time.Timer
	due    time.Time
	idle   time.Time // since when nobody is here
	used   bool      // somebody has been
	closed error     // why nothing is done any more, or nil

	notices   ring[addressed]
	noticeSeq uint64 // of the newest notice; larger than that of any earlier daemon

	gates   [][]string // IDs for cfg.Gate, to be told when the lock is released
	telling bool       // somebody is telling them
}

// NewHub returns a Hub without runs.
func NewHub(cfg HubConfig) *Hub {
	return &Hub{cfg: cfg, runs: map[string]*run{}, lines: newArchive(maxLines)}
}

// Close ends every held request and every timer.
func (h *Hub) Close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for _, r := range h.runs {
		r.close(ErrClosed)
	}
}

// find returns the run, or nil if it does not exist and create is false.
func (h *Hub) find(id string, create bool) (*run, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, ErrClosed
	}
	if r := h.runs[id]; r != nil || !create {
		return r, nil
	}
	if now := time.Now(); now.Sub(h.pruned) > time.Minute {
		h.pruned = now
		h.pruneLocked(now)
	}
	if len(h.runs) >= MaxRuns {
		return nil, fmt.Errorf("%w: %d", ErrTooManyRuns, MaxRuns)
	}
	r := h.newRun(id)
	h.runs[id] = r
	return r, nil
}

// newRun makes a run whose numbers are larger than those of any that had its name before.
func (h *Hub) newRun(id string) *run {
	now := time.Now()
	base := uint64(now.UnixNano())
	return &run{
		id: id, cfg: &h.cfg, line: h.lines.open(base), idle: now, wake: map[string]chan struct{}{},
		round:     rendezvous.New(rendezvous.Config{Term: base, Topology: h.cfg.Topology}),
		noticeSeq: base, notices: ring[addressed]{limit: maxNotices},
	}
}

func (h *Hub) pruneLocked(now time.Time) {
	for id, r := range h.runs {
		if r.abandoned(now) {
			r.close(unknownRun(id))
			delete(h.runs, id)
		}
	}
}

// existing returns a run that exists, or ErrUnknownRun.
func (h *Hub) existing(id string) (*run, error) {
	r, err := h.find(id, false)
	if err == nil && r == nil {
		err = unknownRun(id)
	}
	return r, err
}

func unknownRun(id string) error { return fmt.Errorf("%w: %q", ErrUnknownRun, id) }

// member returns a run that exists, or ErrUnknownNode.
func (h *Hub) member(id string) (*run, error) {
	r, err := h.find(id, false)
	if err == nil && r == nil {
		err = rendezvous.ErrUnknownNode
	}
	return r, err
}

// Join implements Service.
func (h *Hub) Join(_ context.Context, id string, ev rendezvous.Join) error {
	r, err := h.find(id, true)
	if err != nil {
		return err
	}
	if err = r.step(ev); err != nil {
		h.forgetUnused(r)
	}
	return err
}

// forgetUnused drops a run that was made for a node that it then refused. One that had nodes before keeps what is known.
func (h *Hub) forgetUnused(r *run) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r.mu.Lock()
	unused := !r.used
	r.mu.Unlock()
	if unused && h.runs[r.id] == r {
		r.close(unknownRun(r.id)) // who comes for it at this moment tries again
		delete(h.runs, r.id)
	}
}

// Report implements Service.
func (h *Hub) Report(_ context.Context, id string, ev rendezvous.Event) error {
	r, err := h.member(id)
	if err != nil {
		return err
	}
	return r.step(ev)
}

// Leave implements Service.
func (h *Hub) Leave(_ context.Context, id string, ev rendezvous.Leave) (rendezvous.Evidence, error) {
	r, err := h.member(id)
	if err != nil {
		return rendezvous.Evidence{}, err
	}
	r.mu.Lock()
	defer r.unlock()
	if err = r.stepLocked(ev); err != nil || r.round.Status().Outcome == "" {
		return rendezvous.Evidence{}, err // a good-bye in the middle needs none
	}
	return r.round.Evidence(), nil
}

// World implements Service.
func (h *Hub) World(_ context.Context, id string) ([]rendezvous.Member, error) {
	r, err := h.member(id)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.round.World(), nil
}

// Order gives an order to a run. Beside the errors of the Round there are ErrUnknownRun and ErrClosed.
func (h *Hub) Order(id string, o rendezvous.Order) error {
	r, err := h.existing(id)
	if err != nil {
		return err
	}
	return r.step(o)
}

// SetTopology replaces the topology of every run, from its next seal on, and of those to come.
func (h *Hub) SetTopology(t rendezvous.Topology) {
	h.mu.Lock()
	h.cfg.Topology = t
	runs := slices.Collect(maps.Values(h.runs))
	h.mu.Unlock()
	for _, r := range runs {
		_ = r.step(rendezvous.Rewire{Topology: t}) // only a run that has ended meanwhile refuses
	}
}

// Watch implements Service. While it waits the node counts as present; when ctx ends
// it counts as suspect.
func (h *Hub) Watch(ctx context.Context, id, node string, after Cursor) (News, error) {
	r, err := h.member(id)
	if err != nil {
		return News{}, err
	}
	hold, err := r.attach(node, &after)
	if err != nil {
		return News{}, err
	}
	n, err := r.await(ctx, node, after, hold)
	r.detach(node, err != nil && ctx.Err() != nil)
	return n, err
}

// hold is how long a Watch waits: 20 seconds in a small run, a minute in a run of ten
// thousand nodes, so that idle watching costs at most about 170 requests a second. It
// is longer than keepAlive takes, so that a dead host shows as a broken connection.
func hold(nodes int) time.Duration {
	return min(20*time.Second+time.Duration(nodes)*4*time.Millisecond, time.Minute)
}

// attach begins a Watch. Notices "from now on" are those after the present one.
func (r *run) attach(node string, after *Cursor) (time.Duration, error) {
	r.mu.Lock()
	defer r.unlock()
	if after.Notices == 0 {
		after.Notices = r.noticeSeq
	}
	return hold(r.round.Size()), r.stepLocked(rendezvous.Attach{ID: node})
}

func (r *run) detach(node string, broken bool) {
	r.mu.Lock()
	defer r.unlock()
	if r.closed != nil {
		return
	}
	_ = r.stepLocked(rendezvous.Detach{ID: node, Broken: broken}) // a Detach is never refused
	if _, err := r.round.Directive(node); err != nil {
		delete(r.wake, node)
	}
}

func (r *run) await(ctx context.Context, node string, after Cursor, hold time.Duration) (News, error) {
	expired := time.NewTimer(hold)
	defer expired.Stop()
	for {
		n, wake, err := r.newer(node, after)
		if err != nil || wake == nil {
			return n, err
		}
		select {
		case <-wake:
		case <-expired.C:
			return News{}, ErrNothingNew
		case <-ctx.Done():
			return News{}, context.Cause(ctx)
		}
	}
}

// newer returns what is new after the cursor, or a channel that closes when something may be.
func (r *run) newer(node string, after Cursor) (n News, wake <-chan struct{}, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed != nil {
		return n, nil, r.closed
	}
	if n.Directive, err = r.round.Directive(node); err != nil {
		return n, nil, err
	}
	if after.WithNotices {
		n.Notices, n.NoticeSeq = r.noticesLocked(node, after.Notices), r.noticeSeq
	}
	if n.Directive.Seq != after.Directive || len(n.Notices) > 0 {
		return n, nil, nil
	}
	ch := r.wake[node]
	if ch == nil {
		ch = make(chan struct{})
		r.wake[node] = ch
	}
	return n, ch, nil
}

func (r *run) step(ev rendezvous.Event) error {
	r.mu.Lock()
	defer r.unlock()
	return r.stepLocked(ev)
}

func (r *run) stepLocked(ev rendezvous.Event) error {
	if r.closed != nil {
		return r.closed
	}
	now := time.Now()
	acts, err := r.round.Step(now, ev)
	for _, a := range acts {
		r.performLocked(now, a)
	}
	if !r.round.Empty() {
		r.idle, r.used = time.Time{}, true
	} else if r.idle.IsZero() {
		r.idle = now
		r.wakeAllLocked()
	}
	r.armLocked(now)
	return err
}

func (r *run) performLocked(now time.Time, a rendezvous.Action) {
	if a.Note != nil {
		r.line.note(now, *a.Note)
		if r.cfg.Observe != nil {
			r.cfg.Observe(r.id, *a.Note)
		}
	}
	if a.Ended != nil {
		r.line.end(now, *a.Ended)
	}
	if len(a.Gate) > 0 && r.cfg.Gate != nil {
		r.gates = append(r.gates, a.Gate)
	}
	if a.Directive != nil {
		r.wakeLocked(a.Node)
	}
}

// unlock releases the run after a step, and then tells cfg.Gate whom to check. Who finds another telling leaves it to
// that one, so that the order of the steps is kept; so does a step that cfg.Gate itself makes.
func (r *run) unlock() {
	if r.telling || len(r.gates) == 0 {
		r.mu.Unlock()
		return
	}
	r.telling = true
	for len(r.gates) > 0 && r.closed == nil {
		ids := r.gates[0]
		r.gates = r.gates[1:]
		r.mu.Unlock()
		r.cfg.Gate(r.id, ids)
		r.mu.Lock()
	}
	r.telling = false
	r.mu.Unlock()
}

func (r *run) wakeLocked(node string) {
	if ch := r.wake[node]; ch != nil {
		close(ch)
		delete(r.wake, node)
	}
}

func (r *run) wakeAllLocked() {
	for _, ch := range r.wake {
		close(ch)
	}
	clear(r.wake)
}

// armLocked sets the one timer of the run to when the Round next wants to be asked.
func (r *run) armLocked(now time.Time) {
	next := r.round.Next()
	if next.Equal(r.due) {
		return
	}
	if r.timer != nil {
		r.timer.Stop()
	}
	r.due = next
	if !next.IsZero() {
		r.timer = time.AfterFunc(max(next.Sub(now), 0), r.tick)
	}
}

func (r *run) tick() {
	r.mu.Lock()
	defer r.unlock()
	if r.closed != nil {
		return
	}
	r.due = time.Time{} // the timer is spent
	_ = r.stepLocked(rendezvous.Tick{})
}

// close ends every held request with err, and forgets the timeline.
func (r *run) close(err error) {
	r.line.close(err)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = err
	if r.timer != nil {
		r.timer.Stop()
	}
	r.wakeAllLocked()
}

// abandoned reports whether the run may be forgotten: nobody is here, and there is either nothing to tell to who comes
// late, or there has been for long enough.
func (r *run) abandoned(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.idle.IsZero() {
		return false
	}
	s := r.round.Status()
	if s.Outcome == "" && s.Paused == nil && len(s.Bars) == 0 {
		return now.Sub(r.idle) > time.Minute
	}
	return now.Sub(r.idle) > retention
}

// RunStatus is a run for the status page and for metrics.
type RunStatus struct {
	Run string `json:"run"`
	rendezvous.Status
	Nodes []rendezvous.NodeStatus `json:"nodes,omitempty"`
}

// Runs describes every run, by name; with nodes, every node of each.
func (h *Hub) Runs(nodes bool) []RunStatus {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]RunStatus, 0, len(h.runs))
	for _, id := range slices.Sorted(maps.Keys(h.runs)) {
		out = append(out, h.runs[id].status(nodes))
	}
	return out
}

func (r *run) status(nodes bool) RunStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := RunStatus{Run: r.id, Status: r.round.Status()}
	if nodes {
		s.Nodes = r.round.Nodes()
	}
	return s
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
