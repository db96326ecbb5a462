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
	"time"
)

// Liveness rules. A node whose connection broke is suspect at once; a launcher that
// is alive dials again within milliseconds.
const (
	// BrokenGrace is how long a node with a broken connection may stay away while
	// its world trains.
	BrokenGrace = 3 * time.Second
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
}

// Errors of Step that a launcher can act upon.
var (
	// ErrUnknownNode: the ID is not part of the run; the launcher has to join (again).
	ErrUnknownNode = errors.New("rendezvous: unknown node")
	// ErrFinishing: the run is over and its last nodes are still leaving; try again shortly.
	ErrFinishing = errors.New("rendezvous: the run is finishing")
	// ErrRefused wraps every reason why a Join can never succeed.
	ErrRefused = errors.New("rendezvous: join refused")
)

// Round is the state of one run.
type Round struct {
	cfg    Config
	params Params
	phase  phase
	round  int // rounds sealed so far; 0 before the first
	epoch  int
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
	outcome    Outcome
	finishedAt time.Time

	formingAt  time.Time // join timeout runs from here
	lastCallAt time.Time
	growAt     time.Time
	doomAt     time.Time // the run fails then, unless a node turns out to have died
	liveAt     time.Time // earliest liveness deadline, never too late

	acts []Action
}

// New returns the Round of a run that nobody has joined.
func New(cfg Config) *Round {
	return &Round{cfg: cfg, phase: forming, nodes: map[string]*node{}, wishes: map[int]*node{}}
}

// Step applies one event and returns what has to be done about it. An error refuses
// the event and leaves the state unchanged but for the passing of time.
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
		r.rejoin(n, e)
		return nil
	}
	if err := r.admit(e); err != nil {
		return fmt.Errorf("%w: %w", ErrRefused, err)
	}
	if len(r.nodes) == 0 && r.round == 0 {
		r.params = e.Params.WithDefaults()
		r.formingAt = now
	}
	n := &node{Node: e.Node, rank: -1, arrival: r.arrive, detached: now}
	r.arrive++
	r.nodes[n.ID] = n
	r.watchLiveness(now.Add(SilentGrace))
	r.replace(now, n)
	if !r.adopt(now, n, e.Resume) {
		r.queue(n)
	}
	r.note("join", n.Name, fmt.Sprintf("%d slots", n.Slots))
	return nil
}

// rejoin is a Join of a node that is already here: after a Stop, or a repeated request.
func (r *Round) rejoin(n *node, e Join) {
	n.Slots, n.Addr, n.Addrs = e.Node.Slots, e.Node.Addr, e.Node.Addrs
	r.record(e.Failures)
	if n.state != pending {
		return
	}
	r.owing--
	r.queue(n)
}

func (r *Round) queue(n *node) {
	n.state = waiting
	r.joined++
	r.direct(n, Directive{Kind: Wait})
}

// admit holds a newcomer's parameters against the run's.
func (r *Round) admit(e Join) error {
	p := e.Params.WithDefaults()
	if err := p.Validate(); err != nil {
		return err
	}
	if e.Node.ID == "" || e.Node.Slots < 1 {
		return fmt.Errorf("node %q needs an id and at least one slot, has %d", e.Node.Name, e.Node.Slots)
	}
	if len(e.Node.Addrs) > MaxAddrs {
		return fmt.Errorf("node %q brings %d addresses; at most %d are kept", e.Node.Name, len(e.Node.Addrs), MaxAddrs)
	}
	if len(r.nodes) > 0 || r.round > 0 {
		if p != r.params {
			return fmt.Errorf("%s: this node wants %s, the run was opened with %s; use the same options on every node", diffParams(p, r.params), p, r.params)
		}
	}
	if len(r.nodes) >= 2*p.Max+1000 {
		return fmt.Errorf("%d nodes are already here for at most %d", len(r.nodes), p.Max)
	}
	if p.Static {
		return r.admitStatic(e.Node, p.Max)
	}
	return nil
}

func (r *Round) admitStatic(n Node, size int) error {
	if n.Rank < 0 || n.Rank >= size {
		return fmt.Errorf("node rank %d: the static rendezvous of %d nodes needs --node-rank from 0 to %d", n.Rank, size, size-1)
	}
	if o := r.wisher(n.Rank); o != nil && !o.supersededBy(n) {
		return fmt.Errorf("node rank %d is already taken by %s; give every node its own --node-rank", n.Rank, o.Name)
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
	if r.phase == finished {
		delete(r.nodes, n.ID)
		return nil
	}
	r.depart(now, n, CauseLeave, e.Reason)
	return nil
}

func (r *Round) lose(now time.Time, n *node, reason string) {
	r.depart(now, n, CauseLoss, reason)
}

// depart removes a node. A member that departs before it is done breaks the world.
func (r *Round) depart(now time.Time, n *node, kind CauseKind, reason string) {
	delete(r.nodes, n.ID)
	r.note(string(kind), n.Name, reason)
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
		return
	}
	r.elastic = true
	r.losses = append(r.losses, Loss{Node: n.Name, GroupRank: n.rank, RankBase: n.rankBase, Slots: n.Slots, Reason: reason, At: lossTime(now, n, kind)})
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
		n := &node{Node: e.Node, rank: -1, state: waiting, detached: now}
		r.nodes[n.ID] = n
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

// reset makes r as New does, but for the sequence of directives.
func (r *Round) reset() {
	seq, acts := r.seq, r.acts
	*r = *New(r.cfg)
	r.seq, r.acts = seq, acts
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
	r.watchLiveness(now.Add(r.grace(n)))
	return nil
}

// grace is how long the detached node n may stay away.
func (r *Round) grace(n *node) time.Duration {
	switch {
	case !n.broken:
		return SilentGrace
	case r.phase == forming && r.round > 0:
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
	if r.phase != releasing || !r.current(e.Round, e.Epoch) || r.world[0].ID != e.ID {
		return nil // the world broke meanwhile; the leader gets a newer directive
	}
	r.phase = running
	for i, n := range r.world {
		p := *n.dir.Place
		p.MasterAddr, p.MasterPort = e.Addr, e.Port
		r.direct(r.world[i], Directive{Kind: Run, Place: &p, Cause: n.dir.Cause})
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
	if !r.current(e.Round, e.Epoch) {
		return nil
	}
	r.record(e.Failures)
	if r.phase != running || n.state != member {
		return nil // this epoch is ending already, and why is known
	}
	over := e.Decision == Permanent || (e.Decision == RestartCharged && r.restarts >= r.params.MaxRestarts)
	r.charge = e.Decision == RestartCharged
	if over {
		r.doomAt = now
		if len(r.world) > 1 {
			r.doomAt = now.Add(AttributionWindow)
		}
	}
	r.breakWorld(now, Cause{Kind: CauseFailure, Node: n.Name, Text: firstText(e.Failures, n)})
	return nil
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
	if r.phase != running || !r.current(e.Round, e.Epoch) || n.state != member {
		return nil
	}
	n.state = succeeded
	r.done++
	r.note("node-succeeded", n.Name, "")
	if r.done == len(r.world) {
		r.finish(now, Succeeded, nil)
	}
	return nil
}

func (r *Round) current(round, epoch int) bool { return round == r.round && epoch == r.epoch }

// record keeps the first failures of the newest epoch, at most one for a worker and
// at most maxFailures, so that a world of any size costs the same.
func (r *Round) record(fs []Failure) {
	const maxFailures = 256
	for _, f := range fs {
		if len(r.failures) < maxFailures && !r.knows(f) {
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
	if r.phase == running || r.phase == releasing {
		r.enterForming(now)
	}
	if r.cause == nil || (c.Kind == CauseLoss && r.cause.Kind != CauseLoss) {
		r.cause = &c
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
	if r.owing > 0 {
		return false
	}
	size := r.params.floor(min(r.joined, r.params.Max))
	if size < r.params.Min {
		r.lastCallAt, r.short = time.Time{}, true
		return false
	}
	if r.joined < r.params.Max && (r.round == 0 || r.short) && !r.lastCallOver(now) {
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
	if !r.elastic && slices.Equal(r.world, ranked) {
		r.epoch++
	} else {
		r.round++
		r.epoch = 0
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
		n.dir.Place, n.dir.Cause = &places[i], r.cause
	}
	r.resetEpoch()
	r.direct(ranked[0], Directive{Kind: Lead, Place: &places[0], Cause: r.cause})
	r.note("seal", ranked[0].Name, "")
}

// resetEpoch forgets what was collected about the epoch before.
func (r *Round) resetEpoch() {
	r.charge, r.elastic, r.short = false, false, false
	r.failures, r.losses = nil, nil
	r.lastCallAt, r.growAt, r.doomAt = time.Time{}, time.Time{}, time.Time{}
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

func (r *Round) checkJoinTimeout(now time.Time) {
	if now.Before(r.formingAt.Add(r.params.JoinTimeout)) {
		return
	}
	text := fmt.Sprintf("no world within %s: %d nodes joined, %d still stopping, need %d", r.params.JoinTimeout, r.joined, r.owing, r.params.Min)
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
	d.Seq, d.Round, d.Epoch = r.seq, r.round, r.epoch
	n.dir = d
	r.acts = append(r.acts, Action{Node: n.ID, Directive: &d})
}

func (r *Round) note(event, nodeName, text string) {
	r.acts = append(r.acts, Action{Note: &Note{Event: event, Round: r.round, Epoch: r.epoch, Node: nodeName, Text: text, Nodes: len(r.nodes), World: r.worldSize}})
}
