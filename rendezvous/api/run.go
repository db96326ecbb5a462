package api

import (
	"context"
	"slices"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/runhost"
	"dlrover-run/rendezvous"
)

// run drives one Round's time and carries out its actions. Locks are taken in the order Host, Run, archive.mu.
type run struct {
	runhost.Run
	id    string
	from  string // the address of the node that has begun it, "" for unknown
	cfg   *HubConfig
	line  *timeline
	round *rendezvous.Round
	wake  map[string]*watchers // by node, which get a new directive or a notice
	idle  time.Time            // since when it has no nodes
	used  bool                 // it has had nodes
	early bool                 // something has been noted before
	quota quota                // quota of lines from nodes

	notices   ring[addressed]
	noticeSeq uint64 // of the newest notice; larger than that of any earlier daemon

	newest   *Waiting // nil: no launcher has asked, or no node waits
	newestAt time.Time

	unsent map[string]bool // IDs that cfg.Gate has not received, whose nodes do not get their Check before
}

// newRun makes a run with sequence numbers above those of earlier runs of the same name. Past is the state that earlier
// daemons have kept of it, if anything.
func (h *Hub) newRun(id string, past *rendezvous.Kept) *run {
	now := time.Now()
	base := uint64(now.UnixNano())
	if past != nil {
		past = past.Steady(now)
	}
	name := ""
	if h.cfg.Keep > 0 && id != nameless {
		name = id
	}
	return &run{
		id: id, cfg: &h.cfg, line: h.lines.open(base), idle: now, wake: map[string]*watchers{}, unsent: map[string]bool{},
		round: rendezvous.New(rendezvous.Config{
			Term: base, Topology: *h.topology.Load(), Suspicious: h.cfg.Suspicious, Suspect: h.cfg.Suspect,
			Run: name, Kept: past, Server: h.server.Load(),
		}),
		noticeSeq: base, notices: ring[addressed]{limit: maxNotices},
	}
}

// hold is how long a Watch waits: 20 seconds in a small run, a minute in a run of ten
// thousand nodes, so that idle watching costs at most about 170 requests a second. It
// is longer than keepAlive takes, so that a dead host shows as a broken connection.
func hold(nodes int) time.Duration {
	return min(20*time.Second+time.Duration(nodes)*4*time.Millisecond, time.Minute)
}

// attach begins a Watch. Notices "from now on" are those after the present one.
func (r *run) attach(node string, after *Cursor) (time.Duration, error) {
	r.Lock()
	defer r.Unlock()
	if after.Notices == 0 {
		after.Notices = r.noticeSeq
	}
	nodes := r.round.Size()
	most := hold(nodes)
	if r.tellsWaitsLocked(*after) {
		most = min(most, max(after.Waits, minWaits, time.Duration(nodes)*waitsPerNode))
	}
	return most, r.stepLocked(rendezvous.Attach{ID: node})
}

func (r *run) detach(e rendezvous.Detach) {
	r.Lock()
	defer r.Unlock()
	if r.Err() != nil {
		return
	}
	_ = r.stepLocked(e) // a Detach is never refused
	if _, err := r.round.Member(e.ID); err != nil {
		delete(r.wake, e.ID)
	}
}

// hungUp reports whether that is news: a node that has left, or watches over another connection, is not suspect.
func (r *run) hungUp(node string) bool {
	r.Lock()
	defer r.Unlock()
	m, err := r.round.Member(node)
	return err == nil && m.Away && r.stepLocked(rendezvous.HungUp{ID: node}) == nil
}

// await waits for news after the cursor. Every node of a run waits here, nearly always: the frames below must be small;
// see Hub.watch.
func (r *run) await(ctx context.Context, node string, after Cursor, hold time.Duration) (*News, error) {
	expired := time.NewTimer(hold)
	defer expired.Stop()
	for {
		n, wake, err := r.newer(node, after, false)
		if err != nil || wake == nil {
			return n, err
		}
		select {
		case <-wake:
		case <-expired.C:
			if n, _, err = r.newer(node, after, true); n == nil && err == nil {
				err = ErrNothingNew
			}
			return n, err
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// newer returns the news after the cursor, or a channel that closes when there may be some.
func (r *run) newer(node string, after Cursor, last bool) (n *News, wake <-chan struct{}, err error) {
	r.Lock()
	defer r.Unlock()
	if n, err = r.newerLocked(node, after, last); n != nil || err != nil {
		return n, nil, err
	}
	ws := r.watchersLocked(node)
	if ws.waiting == nil {
		ws.waiting = make(chan struct{})
	}
	return nil, ws.waiting, nil
}

// news are those after the cursor; nil: there are none.
func (r *run) news(node string, after Cursor) (*News, error) {
	r.Lock()
	defer r.Unlock()
	return r.newerLocked(node, after, false)
}

// newerLocked returns the news after the cursor; nil: there are none. A directive from which the launcher learns
// nothing is news only at last, when the Watch ends: in a restart of a large world there is a better one soon, and each
// answer leads to a request.
func (r *run) newerLocked(node string, after Cursor, last bool) (*News, error) {
	if r.Err() != nil {
		return nil, r.Err()
	}
	m, err := r.round.Member(node)
	if err != nil {
		return nil, err
	}
	var notices []job.Notice
	var seq uint64
	if after.WithNotices {
		notices, seq = r.noticesLocked(node, after.Notices), r.noticeSeq
	}
	d := m.Directive
	early := d.Kind == job.Check && r.unsent[node]
	known := d.Seq == after.Directive || !last && m.Known != 0 && m.Known == after.Directive
	if (!known || len(notices) > 0 || last && r.tellsWaitsLocked(after)) && !early {
		return &News{Directive: d, Notices: notices, NoticeSeq: seq}, nil
	}
	return nil, nil
}

// watchers wait for news of one node.
type watchers struct {
	waiting chan struct{} // closed when there are some; nil: no goroutine waits
	held    []*heldWatch
}

func (w *watchers) wake() {
	if w.waiting != nil {
		close(w.waiting)
	}
	for _, h := range w.held {
		h.conn.Later(h.look)
	}
}

func (r *run) watchersLocked(node string) *watchers {
	if r.wake[node] == nil {
		r.wake[node] = &watchers{}
	}
	return r.wake[node]
}

func (r *run) step(ev rendezvous.Event) error {
	r.Lock()
	defer r.Unlock()
	return r.stepLocked(ev)
}

// leave has a node leave, and returns the evidence if the run is over: a good-bye in the middle needs none.
func (r *run) leave(ev rendezvous.Leave) (over bool, e job.Evidence, err error) {
	r.Lock()
	defer r.Unlock()
	if err = r.stepLocked(ev); err != nil || r.round.Status().Outcome == "" {
		return false, e, err
	}
	e = r.round.Evidence()
	if l := rendezvous.LedgerOf(r.round, time.Now()); l.Stepping {
		e.Time = l.String()
	}
	return true, e, nil
}

func (r *run) stepLocked(ev rendezvous.Event) error {
	if r.Err() != nil {
		return r.Err()
	}
	now := time.Now()
	acts, err := r.round.Step(now, ev)
	for _, a := range acts {
		r.performLocked(now, a)
	}
	if r.round.Size() > 0 {
		r.idle, r.used = time.Time{}, true
	} else if r.idle.IsZero() {
		r.idle = now
		r.wakeAllLocked()
	}
	r.Arm(now, r.round.Next())
	if _, passed := ev.(rendezvous.Cleared); passed || len(acts) > 0 {
		r.changedLocked()
	}
	return err
}

// told adds a node's report to the timeline. It may precede the first join.
func (r *run) told(event job.Event, node, text string) error {
	r.Lock()
	defer r.Unlock()
	now := time.Now()
	if r.Err() == nil && !r.quota.take(now, string(event), node) {
		return nil
	}
	if !r.used {
		r.early, r.idle = true, now
	}
	return r.annotateLocked(now, event, node, text)
}

func (r *run) annotateLocked(now time.Time, event job.Event, node, text string) error {
	if r.Err() != nil {
		return r.Err()
	}
	n := r.round.Remark(event, node, text)
	r.performLocked(now, rendezvous.Action{Note: &n})
	r.changedLocked()
	return nil
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
	if len(a.Gate)+len(a.Helpers)+len(a.Released) > 0 && r.cfg.Gate != nil {
		r.gateLocked(a)
	}
	if a.Directive != nil && (a.Directive.Kind != job.Check || r.cfg.Gate == nil) {
		r.wakeLocked(a.Node)
	}
}

// gateLocked passes on the nodes to check and those released. Nodes released in the same step come first. A node gets
// its Check only if cfg.Gate has not answered for it: its next directive may be there already.
func (r *run) gateLocked(a rendezvous.Action) {
	asked := slices.Concat(a.Gate, a.Helpers)
	for _, id := range asked {
		r.unsent[id] = true
	}
	r.Tell(func() {
		if len(a.Released) > 0 && r.cfg.Released != nil {
			r.cfg.Released(r.id, a.Released)
		}
		if len(asked) > 0 {
			r.cfg.Gate(r.id, a.Gate, a.Helpers)
			r.wakeAsked(asked)
		}
	})
}

func (r *run) wakeAsked(ids []string) {
	r.Lock()
	defer r.Unlock()
	for _, id := range ids {
		delete(r.unsent, id)
		if m, err := r.round.Member(id); err == nil && m.Asked {
			r.wakeLocked(id)
		}
	}
}

func (r *run) wakeLocked(node string) {
	if ws := r.wake[node]; ws != nil {
		ws.wake()
		delete(r.wake, node)
	}
}

func (r *run) wakeAllLocked() {
	for _, ws := range r.wake {
		ws.wake()
	}
	clear(r.wake)
}

// Tick implements runhost.Machine.
func (r *run) Tick(time.Time) { _ = r.stepLocked(rendezvous.Tick{}) }

// Closed implements runhost.Machine. It ends every held request, and forgets the timeline.
func (r *run) Closed() {
	r.forgottenLocked()
	r.line.close(r.Err())
	r.wakeAllLocked()
}

// Idle implements runhost.Machine: the run has no nodes, and either nothing to report to late launchers, or has been
// kept for long enough.
func (r *run) Idle(now time.Time) bool {
	if r.idle.IsZero() {
		return false
	}
	if keep := r.cfg.Keep; keep > 0 && r.used {
		since := r.idle
		if at := r.round.Status().EndedAt; !at.IsZero() {
			since = at // later visitors do not prolong it
		}
		return now.Sub(since) > keep
	}
	if r.tellsLocked() {
		return now.Sub(r.idle) > retention
	}
	return now.Sub(r.idle) > time.Minute
}

// left returns the summary of a run that has no nodes.
func (r *run) left() (leftRun, bool) {
	r.Lock()
	defer r.Unlock()
	return leftRun{r, r.idle, len(r.round.Ended())}, !r.idle.IsZero()
}

// tellsLocked: a node that comes late has to hear something of the run.
func (r *run) tellsLocked() bool {
	s := r.round.Status()
	return r.early && !r.used || s.Outcome != "" || s.Paused != nil || len(s.Bars) > 0
}

func (r *run) status(nodes bool) RunStatus {
	s := r.plainStatus(nodes)
	if nodes && r.cfg.Waits != nil {
		s.Waits = r.cfg.Waits(s)
	}
	return s
}

func (r *run) plainStatus(nodes bool) RunStatus {
	r.Lock()
	defer r.Unlock()
	s := RunStatus{Run: r.id, Status: r.round.Status()}
	if l := rendezvous.LedgerOf(r.round, time.Now()); !l.Since.IsZero() {
		s.Ledger = &l
	}
	if nodes {
		s.Nodes, s.Ended = r.round.Nodes(), r.round.Ended()
	}
	return s
}
