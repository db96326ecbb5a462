package rendezvous

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous/ledger"
)

// resumeWindow is how long a daemon that has lost its memory waits for all members
// of a running world to introduce themselves again.
const resumeWindow = silentGrace

// Resume is a launcher's report to a daemon that does not know it: the present or last epoch of its workers, and its
// own place. A restarted daemon rebuilds the world from all members' reports, and no worker notices.
type Resume struct {
	job.EpochID
	Place job.Place `json:"place"`
	// Done: the workers have succeeded.
	Done bool `json:"done,omitempty"`
	// Hold: there are none, because the run is held.
	Hold bool `json:"hold,omitempty"`
	// Decision and Failures: a worker has failed, and the daemon may not know.
	Decision Decision      `json:"decision,omitempty"`
	Failures []job.Failure `json:"failures,omitempty"`
	Progress job.Progress  `json:"progress,omitzero"`
	// Stepped: the first step has been made. Ranks have succeeded, though not all.
	Stepped bool  `json:"stepped,omitempty"`
	Ranks   []int `json:"ranks,omitempty"`
	// Tolerated: no worker of the node is left, which ends nothing.
	Tolerated bool `json:"tolerated,omitempty"`
	Beside    bool `json:"beside,omitempty"` // as Failing.Beside
}

// memory rebuilds the knowledge of an earlier daemon from the reports of the nodes of its world.
type memory struct {
	cfg     *Config
	params  *Params
	members *members
	epoch   *epoch
	account *account
	orders  *orders
	checks  *checks
	gate    *gate
	out     *outbox
	book    *ledger.Ledger

	kept    *Kept     // of earlier daemons, until the nodes of that time are back or given up; or nil
	past    *Kept     // as kept was; nil: they have kept no timeline either
	back    bool      // some of them are back
	opener  *Join     // the first node since then, whose settings count if none comes back
	rebuild *rebuild  // a world that an earlier daemon sealed, or nil
	otherAt time.Time // when a node with other options first came
	holdAt  time.Time // no world is sealed before: members of an older history may come back
	held    bool      // that was waited for
}

// rebuild is a world being rebuilt.
type rebuild struct {
	world    []*node // by group rank, nil for missing members
	missing  int
	began    time.Time
	until    time.Time
	failing  []Failing // to be acted upon when the world is rebuilt
	stopped  []*node   // have ended their workers already, by a directive of the old daemon
	restart  *Order    // to be carried out when the world is rebuilt
	names    string    // of those that are missing, as far as they are known
	broken   KeptBreak // why it cannot go on, as far as this daemon or an earlier one knows
	followed bool      // a later epoch has been sealed, but has no workers: the price of this one is booked
}

// learn takes the state that a restarted daemon has lost from a newcomer. A spare that knows of a world announces
// others that may still run in it.
func (m *memory) learn(now time.Time, n *node, e Join) {
	m.await(now, n, e)
	rebuilds := m.rebuild != nil
	if e.Seen.Round == 0 || e.Seen.Term == m.epoch.id.Term && !rebuilds {
		return
	}
	m.epoch.follows(e.Seen)
	m.out.seq = max(m.out.seq, m.epoch.term) // terms count on from it
	m.account.restore(now, e, m.epoch.fresh() || rebuilds, ended(m.orders.unpausedIn, e.Seen))
	if m.epoch.fresh() && !m.held && e.Stopped.Round == 0 {
		m.held, m.holdAt = true, now.Add(resumeWindow)
	}
}

// await has the first node wait for all others of the newest world that earlier daemons have kept.
func (m *memory) await(now time.Time, n *node, e Join) {
	if m.kept == nil {
		return
	}
	m.recallPass(now, n)
	w := m.kept.World
	// A launcher knows an epoch of its run. A new one may have the name of another that is gone; an agent does not say.
	m.back = m.back || e.Seen.Round > 0 || n.Agent != "" && w != nil && slices.Contains(w.Names, n.Name)
	switch {
	case w == nil || w.Size == 0:
		m.kept = nil
	case !m.held:
		m.held, m.holdAt = true, now.Add(resumeWindow)
		m.out.note(job.EventResume, n.Name, fmt.Sprintf("waiting for %d nodes of the newest world%s", w.Size,
			listed(w.Names)))
	}
}

// listed are names as the end of a text.
func listed(names []string) string {
	if len(names) == 0 {
		return ""
	}
	more := len(names) - maxNamed
	if more > 0 {
		names = append(slices.Clone(names[:maxNamed]), fmt.Sprintf("%d more", more))
	}
	return ": " + strings.Join(names, ", ")
}

// holding reports whether members of an older history may still come back, so that no world is sealed.
func (m *memory) holding(now time.Time) bool {
	if m.holdAt.IsZero() {
		return false
	}
	complete := m.kept != nil && m.kept.World.complete(m.members)
	if complete || !now.Before(m.holdAt) {
		m.holdAt, m.epoch.formingAt = time.Time{}, now
		m.giveUp(now)
	}
	return !m.holdAt.IsZero()
}

// giveUp goes on without the nodes of a kept world that have not come back. If none has, the run was abandoned, and the
// nodes that are here begin it anew.
func (m *memory) giveUp(now time.Time) {
	if m.kept == nil {
		return
	}
	w := m.kept.World
	m.kept = nil
	switch missing := w.missing(m.members); {
	case !m.back:
		if m.account.spent.Held { // a run that is held because it has failed is over when everybody has left
			m.orders.paused, m.orders.pausedIn = nil, nil
			m.account.pauseEnds(now)
			m.out.repeat(everyNode)
			m.checks.requeue(now)
		}
		m.open()
		m.account.restarts, m.account.spent, m.account.sent = 0, Spent{}, nil
		*m.book = ledger.Ledger{}
		m.out.note(job.EventResumed, "", fmt.Sprintf("none of the %d nodes of the newest world has come back: the run "+
			"begins anew", w.Size))
	case len(missing) > 0:
		m.out.note(job.EventResumed, "", fmt.Sprintf("%d of the %d nodes of the newest world have not come back%s",
			len(missing), w.Size, listed(missing)))
	}
}

// first takes the settings of a run's first node; those that are kept count until the nodes of that time are given up.
func (m *memory) first(now time.Time, e Join) {
	m.epoch.formingAt = now
	if *m.params != (Params{}) && m.kept != nil {
		m.opener = &e
		return
	}
	*m.params = e.Params.WithDefaults()
	m.orders.open(e, m.params.Hold)
}

// open takes over the settings of the node that has opened the run anew.
func (m *memory) open() {
	if m.opener == nil {
		return
	}
	*m.params = m.opener.Params.WithDefaults()
	m.orders.hold, m.orders.unheldIn, m.orders.onResume = nil, job.EpochID{}, nil
	m.orders.open(*m.opener, m.params.Hold)
	for _, n := range m.members.nodes {
		n.differs = true // perhaps
	}
}

// pause returns the pause that an earlier daemon had sent to the joining node. It returns nil if this history is newer:
// it has orders of its own, or a newer world than the pause.
func (m *memory) pause(n *node, e Join) *job.Cause {
	o := m.orders
	switch {
	case e.Paused == nil:
	case o.pausedIn != nil && e.Seen.Newer(*o.pausedIn):
		seen := e.Seen
		o.pausedIn = &seen
	case o.paused != nil || ended(o.unpausedIn, e.Seen) || !m.epoch.collecting():
	case m.epoch.fresh() || m.rebuild != nil && !m.epoch.id.Newer(e.Seen):
		m.out.note(job.EventOrder, n.Name, "pause: it was ordered before the rendezvous daemon was started again")
		return bounded(*e.Paused)
	}
	return nil
}

// bar returns the bar that an earlier daemon had ordered for the joining node's name, unless this one knows better.
func (m *memory) bar(now time.Time, n *node, e Join) *job.Cause {
	if e.Barred == nil {
		return nil
	}
	bar := bounded(*e.Barred)
	if bar.Kind == job.CauseCheck {
		if m.checks.mustCheck(now, n) {
			n.bar = bar
		}
		return nil
	}
	if _, known := m.orders.bars[n.Name]; known || !m.orders.roomForBar(n.Name) {
		return nil
	}
	return bar
}

// bounded is c without values that no daemon has ever sent, but a node may send all the same.
func bounded(c job.Cause) *job.Cause {
	kind := job.CauseKind(text.Clip(string(c.Kind), MaxName))
	return &job.Cause{Kind: kind, Node: text.Clip(c.Node, MaxName), Text: text.Clip(c.Text, maxOrderText)}
}

// adopt gives a node its old place back. It reports false when this daemon has a history of its own, in which the
// node's world has no place.
func (m *memory) adopt(now time.Time, n *node, join Join) bool {
	e := join.Resume
	if e == nil || !m.epoch.collecting() || (!m.epoch.fresh() && m.rebuild == nil) || !plausible(e.Place) ||
		m.outdated(n, join) {
		return false
	}
	m.giveUpFor(now, e.EpochID)
	m.expirePause(now, e.EpochID)
	m.gate.leave(now)
	if m.rebuild == nil {
		m.begin(now, n, e)
	}
	w := m.rebuild
	if m.epoch.id != e.EpochID || len(w.world) != e.Place.GroupWorldSize || w.world[e.Place.GroupRank] != nil {
		return false
	}
	w.world[e.Place.GroupRank] = n
	w.missing--
	w.broken.Losses = slices.DeleteFunc(w.broken.Losses, func(l job.Loss) bool { return l.GroupRank == e.Place.GroupRank })
	m.epoch.away = slices.DeleteFunc(m.epoch.away, func(a away) bool { return a.early && a.rank == e.Place.GroupRank })
	w.followed = w.followed || join.Seen.Newer(e.EpochID)
	if m.kept != nil && m.kept.Epoch.Newer(e.EpochID) { // nobody may have heard of it
		w.followed, m.account.restarts = true, max(m.account.restarts, m.kept.Restarts)
	}
	m.members.become(n, member)
	n.rank, n.rankBase = e.Place.GroupRank, e.Place.RankBase
	m.out.direct(n, Directive{Kind: job.Run, Place: &e.Place})
	m.catchUp(n, e)
	if join.Stopped == e.EpochID {
		w.stop(n)
	}
	return true
}

// outdated: the node has workers of a world that was followed by another one, which has been sealed without it. A node
// that has ended them may have no place in that, or not know of it.
func (m *memory) outdated(n *node, e Join) bool {
	if m.kept == nil || !m.kept.Epoch.Newer(e.Resume.EpochID) {
		return false
	}
	return e.Stopped != e.Resume.EpochID || m.kept.World.without(n.Name)
}

func plausible(p job.Place) bool {
	return p.GroupWorldSize >= 1 && p.GroupWorldSize <= MaxNodes && p.GroupRank >= 0 && p.GroupRank < p.GroupWorldSize
}

// giveUpFor ends the rebuilding of a world without workers when a member of a newer one comes: the earlier members had
// been left out of that.
func (m *memory) giveUpFor(now time.Time, e job.EpochID) {
	w := m.rebuild
	if w == nil || !w.onlyStopped() || !e.Newer(m.epoch.id) {
		return
	}
	m.rebuild = nil
	for _, s := range w.stopped {
		if m.members.here(s) {
			m.checks.queue(now, s)
		}
	}
}

// expirePause ends a pause that a node has brought when a member of a newer world comes: the pause had ended before.
func (m *memory) expirePause(now time.Time, e job.EpochID) {
	if o := m.orders; o.pausedIn != nil && e.Newer(*o.pausedIn) {
		o.paused, o.pausedIn = nil, nil
		m.account.pauseEnds(now)
		m.checks.requeue(now)
	}
}

// begin collects the members of the world in which n has a place.
func (m *memory) begin(now time.Time, n *node, e *Resume) {
	size := e.Place.GroupWorldSize
	m.rebuild, m.holdAt = &rebuild{world: make([]*node, size), missing: size, began: now,
		until: now.Add(resumeWindow)}, time.Time{}
	m.epoch.id, m.epoch.workers, m.epoch.held = e.EpochID, e.Place.WorldSize, e.Hold
	m.epoch.size, m.epoch.other, m.epoch.votes = size, true, m.cfg.Server != nil && m.cfg.Server.Elected
	if s := m.cfg.Server; s != nil && s.World.of(s.Epoch, m.epoch) {
		m.epoch.plan = s.World
	}
	m.account.restarts = max(m.account.restarts, e.Place.RestartCount)
	m.out.seq = max(m.out.seq, m.epoch.id.Term)
	m.orders.restoreHold(e.Hold, e.EpochID)
	if o := m.orders.restart; o != nil && o.Of == e.EpochID {
		m.rebuild.restart = o
	}
	m.noteLost(n)
	m.out.note(job.EventResume, n.Name, fmt.Sprintf("waiting for %d nodes of a running world", size))
	m.loseServer(now)
}

// loseServer books the node of a dead server as lost, whose workers have died with it.
func (m *memory) loseServer(now time.Time) {
	s, w := m.cfg.Server, m.rebuild
	if s == nil || !s.OfDead || !s.World.of(s.Epoch, m.epoch) {
		return
	}
	if seat := s.World.Seat; seat >= 0 && seat < len(w.world) {
		m.bookServer(now, "its launcher, which served the rendezvous, has died")
	}
}

// bookServer books the node of the server that was replaced as lost.
func (m *memory) bookServer(now time.Time, reason string) {
	seat, name := m.cfg.Server.World.Seat, m.cfg.Server.World.name(m.cfg.Server.World.Seat)
	who := fmt.Sprintf("node %d (%s)", seat, cmp.Or(name, "whose name is not known"))
	m.out.note(job.EventNodeLoss, name, reason)
	m.rebuild.broken = KeptBreak{
		Cause:  job.Cause{Kind: job.CauseLoss, Node: name, Text: who + " is gone: " + reason},
		Losses: []job.Loss{{Node: name, GroupRank: seat, Reason: reason, At: now, Silent: true}},
	}
}

// noteLost notes that the world of n was sealed and started, and that an older one ended, if the earlier daemon was
// lost before it could keep that.
func (m *memory) noteLost(n *node) {
	const text = "known to an earlier rendezvous daemon, which could not keep it"
	p := m.past
	if p == nil {
		return
	}
	lost := m.epoch.id.Newer(p.Epoch)
	if lost && p.Epoch.Round > 0 && p.Broken == nil && p.End == nil {
		b := m.out.note(job.EventBreak, "", text)
		b.Round, b.Epoch, b.Term = p.Epoch.Round, p.Epoch.Epoch, p.Epoch.Term
	}
	if lost {
		m.out.note(job.EventSeal, n.Name, text)
	}
	if lost || p.Unrun && m.epoch.id == p.Epoch {
		m.out.note(job.EventRun, "", text)
	}
}

// catchUp books the events of a member's workers while there was no daemon.
func (m *memory) catchUp(n *node, e *Resume) {
	if e.Stepped {
		m.account.stepped(job.Progress{})
	}
	if e.Done || len(e.Ranks) > 0 {
		m.epoch.results.succeeded(n, Success{Ranks: e.Ranks}, m.params.Budget.Tolerate)
	}
	switch {
	case e.Done:
		m.epoch.complete(n, m.members, m.out)
	case e.Decision != "":
		m.epoch.kept.record(e.Failures)
		m.rebuild.failing = append(m.rebuild.failing, Failing{
			ID: n.ID, EpochID: e.EpochID, Decision: e.Decision, Failures: e.Failures, Progress: e.Progress,
			Tolerated: e.Tolerated, Beside: e.Beside,
		})
	}
}

// rebuilt ends the rebuilding when everyone is back, or when waiting is useless, and returns the world; nil: not yet.
func (m *memory) rebuilt(now time.Time) *rebuild {
	w := m.rebuild
	if m.serverIsMissing() {
		m.bookServer(now, "its host, where the rendezvous was served, is silent")
	}
	if w.missing > len(w.broken.Losses) && now.Before(w.until) && !m.allBack() {
		return nil
	}
	if m.recalls() {
		w.names = listed(m.kept.World.missing(m.members))
	}
	if b := m.broken(); b != nil {
		w.broken = *b
	}
	m.kept = nil
	m.rebuild, m.epoch.adopted, m.epoch.phase, m.epoch.sealedAt, m.account.newest.ranAt = nil, true, running, now, now
	m.epoch.setWorld(slices.DeleteFunc(slices.Clone(w.world), func(n *node) bool { return n == nil }))
	if w.missing == 0 {
		m.out.note(job.EventResumed, "", "the running world is complete again")
	}
	return w
}

// abandoned: no node is here, and none of an earlier world is waited for.
func (m *memory) abandoned(now time.Time) bool {
	if m.rebuild != nil {
		return !now.Before(m.rebuild.until)
	}
	return m.kept == nil
}

// allBack: of the world that is being rebuilt, only nodes are missing that an earlier daemon had given up.
func (m *memory) allBack() bool {
	return m.recalls() && m.kept.World.complete(m.members)
}

// serverIsMissing: the others are all back, and have replaced the missing one because its host is silent. A server that
// had left the world is no member of it.
func (m *memory) serverIsMissing() bool {
	s, w := m.cfg.Server, m.rebuild
	if s == nil || !s.Elected || !s.World.of(s.Epoch, m.epoch) || !s.World.ByMember() {
		return false
	}
	seat := s.World.Seat
	missing := w.missing == 1 && seat >= 0 && seat < len(w.world) && w.world[seat] == nil
	return missing && len(w.broken.Losses) == 0 && m.params.NodeTimeout == 0
}

// cause is why the world cannot go on: nodes are missing.
func (w *rebuild) cause() job.Cause {
	if w.missing == len(w.broken.Losses) {
		return w.broken.Cause
	}
	return job.Cause{Kind: job.CauseLoss, Text: fmt.Sprintf("%d of %d nodes did not come back after the rendezvous "+
		"daemon was started again%s", w.missing, len(w.world), w.names)}
}

// onlyStopped reports that no member with running workers has come back.
func (w *rebuild) onlyStopped() bool { return len(w.stopped) == len(w.world)-w.missing }

// stop books that the workers of n have been stopped.
func (w *rebuild) stop(n *node) {
	if !slices.Contains(w.stopped, n) {
		w.stopped = append(w.stopped, n)
	}
}

// fail keeps a failure until the world is rebuilt.
func (w *rebuild) fail(now time.Time, e Failing) {
	w.failing = append(w.failing, e)
	w.hurry(now)
}

// hurry waits no longer than a launcher's back-off for a world that has to be formed
// anew in any case.
func (w *rebuild) hurry(now time.Time) {
	if soon := now.Add(BrokenGrace); soon.Before(w.until) {
		w.until = soon
	}
}

// forgo takes a node that goes away out of the world that is being rebuilt, also for a later daemon.
func (m *memory) forgo(now time.Time, n *node, c job.Cause, l job.Loss) {
	w := m.rebuild
	w.world[n.rank] = nil
	if w.missing++; w.missing < len(w.world) { // others are here
		w.hurry(now)
	}
	if w.broken.Losses = append(w.broken.Losses, n.lost(l)); w.broken.Cause.Kind == "" {
		w.broken.Cause = c
	}
	if m.recalls() {
		k := *m.kept
		k.World = k.World.less(n.Name)
		m.kept = &k
	}
}

// recalls: the world that is being rebuilt is the one that an earlier daemon has kept.
func (m *memory) recalls() bool {
	return m.kept != nil && m.kept.World != nil && m.kept.Epoch == m.epoch.id
}

// restartedAcross is the cause of an epoch that an earlier daemon had ended already.
func restartedAcross() job.Cause {
	return job.Cause{Kind: job.CauseFailure,
		Text: "the workers were being restarted when the rendezvous daemon was started again"}
}
