// Package rendezvous decides which launchers of a run form a world, with which
// ranks, and what each of them has to do next.
//
// Round is a pure state machine: it never reads a clock, never blocks and starts
// no goroutine. The shell around it (rendezvous/api) feeds it events with their
// times, carries out the actions it returns, and calls Step with a Tick when Next
// says so. The package imports nothing but the standard library.
package rendezvous

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Liveness rules. A node whose connection broke is suspect at once; a launcher that
// is alive dials again within milliseconds.
const (
	// BrokenGrace is how long a node with a broken connection may stay away while
	// its world trains. A kernel that sends FIN or RST is alive, and a launcher on it
	// would have dialled again within hundredths of a second, or a good second if the
	// first SYN was lost.
	BrokenGrace = 1500 * time.Millisecond
	// BrokenGraceFailing replaces BrokenGrace when the world is broken anyway: the
	// survivors' workers have failed, so nothing is gained by waiting longer.
	BrokenGraceFailing = 500 * time.Millisecond
	// SilentGrace is how long a node may have no request open without its
	// connection having broken. It also replaces BrokenGrace when most nodes are
	// suspect at once: then it is the daemon's own network that is in doubt.
	SilentGrace = 15 * time.Second
	// AttributionWindow is how long a failure that would end the run waits for the
	// news that a node has died: workers notice a dead peer as fast as we do.
	AttributionWindow = 300 * time.Millisecond
)

// Config is what a Round knows beyond its events.
type Config struct {
	// Term is the first term, larger than that of any earlier daemon (such as its
	// start in nanoseconds). Sequence numbers and later terms count up from it.
	Term uint64
	// Topology maps a node's IP to its access switch; nil leaves ranks in their own order.
	Topology Topology
}

type phase string

const (
	forming   phase = "forming"   // collecting joins
	releasing phase = "releasing" // sealed; rank 0 is clearing its store
	running   phase = "running"
	finished  phase = "finished"
)

type nodeState string

const (
	waiting   nodeState = "waiting"   // joined, not in the world
	pending   nodeState = "stopping"  // member of a broken epoch that has not joined again
	member    nodeState = "member"    // in the world that is releasing or running
	succeeded nodeState = "succeeded" // member whose workers all exited with 0
)

type node struct {
	Node
	state    nodeState
	rank     int // group rank in the newest world it was in, or -1
	arrival  int // order of first arrival
	rankBase int
	attached int // requests held open
	detached time.Time
	broken   bool
	dir      Directive
	differs  bool // its Params are not the run's
}

// Errors of Step that a launcher can act upon.
var (
	// ErrUnknownNode: the ID is not part of the run; the launcher has to join (again).
	ErrUnknownNode = errors.New("rendezvous: unknown node")
	// ErrFinishing: the run is over and its last nodes are still leaving; try again shortly.
	ErrFinishing = errors.New("rendezvous: the run is finishing")
	// ErrTaken: another node holds the wished rank of the static rendezvous; it may
	// be dead, which shows within SilentGrace, so try again for a while.
	ErrTaken = errors.New("the node rank is taken")
	// ErrRefused wraps every reason why a Join can never succeed.
	ErrRefused = errors.New("the rendezvous refuses this node")
)

// Round is the state of one run.
type Round struct {
	cfg    Config
	params Params
	phase  phase
	id     EpochID // of the newest sealed world; Round is 0 before the first
	nodes  map[string]*node
	wishes map[int]*node // newest node of each wished rank
	world  []*node       // members of the newest sealed world by group rank; lost ones stay until the next seal
	joined int           // nodes in state waiting
	owing  int           // nodes in state pending
	done   int           // members that succeeded
	seq    uint64
	arrive int

	restarts   int
	worldSize  int
	charge     bool // the broken epoch spends a restart at the next seal
	elastic    bool // a member went away since the last seal
	short      bool // the world has been below Min since the last seal
	cause      *Cause
	failures   []Failure
	losses     []Loss
	resume     *resume // a world that an earlier daemon sealed, being rebuilt
	resumed    bool    // such a world was rebuilt, and no epoch has been sealed since
	outcome    Outcome
	finishedAt time.Time
	left       map[string]bool // IDs that have said good-bye: a Join that was under way must not bring them back
	refused    map[string]bool // nodes and reasons that those who wait have heard of

	formingAt  time.Time // join timeout runs from here
	lastCallAt time.Time
	growAt     time.Time
	doomAt     time.Time // the run fails then, unless a node turns out to have died
	holdAt     time.Time // no world is sealed before: members of an older history may come back
	liveAt     time.Time // earliest liveness deadline, never too late

	acts []Action
}

// New returns the Round of a run that nobody has joined.
func New(cfg Config) *Round {
	return &Round{cfg: cfg, phase: forming, id: EpochID{Term: cfg.Term}, seq: cfg.Term, nodes: map[string]*node{}, wishes: map[int]*node{}, left: map[string]bool{}, refused: map[string]bool{}}
}

// Step applies one event and returns what has to be done about it. An error refuses
// the event and leaves the state unchanged but for the passing of time; nodes that wait
// hear of a Join that was refused.
func (r *Round) Step(now time.Time, ev Event) ([]Action, error) {
	r.acts = nil
	err := r.apply(now, ev)
	r.expire(now)
	r.settle(now)
	return r.acts, err
}

func (r *Round) apply(now time.Time, ev Event) error {
	switch e := ev.(type) {
	case Join:
		return r.join(now, e)
	case Leave:
		return r.leave(now, e)
	case Attach:
		return r.attach(e)
	case Detach:
		return r.detach(now, e)
	case Ready:
		return r.ready(e)
	case Failing:
		return r.failing(now, e)
	case Success:
		return r.success(now, e)
	case Tick:
		return nil
	}
	return fmt.Errorf("rendezvous: unknown event %T", ev)
}

// ---- joining and leaving

func (r *Round) join(now time.Time, e Join) error {
	if r.phase == finished {
		if err := r.reopen(now, e); err != nil || r.phase == finished {
			return err
		}
	}
	if n := r.nodes[e.Node.ID]; n != nil {
		r.rejoin(now, n, e)
		return nil
	}
	if err := r.admit(e); err != nil {
		r.tellWaiting(e.Node, err)
		return err
	}
	if r.fresh() && len(r.nodes) == 0 {
		r.params = e.Params.WithDefaults()
		r.formingAt = now
	}
	n := &node{Node: e.Node, rank: -1, arrival: r.arrive, detached: now, differs: e.Params.WithDefaults() != r.params}
	r.arrive++
	r.nodes[n.ID] = n
	r.watchLiveness(now.Add(SilentGrace))
	r.replace(now, n)
	r.remember(now, e)
	if !r.adopt(now, n, e) {
		r.queue(n)
	}
	r.note("join", n.Name, fmt.Sprintf("%d slots", n.Slots))
	return nil
}

// maxRefused bounds the refusals of one run that are told.
const maxRefused = 64

// tellWaiting tells those who wait for nodes, once, that and why one will not come.
func (r *Round) tellWaiting(refused Node, err error) {
	text := fmt.Sprintf("node %q was refused: %s", refused.Name, strings.TrimPrefix(err.Error(), ErrRefused.Error()+": "))
	if r.joined == 0 || r.refused[text] || len(r.refused) >= maxRefused {
		return
	}
	r.refused[text] = true
	r.note("refused", refused.Name, text)
	for _, n := range r.waiters() {
		r.direct(n, Directive{Kind: Wait, Cause: &Cause{Kind: CauseRefusal, Node: refused.Name, Text: text}})
	}
}

// fresh reports whether this history has seen no world yet.
func (r *Round) fresh() bool { return r.id.Round == 0 }

// remember takes from a newcomer what a daemon that was started again has lost. A
// spare that has heard of a world announces others that may still run in it.
func (r *Round) remember(now time.Time, e Join) {
	if e.Seen.Round == 0 || e.Seen.Term == r.id.Term {
		return
	}
	r.restarts = max(r.restarts, e.Restarts)
	if r.fresh() && r.holdAt.IsZero() && e.Stopped.Round == 0 {
		r.holdAt = now.Add(resumeWindow)
	}
}

// rejoin is a Join of a node that is already here: after the Stop of the present
// epoch, or else a repeated request that changes nothing.
func (r *Round) rejoin(now time.Time, n *node, e Join) {
	if e.Stopped != r.id || n.state == waiting {
		return
	}
	if w := r.resume; w != nil {
		if !slices.Contains(w.stopped, n) {
			w.stopped = append(w.stopped, n)
		}
		return
	}
	if n.state != pending { // an earlier daemon had told it to stop, and this one does not know
		r.breakWorld(now, restartedAcross())
	}
	n.Slots, n.Addr, n.Addrs = e.Node.Slots, e.Node.Addr, e.Node.Addrs
	r.record(e.Failures)
	r.owing--
	r.queue(n)
}

func (r *Round) queue(n *node) {
	n.state = waiting
	r.joined++
	r.direct(n, Directive{Kind: Wait})
}

// admit holds a newcomer against the run's rules.
func (r *Round) admit(e Join) error {
	if err := r.check(e); err != nil {
		return fmt.Errorf("%w: %w", ErrRefused, err)
	}
	if !r.params.Static || r.fresh() && len(r.nodes) == 0 {
		return nil
	}
	if o := r.wisher(e.Node.Rank); o != nil && !o.supersededBy(e.Node) {
		return fmt.Errorf("%w: %d by %s; give every node its own --node-rank", ErrTaken, e.Node.Rank, o.Name)
	}
	return nil
}

func (r *Round) check(e Join) error {
	p := e.Params.WithDefaults()
	if err := p.Validate(); err != nil {
		return err
	}
	if r.left[e.Node.ID] {
		return fmt.Errorf("node %q has left the run", e.Node.Name)
	}
	if e.Node.ID == "" || e.Node.Slots < 1 {
		return fmt.Errorf("node %q needs an id and at least one slot, has %d", e.Node.Name, e.Node.Slots)
	}
	for _, name := range []string{e.Node.ID, e.Node.Name, e.Node.Role} {
		if !Printable(name) {
			return fmt.Errorf("the id, name or role %.100q of a node: %s", name, PrintableRule)
		}
	}
	if len(e.Node.Addrs) > MaxAddrs {
		return fmt.Errorf("node %q brings %d addresses; at most %d are kept", e.Node.Name, len(e.Node.Addrs), MaxAddrs)
	}
	if len(r.nodes) > 0 || !r.fresh() {
		if err := p.conflict(r.params); err != nil {
			return err
		}
	}
	if len(r.nodes) >= 2*p.Max+1000 {
		return fmt.Errorf("%d nodes are already here for at most %d", len(r.nodes), p.Max)
	}
	if rank := e.Node.Rank; p.Static && (rank < 0 || rank >= p.Max) {
		return fmt.Errorf("node rank %d: the static rendezvous of %d nodes needs --node-rank from 0 to %d", rank, p.Max, p.Max-1)
	}
	return nil
}

// replace drops a dead node when its replacement arrives.
func (r *Round) replace(now time.Time, n *node) {
	if o := r.wisher(n.Rank); o != nil && o.supersededBy(n.Node) {
		r.lose(now, o, "replaced by "+n.Name)
	}
	if o := r.wisher(n.Rank); o == nil || n.Generation >= o.Generation {
		r.wishes[n.Rank] = n
	}
}

// wisher is the newest node that wished for the rank, if it is still here.
func (r *Round) wisher(rank int) *node {
	o := r.wishes[rank]
	if rank < 0 || o == nil || r.nodes[o.ID] != o {
		return nil
	}
	return o
}

// supersededBy: a pod with the same node rank proves that a suspect is dead, and one
// of a later generation that any is.
func (o *node) supersededBy(n Node) bool {
	return o.suspect() || o.Generation > 0 && n.Generation > o.Generation
}

func (n *node) suspect() bool { return n.attached == 0 && n.broken }

func (r *Round) leave(now time.Time, e Leave) error {
	n := r.nodes[e.ID]
	if n == nil {
		return ErrUnknownNode
	}
	r.record(e.Failures)
	if len(r.left) > MaxNodes {
		clear(r.left) // their requests have long ended
	}
	r.left[n.ID] = true
	r.depart(now, n, CauseLeave, e.Reason)
	return nil
}

func (r *Round) lose(now time.Time, n *node, reason string) {
	r.depart(now, n, CauseLoss, reason)
}

// depart removes a node. A member that departs before it is done breaks the world.
func (r *Round) depart(now time.Time, n *node, kind CauseKind, reason string) {
	delete(r.nodes, n.ID)
	note := r.note(string(kind), n.Name, reason)
	if n.rank >= 0 && n.rank < len(r.world) && r.world[n.rank] == n {
		note.Rank = n.rank
	}
	switch n.state {
	case waiting:
		r.joined--
		return
	case succeeded:
		return // its work is done; the world does not need it any more
	case pending:
		r.owing--
	}
	if r.phase == finished {
		return
	}
	if r.resume != nil {
		r.resume.forgo(n)
		r.resume.hurry(now)
		return
	}
	r.elastic = true
	if len(r.losses) < maxKept {
		r.losses = append(r.losses, Loss{Node: n.Name, GroupRank: n.rank, RankBase: n.rankBase, Slots: n.Slots, Reason: reason, At: lossTime(now, n, kind)})
	}
	r.breakWorld(now, Cause{Kind: kind, Node: n.Name, Text: fmt.Sprintf("node %d (%s) is gone: %s", n.rank, n.Name, reason)})
}

// lossTime is when the node went away, not when patience ran out.
func lossTime(now time.Time, n *node, kind CauseKind) time.Time {
	if kind == CauseLoss && n.attached == 0 {
		return n.detached
	}
	return now
}

// reopen answers a Join to a finished run: a launcher that was started before the
// end belongs to that run; a later one opens the run anew.
func (r *Round) reopen(now time.Time, e Join) error {
	if now.Add(-e.Node.Uptime).Before(r.finishedAt) {
		if err := e.Params.WithDefaults().conflict(r.params); err != nil {
			return fmt.Errorf("%w: %w", ErrRefused, err)
		}
		n := &node{Node: e.Node, rank: -1, state: waiting, detached: now}
		r.nodes[n.ID] = n
		r.joined++
		r.watchLiveness(now.Add(SilentGrace))
		r.direct(n, r.verdict())
		return nil
	}
	if len(r.nodes) > 0 {
		return ErrFinishing
	}
	r.reset()
	return nil
}

// reset makes r as New does, with a new term.
func (r *Round) reset() {
	left, acts := r.left, r.acts
	r.cfg.Term = r.seq + 1
	*r = *New(r.cfg)
	r.left, r.acts = left, acts
}

// ---- liveness

func (r *Round) attach(e Attach) error {
	n := r.nodes[e.ID]
	if n == nil {
		return ErrUnknownNode
	}
	n.attached++
	n.broken = false
	return nil
}

func (r *Round) detach(now time.Time, e Detach) error {
	n := r.nodes[e.ID]
	if n == nil {
		return nil // it has left while its request was open
	}
	n.attached = max(n.attached-1, 0)
	if n.attached > 0 {
		return nil
	}
	n.detached, n.broken = now, e.Broken
	if n.broken && n.state == waiting && r.phase != finished {
		// It has no workers to lose: if it lives, it joins again at once.
		r.lose(now, n, "its connection broke while it was waiting")
		return nil
	}
	r.watchLiveness(now.Add(r.grace(n)))
	return nil
}

// grace is how long the detached node n may stay away.
func (r *Round) grace(n *node) time.Duration {
	switch {
	case !n.broken:
		return SilentGrace
	case r.phase == forming && !r.fresh():
		return BrokenGraceFailing
	default:
		return BrokenGrace
	}
}

func (r *Round) watchLiveness(at time.Time) {
	if r.liveAt.IsZero() || at.Before(r.liveAt) {
		r.liveAt = at
	}
}

// expire drops the nodes that stayed away for too long. It scans the nodes only
// when the earliest deadline has passed, so that its cost is not paid per event.
func (r *Round) expire(now time.Time) {
	if r.liveAt.IsZero() || now.Before(r.liveAt) {
		return
	}
	r.liveAt = time.Time{}
	var away []*node
	broken := 0
	for _, n := range r.nodes {
		if n.attached == 0 {
			away = append(away, n)
			if n.broken {
				broken++
			}
		}
	}
	doubt := len(r.nodes) >= 4 && 2*broken > len(r.nodes)
	for _, n := range away {
		r.expireNode(now, n, doubt)
	}
}

func (r *Round) expireNode(now time.Time, n *node, doubt bool) {
	grace := r.grace(n)
	if doubt {
		grace = SilentGrace
	}
	if due := n.detached.Add(grace); now.Before(due) {
		r.watchLiveness(due)
		return
	}
	if n.broken {
		r.lose(now, n, fmt.Sprintf("its connection broke and it did not come back within %s", grace))
		return
	}
	r.lose(now, n, fmt.Sprintf("silent for %s", grace))
}

// ---- what members report

func (r *Round) ready(e Ready) error {
	if r.nodes[e.ID] == nil {
		return ErrUnknownNode
	}
	if r.phase != releasing || e.EpochID != r.id || r.world[0].ID != e.ID {
		return nil // the world broke meanwhile; the leader gets a newer directive
	}
	r.phase = running
	for i, p := range r.places(r.world) { // nothing has changed since the seal
		p.MasterAddr, p.MasterPort = e.Addr, e.Port
		r.direct(r.world[i], Directive{Kind: Run, Place: &p, Cause: r.cause})
	}
	r.cause = nil
	r.note("run", "", fmt.Sprintf("store at %s:%d", e.Addr, e.Port))
	return nil
}

func (r *Round) failing(now time.Time, e Failing) error {
	n := r.nodes[e.ID]
	if n == nil {
		return ErrUnknownNode
	}
	if e.EpochID != r.id {
		return nil
	}
	r.record(e.Failures)
	switch {
	case r.resume != nil:
		r.resume.failing = append(r.resume.failing, e)
		r.resume.hurry(now)
		return nil
	case r.phase == forming && e.Decision == Permanent && r.cause != nil && r.cause.Kind == CauseFailure:
		r.doom(now)
		return nil
	case r.phase != running || n.state != member:
		return nil // this epoch is ending already, and why is known
	}
	r.charge = e.Decision == RestartCharged
	if e.Decision == Permanent || r.charge && r.restarts >= r.params.MaxRestarts {
		r.doom(now)
	}
	r.breakWorld(now, Cause{Kind: CauseFailure, Node: n.Name, Text: firstText(e.Failures, n)})
	return nil
}

// doom lets the run fail soon, unless a node turns out to have died.
func (r *Round) doom(now time.Time) {
	if !r.doomAt.IsZero() {
		return
	}
	r.doomAt = now
	if len(r.world) > 1 {
		r.doomAt = now.Add(AttributionWindow)
	}
}

func firstText(fs []Failure, n *node) string {
	if len(fs) > 0 && fs[0].Text != "" {
		return fs[0].Text
	}
	return fmt.Sprintf("a worker of node %d (%s) failed", n.rank, n.Name)
}

func (r *Round) success(now time.Time, e Success) error {
	n := r.nodes[e.ID]
	if n == nil {
		return ErrUnknownNode
	}
	if e.EpochID != r.id || n.state != member || r.phase != running && r.resume == nil {
		return nil
	}
	r.succeed(n)
	r.checkDone(now)
	return nil
}

func (r *Round) succeed(n *node) {
	n.state = succeeded
	r.done++
	r.note("node-succeeded", n.Name, "")
}

// checkDone ends the run when all members have succeeded, or starts it anew when
// that is the policy and a restart is left.
func (r *Round) checkDone(now time.Time) {
	switch {
	case r.phase != running || r.done < len(r.world):
	case r.params.Always && r.restarts < r.params.MaxRestarts:
		r.charge = true
		r.breakWorld(now, Cause{Kind: CauseFailure, Text: "all workers succeeded, and the restart policy is Always"})
	default:
		r.finish(now, Succeeded, nil)
	}
}

// record keeps the first failures of the newest epoch, at most one for a worker and
// at most maxKept, so that a world of any size costs the same.
func (r *Round) record(fs []Failure) {
	for _, f := range fs {
		if len(r.failures) < maxKept && !r.knows(f) {
			r.failures = append(r.failures, f)
		}
	}
}

func (r *Round) knows(f Failure) bool {
	for _, k := range r.failures {
		if k.Rank == f.Rank && k.GroupRank == f.GroupRank {
			return true
		}
	}
	return false
}

// ---- breaking, sealing, finishing

// breakWorld ends the current epoch: every member has to stop its workers and join
// again. The first cause stands; a loss replaces a failure, which it explains.
func (r *Round) breakWorld(now time.Time, c Cause) {
	broken := r.phase == forming
	if !broken {
		r.enterForming(now)
	}
	if r.cause == nil || (c.Kind == CauseLoss && r.cause.Kind != CauseLoss) {
		r.cause = &c
	}
	if broken {
		return // everyone has been told
	}
	for _, n := range r.world {
		if r.nodes[n.ID] != n || (n.state != member && n.state != succeeded) {
			continue
		}
		n.state = pending
		r.owing++
		r.direct(n, Directive{Kind: Stop, Cause: r.cause})
		if n.suspect() {
			r.watchLiveness(n.detached.Add(r.grace(n)))
		}
	}
}

func (r *Round) enterForming(now time.Time) {
	r.phase = forming
	r.formingAt = now
	r.cause = nil
	r.done = 0
	r.growAt, r.lastCallAt = time.Time{}, time.Time{}
	r.note("break", "", "")
}

// settle makes the time-dependent decisions of the present phase.
func (r *Round) settle(now time.Time) {
	switch r.phase {
	case forming:
		if len(r.nodes) == 0 {
			r.reset() // abandoned: whoever comes next starts afresh
			return
		}
		if r.resume != nil {
			r.settleResume(now)
			return
		}
		if !r.doomAt.IsZero() && !r.judge(now) {
			return
		}
		if !r.trySeal(now) {
			r.checkJoinTimeout(now)
		}
	case running:
		r.tryGrow(now)
	}
}

// judge decides a doomed epoch: a node that died meanwhile explains the failure and
// costs nothing; a suspect is waited for; otherwise the run fails. It reports
// whether forming may go on.
func (r *Round) judge(now time.Time) bool {
	if r.elastic {
		r.doomAt = time.Time{}
		return true
	}
	if now.Before(r.doomAt) {
		return false
	}
	for _, n := range r.world {
		if r.nodes[n.ID] == n && n.suspect() {
			r.doomAt = n.detached.Add(SilentGrace) // expire decides sooner
			return false
		}
	}
	r.finish(now, Failed, r.cause)
	return false
}

func (r *Round) trySeal(now time.Time) bool {
	if r.owing > 0 || now.Before(r.holdAt) {
		return false
	}
	size := r.params.floor(min(r.joined, r.params.Max))
	if size < r.params.Min {
		r.lastCallAt, r.short = time.Time{}, true
		return false
	}
	if r.joined < r.params.Max && (r.fresh() || r.short) && !r.lastCallOver(now) {
		return false
	}
	r.seal(size)
	return true
}

// lastCallOver starts the last call when the world first could be sealed. A world
// that merely lost nodes skips it: everyone who is known is here.
func (r *Round) lastCallOver(now time.Time) bool {
	if r.lastCallAt.IsZero() {
		r.lastCallAt = now.Add(r.params.LastCall)
		r.note("last-call", "", fmt.Sprintf("%d of %d:%d nodes; sealing in %s", r.joined, r.params.Min, r.params.Max, r.params.LastCall))
	}
	return !now.Before(r.lastCallAt)
}

func (r *Round) seal(size int) {
	chosen := choose(r.waiters(), size)
	ranked := rank(chosen, r.cfg.Topology, r.params.Static)
	if r.resumed { // an earlier daemon may have announced an epoch that would have the same name
		r.id.Term, r.resumed = max(r.cfg.Term, r.id.Term+1), false
	}
	if !r.elastic && slices.Equal(r.world, ranked) {
		r.id.Epoch++
	} else {
		r.id.Round++
		r.id.Epoch = 0
	}
	if r.charge && !r.elastic {
		r.restarts++
	}
	r.world = ranked
	r.joined -= size
	r.phase = releasing
	places := r.places(ranked)
	for i, n := range ranked {
		n.state, n.rank, n.rankBase = member, i, places[i].RankBase
	}
	r.resetEpoch()
	r.direct(ranked[0], Directive{Kind: Lead, Place: &places[0], Cause: r.cause})
	r.note("seal", ranked[0].Name, "")
}

// resetEpoch forgets what was collected about the epoch before.
func (r *Round) resetEpoch() {
	r.charge, r.elastic, r.short = false, false, false
	r.failures, r.losses = nil, nil
	r.lastCallAt, r.growAt, r.doomAt, r.holdAt = time.Time{}, time.Time{}, time.Time{}, time.Time{}
}

func (r *Round) places(ranked []*node) []Place {
	roles := map[string]int{}
	ps := make([]Place, len(ranked))
	base := 0
	for i, n := range ranked {
		ps[i] = Place{GroupRank: i, GroupWorldSize: len(ranked), RankBase: base, RoleRankBase: roles[n.Role], RestartCount: r.restarts}
		base += n.Slots
		roles[n.Role] += n.Slots
	}
	for i, n := range ranked {
		ps[i].WorldSize, ps[i].RoleWorldSize = base, roles[n.Role]
	}
	r.worldSize = base
	return ps
}

func (r *Round) waiters() []*node {
	var ws []*node
	for _, n := range r.nodes {
		if n.state == waiting {
			ws = append(ws, n)
		}
	}
	return ws
}

// tryGrow restarts a running world for newcomers when they make it larger.
func (r *Round) tryGrow(now time.Time) {
	size := r.params.floor(min(len(r.world)+r.joined, r.params.Max))
	if r.joined == 0 || size <= len(r.world) || r.done > 0 {
		r.growAt = time.Time{}
		return
	}
	if r.growAt.IsZero() {
		r.growAt = now.Add(r.params.GrowthDelay)
	}
	if size < r.params.Max && now.Before(r.growAt) {
		return
	}
	r.breakWorld(now, Cause{Kind: CauseGrowth, Text: fmt.Sprintf("the world grows from %d to %d nodes", len(r.world), size)})
	r.elastic = true
}

// checkJoinTimeout: the time that members take to stop their workers does not count;
// their launchers bound it.
func (r *Round) checkJoinTimeout(now time.Time) {
	if r.owing > 0 {
		r.formingAt = now
		return
	}
	if now.Before(r.formingAt.Add(r.params.JoinTimeout)) {
		return
	}
	text := fmt.Sprintf("no world within %s: %d nodes joined, need %d", r.params.JoinTimeout, r.joined, r.params.Min)
	if r.params.Unit > 1 {
		text += fmt.Sprintf(" in multiples of %d", r.params.Unit)
	}
	r.finish(now, Failed, &Cause{Kind: CauseTimeout, Text: text})
}

func (r *Round) finish(now time.Time, o Outcome, c *Cause) {
	r.phase, r.outcome, r.cause, r.finishedAt = finished, o, c, now
	r.doomAt, r.growAt, r.lastCallAt = time.Time{}, time.Time{}, time.Time{}
	for _, n := range r.nodes {
		r.direct(n, r.verdict())
	}
	text := ""
	if c != nil {
		text = c.Text
	}
	r.note(string(o), "", text)
}

func (r *Round) verdict() Directive {
	if r.outcome == Succeeded {
		return Directive{Kind: Done}
	}
	return Directive{Kind: Fail, Cause: r.cause}
}

func (r *Round) direct(n *node, d Directive) {
	r.seq++
	d.Seq, d.EpochID, d.Restarts = r.seq, r.id, r.restarts
	if n.differs {
		p := r.params
		d.Params = &p
	}
	n.dir = d
	r.acts = append(r.acts, Action{Node: n.ID, Directive: &d})
}

func (r *Round) note(event, nodeName, text string) *Note {
	n := &Note{Event: event, Round: r.id.Round, Epoch: r.id.Epoch, Node: nodeName, Text: text, Nodes: len(r.nodes), World: r.worldSize, Term: r.id.Term, Rank: -1}
	r.acts = append(r.acts, Action{Note: n})
	return n
}
