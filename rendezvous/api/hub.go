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
	"sync"
	"time"

	"dlrover-run/rendezvous"
)

// Service is what a launcher needs of a rendezvous: a Hub in its own process, or a
// Client of one elsewhere.
type Service interface {
	// Join asks for a place in the next world of run. It does not wait for one.
	Join(ctx context.Context, run string, ev rendezvous.Join) error
	// Watch waits for a directive other than the one of sequence number after. It returns ErrNothingNew when
	// the service has held the request for long enough.
	Watch(ctx context.Context, run, id string, after uint64) (rendezvous.Directive, error)
	// Report delivers a Ready, Failing or Success.
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
)

// MaxRuns bounds the runs that one Hub keeps, finished ones included.
const MaxRuns = 4096

// finishedRetention is how long a finished run is kept for launchers that come late.
const finishedRetention = 10 * time.Minute

// HubConfig is what a Hub knows beyond its requests.
type HubConfig struct {
	Topology rendezvous.Topology
	// Observe receives every note of every run in order, with the run locked: it
	// must be quick and must not call the Hub. Nil drops them.
	Observe func(run string, n rendezvous.Note)
}

// Hub keeps the Rounds of all runs of one daemon.
type Hub struct {
	cfg    HubConfig
	mu     sync.Mutex // before run.mu, never after
	runs   map[string]*run
	pruned time.Time // when abandoned runs were last looked for
	closed bool
}

type run struct {
	id     string
	cfg    *HubConfig
	mu     sync.Mutex
	round  *rendezvous.Round
	wake   map[string]chan struct{} // closed when the node has a new directive
	timer  *time.Timer
	due    time.Time
	idle   time.Time // since when nobody is here
	closed bool
}

// NewHub returns a Hub without runs.
func NewHub(cfg HubConfig) *Hub {
	return &Hub{cfg: cfg, runs: map[string]*run{}}
}

// Close ends every held request and every timer.
func (h *Hub) Close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for _, r := range h.runs {
		r.close()
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
	r := &run{id: id, cfg: &h.cfg, round: rendezvous.New(rendezvous.Config{Term: uint64(time.Now().UnixNano()), Topology: h.cfg.Topology}), wake: map[string]chan struct{}{}, idle: time.Now()}
	h.runs[id] = r
	return r, nil
}

func (h *Hub) pruneLocked(now time.Time) {
	for id, r := range h.runs {
		if r.abandoned(now) {
			r.close()
			delete(h.runs, id)
		}
	}
}

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

// forgetUnused drops a run that was made for a node that it then refused.
func (h *Hub) forgetUnused(r *run) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r.mu.Lock()
	unused := r.round.Empty() && r.round.Status().Outcome == ""
	r.mu.Unlock()
	if unused && h.runs[r.id] == r {
		r.close()
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
	defer r.mu.Unlock()
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

// Watch implements Service. While it waits the node counts as present; when ctx ends
// it counts as suspect.
func (h *Hub) Watch(ctx context.Context, id, node string, after uint64) (rendezvous.Directive, error) {
	r, err := h.member(id)
	if err != nil {
		return rendezvous.Directive{}, err
	}
	hold, err := r.attach(node)
	if err != nil {
		return rendezvous.Directive{}, err
	}
	d, err := r.await(ctx, node, after, hold)
	r.detach(node, err != nil && ctx.Err() != nil)
	return d, err
}

// hold is how long a Watch waits: 20 seconds in a small run, a minute in a run of ten
// thousand nodes, so that idle watching costs at most about 170 requests a second. It
// is longer than keepAlive takes, so that a dead host shows as a broken connection.
func hold(nodes int) time.Duration {
	return min(20*time.Second+time.Duration(nodes)*4*time.Millisecond, time.Minute)
}

func (r *run) attach(node string) (time.Duration, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return hold(r.round.Size()), r.stepLocked(rendezvous.Attach{ID: node})
}

func (r *run) detach(node string, broken bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	_ = r.stepLocked(rendezvous.Detach{ID: node, Broken: broken}) // a Detach is never refused
	if _, err := r.round.Directive(node); err != nil {
		delete(r.wake, node)
	}
}

func (r *run) await(ctx context.Context, node string, after uint64, hold time.Duration) (rendezvous.Directive, error) {
	expired := time.NewTimer(hold)
	defer expired.Stop()
	for {
		d, news, err := r.newer(node, after)
		if err != nil || news == nil {
			return d, err
		}
		select {
		case <-news:
		case <-expired.C:
			return rendezvous.Directive{}, ErrNothingNew
		case <-ctx.Done():
			return rendezvous.Directive{}, context.Cause(ctx)
		}
	}
}

// newer returns a directive after the given one, or a channel that closes with the next.
func (r *run) newer(node string, after uint64) (rendezvous.Directive, <-chan struct{}, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return rendezvous.Directive{}, nil, ErrClosed
	}
	d, err := r.round.Directive(node)
	if err != nil || d.Seq != after {
		return d, nil, err
	}
	ch := r.wake[node]
	if ch == nil {
		ch = make(chan struct{})
		r.wake[node] = ch
	}
	return d, ch, nil
}

func (r *run) step(ev rendezvous.Event) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stepLocked(ev)
}

func (r *run) stepLocked(ev rendezvous.Event) error {
	if r.closed {
		return ErrClosed
	}
	now := time.Now()
	acts, err := r.round.Step(now, ev)
	for _, a := range acts {
		r.performLocked(a)
	}
	if !r.round.Empty() {
		r.idle = time.Time{}
	} else if r.idle.IsZero() {
		r.idle = now
		r.wakeAllLocked()
	}
	r.armLocked(now)
	return err
}

func (r *run) performLocked(a rendezvous.Action) {
	if a.Note != nil {
		if r.cfg.Observe != nil {
			r.cfg.Observe(r.id, *a.Note)
		}
		return
	}
	if ch := r.wake[a.Node]; ch != nil {
		close(ch)
		delete(r.wake, a.Node)
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
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	r.due = time.Time{} // the timer is spent
	_ = r.stepLocked(rendezvous.Tick{})
}

func (r *run) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	if r.timer != nil {
		r.timer.Stop()
	}
	r.wakeAllLocked()
}

// abandoned reports whether the run may be forgotten: nobody is here, and it has
// either never finished or finished long ago.
func (r *run) abandoned(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.idle.IsZero() {
		return false
	}
	return r.round.Status().Outcome == "" && now.Sub(r.idle) > time.Minute || now.Sub(r.idle) > finishedRetention
}

// RunStatus is a run for the status page and for metrics.
type RunStatus struct {
	Run string `json:"run"`
	rendezvous.Status
	Nodes []rendezvous.NodeStatus `json:"nodes,omitempty"`
}

// Runs describes every run; with nodes, every node of each.
func (h *Hub) Runs(nodes bool) []RunStatus {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]RunStatus, 0, len(h.runs))
	for _, r := range h.runs {
		out = append(out, r.status(nodes))
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
