package rendezvous

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"dlrover-run/internal/job"
)

// Snapshot is the whole state of a Round between two Steps. It survives JSON; the times in it are of the wall clock.
// Nodes are referred to by their index in Nodes, -1 being none.
type Snapshot struct {
	Term      uint64      `json:"term"`
	Topology  Topology    `json:"topology,omitempty"`
	Params    Params      `json:"params"`
	Phase     string      `json:"phase"`
	ID        job.EpochID `json:"id"`
	Seq       uint64      `json:"seq"`
	Arrive    int         `json:"arrive"`
	Done      int         `json:"done,omitempty"`
	Restarts  int         `json:"restarts,omitempty"`
	WorldSize int         `json:"world_size,omitempty"`

	// Nodes are those that are here, in order of arrival, and then those of the world that are not.
	Nodes  []NodeSnapshot  `json:"nodes"`
	Here   int             `json:"here"`
	World  []int           `json:"world,omitempty"`
	Wishes map[int]int     `json:"wishes,omitempty"`
	Resume *ResumeSnapshot `json:"resume,omitempty"`

	Charge   bool          `json:"charge,omitempty"`
	Elastic  bool          `json:"elastic,omitempty"`
	Short    bool          `json:"short,omitempty"`
	Resumed  bool          `json:"resumed,omitempty"`
	Held     bool          `json:"held,omitempty"`
	Cause    *job.Cause    `json:"cause,omitempty"`
	Failures []job.Failure `json:"failures,omitempty"`
	Losses   []job.Loss    `json:"losses,omitempty"`
	Outcome  job.Outcome   `json:"outcome,omitempty"`
	Left     []string      `json:"left,omitempty"`
	// Ended are the nodes at the end.
	Ended   []NodeStatus `json:"ended,omitempty"`
	Works   []string     `json:"works,omitempty"`
	Refused []string     `json:"refused,omitempty"`

	Gone       map[string]*job.Cause `json:"gone,omitempty"`
	Lacking    *job.Cause            `json:"lacking,omitempty"`
	LackingFor int                   `json:"lacking_for,omitempty"`

	Bars     map[string]*job.Cause `json:"bars,omitempty"`
	Paused   *job.Cause            `json:"paused,omitempty"`
	PausedIn *job.EpochID          `json:"paused_in,omitempty"`
	Unpaused bool                  `json:"unpaused,omitempty"`

	Hold      *job.Cause   `json:"hold,omitempty"`
	Unheld    bool         `json:"unheld,omitempty"`
	HeldWorld bool         `json:"held_world,omitempty"`
	Command   *job.Command `json:"command,omitempty"`
	CommandIn *job.EpochID `json:"command_in,omitempty"`
	OnResume  *job.Command `json:"on_resume,omitempty"`
	Account   account      `json:"account,omitzero"`

	FinishedAt time.Time `json:"finished_at,omitzero"`
	FormingAt  time.Time `json:"forming_at,omitzero"`
	SealedAt   time.Time `json:"sealed_at,omitzero"`
	FailAt     time.Time `json:"fail_at,omitzero"`
	GateSince  time.Time `json:"gate_since,omitzero"`
	GateAt     time.Time `json:"gate_at,omitzero"`
	LastCallAt time.Time `json:"last_call_at,omitzero"`
	CameAt     time.Time `json:"came_at,omitzero"`
	GrowAt     time.Time `json:"grow_at,omitzero"`
	DoomAt     time.Time `json:"doom_at,omitzero"`
	HoldAt     time.Time `json:"hold_at,omitzero"`
	LiveAt     time.Time `json:"live_at,omitzero"`

	Rechecks int             `json:"rechecks,omitempty"`
	Wary     map[string]bool `json:"wary,omitempty"`
}

// NodeSnapshot is the state of one node.
type NodeSnapshot struct {
	Node      Node       `json:"node"`
	State     string     `json:"state"`
	GroupRank int        `json:"group_rank"`
	RankBase  int        `json:"rank_base"`
	Arrival   int        `json:"arrival"`
	Attached  int        `json:"attached,omitempty"`
	Detached  time.Time  `json:"detached,omitzero"`
	Broken    bool       `json:"broken,omitempty"`
	Silent    bool       `json:"silent,omitempty"`
	HungUp    bool       `json:"hung_up,omitempty"`
	Directive Directive  `json:"directive"`
	Differs   bool       `json:"differs,omitempty"`
	Failed    bool       `json:"failed,omitempty"`
	Cleared   bool       `json:"cleared,omitempty"`
	Until     time.Time  `json:"until,omitzero"`
	Domain    string     `json:"domain,omitempty"`
	Bar       *job.Cause `json:"bar,omitempty"`
	Again     bool       `json:"again,omitempty"`
	Unsure    bool       `json:"unsure,omitempty"`
	Late      bool       `json:"late,omitempty"`
	Lone      bool       `json:"lone,omitempty"`
	Asked     bool       `json:"asked,omitempty"`
	Aside     bool       `json:"aside,omitempty"`
	Drained   *job.Cause `json:"drained,omitempty"`
	Since     time.Time  `json:"since,omitzero"`
	Starts    int        `json:"starts,omitempty"`
}

// ResumeSnapshot is the state of a world that is being rebuilt.
type ResumeSnapshot struct {
	World   []int     `json:"world"`
	Missing int       `json:"missing"`
	Until   time.Time `json:"until"`
	Failing []Failing `json:"failing,omitempty"`
	Stopped []int     `json:"stopped,omitempty"`
	Restart *Order    `json:"restart,omitempty"`
}

// Snapshot returns the state of r. It shares memory with r: use it before the next Step.
func (r *Round) Snapshot() Snapshot {
	s := Snapshot{
		Term: r.cfg.Term, Topology: r.cfg.Topology, Params: r.params, Phase: string(r.phase), ID: r.id,
		Seq: r.seq, Arrive: r.arrive, Done: r.done, Restarts: r.restarts, WorldSize: r.worldSize,
		Charge: r.charge, Elastic: r.elastic, Short: r.short, Resumed: r.resumed, Held: r.held,
		Cause: r.cause, Failures: r.failures, Losses: r.losses, Outcome: r.outcome, Ended: r.ended,
		Works: r.works,
		Left:  slices.Sorted(maps.Keys(r.left)), Refused: slices.Sorted(maps.Keys(r.refused)),
		Gone: r.gone, Lacking: r.lacking, LackingFor: r.lackingFor, SealedAt: r.sealedAt, FailAt: r.failAt,
		Bars: r.bars, Paused: r.paused, PausedIn: r.pausedIn, Unpaused: r.unpaused,
		Hold: r.hold, Unheld: r.unheld, HeldWorld: r.heldWorld,
		Command: r.command, CommandIn: r.commandIn, OnResume: r.onResume,
		Account:    r.account,
		FinishedAt: r.finishedAt, FormingAt: r.formingAt, GateSince: r.gateSince, GateAt: r.gateAt,
		LastCallAt: r.lastCallAt, CameAt: r.cameAt, GrowAt: r.growAt, DoomAt: r.doomAt, HoldAt: r.holdAt, LiveAt: r.liveAt,
		Rechecks: r.rechecks, Wary: r.wary,
	}
	r.snapshotNodes(&s)
	return s
}

func (r *Round) snapshotNodes(s *Snapshot) {
	ns := r.sorted(func(*node) bool { return true })
	s.Here = len(ns)
	index := map[*node]int{}
	refer := func(n *node) int {
		if n == nil {
			return -1
		}
		i, ok := index[n]
		if !ok {
			i = len(s.Nodes)
			index[n] = i
			s.Nodes = append(s.Nodes, n.snapshot())
		}
		return i
	}
	for _, n := range ns {
		refer(n)
	}
	s.World = mapped(r.world, refer)
	s.Wishes = map[int]int{}
	for rank := range r.wishes {
		if n := r.wisher(rank); n != nil {
			s.Wishes[rank] = refer(n)
		}
	}
	if w := r.resume; w != nil {
		s.Resume = &ResumeSnapshot{
			World: mapped(w.world, refer), Missing: w.missing, Until: w.until,
			Failing: w.failing, Stopped: mapped(w.stopped, refer), Restart: w.restart,
		}
	}
}

func (n *node) snapshot() NodeSnapshot {
	return NodeSnapshot{
		Node: n.Node, State: string(n.state), GroupRank: n.rank, RankBase: n.rankBase, Arrival: n.arrival,
		Attached: n.attached, Detached: n.detached, Broken: n.broken, Silent: n.silent, HungUp: n.hungUp,
		Directive: n.dir, Differs: n.differs, Failed: n.failed, Cleared: n.cleared, Until: n.until, Domain: n.domain,
		Bar:   n.bar,
		Again: n.again, Unsure: n.unsure, Late: n.late, Lone: n.lone, Asked: n.asked, Aside: n.aside, Drained: n.drained,
		Since: n.since, Starts: n.starts,
	}
}

// Restore returns the Round whose state s is. It goes on as the one that s was taken of, given the same
// Config.Suspicious, Suspect and Run; what else is in cfg, s has.
func Restore(cfg Config, s Snapshot) (*Round, error) {
	if err := s.validate(); err != nil {
		return nil, fmt.Errorf("rendezvous: bad snapshot: %w", err)
	}
	r := New(Config{Term: s.Term, Topology: s.Topology, Suspicious: cfg.Suspicious, Suspect: cfg.Suspect,
		Run: cfg.Run})
	r.params, r.phase, r.id = s.Params, phase(s.Phase), s.ID
	r.seq, r.arrive, r.done, r.restarts, r.worldSize = s.Seq, s.Arrive, s.Done, s.Restarts, s.WorldSize
	r.charge, r.elastic, r.short, r.resumed, r.held = s.Charge, s.Elastic, s.Short, s.Resumed, s.Held
	r.cause, r.failures, r.losses, r.outcome = s.Cause, slices.Clone(s.Failures), slices.Clone(s.Losses), s.Outcome
	r.ended, r.works = s.Ended, s.Works
	r.paused, r.pausedIn, r.unpaused = s.Paused, s.PausedIn, s.Unpaused
	r.account = s.Account
	r.commands = commands{s.Hold, s.Unheld, s.HeldWorld, s.Command, s.CommandIn, s.OnResume}
	r.rechecks = s.Rechecks
	maps.Copy(r.wary, s.Wary)
	r.finishedAt, r.formingAt, r.gateSince, r.gateAt = s.FinishedAt, s.FormingAt, s.GateSince, s.GateAt
	r.lastCallAt, r.cameAt, r.growAt, r.doomAt = s.LastCallAt, s.CameAt, s.GrowAt, s.DoomAt
	r.holdAt, r.liveAt = s.HoldAt, s.LiveAt
	r.lacking, r.lackingFor, r.sealedAt, r.failAt = s.Lacking, s.LackingFor, s.SealedAt, s.FailAt
	maps.Copy(r.bars, s.Bars)
	maps.Copy(r.gone, s.Gone)
	for _, id := range s.Left {
		r.left[id] = true
	}
	for _, text := range s.Refused {
		r.refused[text] = true
	}
	r.restoreNodes(s)
	return r, nil
}

func (r *Round) restoreNodes(s Snapshot) {
	ns := make([]*node, len(s.Nodes))
	for i, n := range s.Nodes {
		ns[i] = n.restore()
		if i < s.Here {
			r.nodes[n.Node.ID] = ns[i]
			r.count(ns[i], 1)
		}
	}
	at := func(i int) *node {
		if i < 0 {
			return nil
		}
		return ns[i]
	}
	r.setWorld(mapped(s.World, at))
	for rank, i := range s.Wishes {
		r.wishes[rank] = at(i)
	}
	if w := s.Resume; w != nil {
		r.resume = &resume{
			world: mapped(w.World, at), missing: w.Missing, until: w.Until,
			failing: slices.Clone(w.Failing), stopped: mapped(w.Stopped, at), restart: w.Restart,
		}
	}
}

func (n NodeSnapshot) restore() *node {
	return &node{
		Node: n.Node, state: nodeState(n.State), rank: n.GroupRank, rankBase: n.RankBase, arrival: n.Arrival,
		attached: n.Attached, detached: n.Detached, broken: n.Broken, silent: n.Silent, hungUp: n.HungUp, dir: n.Directive,
		differs: n.Differs, failed: n.Failed, cleared: n.Cleared, until: n.Until, domain: n.Domain, bar: n.Bar,
		again:  n.Again,
		unsure: n.Unsure, late: n.Late,
		lone: n.Lone, asked: n.Asked, aside: n.Aside, drained: n.Drained, since: n.Since, starts: n.Starts,
	}
}

// validate holds the references between the parts of s against each other.
func (s Snapshot) validate() error {
	p := phase(s.Phase)
	if !slices.Contains([]phase{forming, gating, releasing, running, finished}, p) {
		return fmt.Errorf("phase %.100q is unknown", s.Phase)
	}
	for _, n := range s.Nodes {
		states := []nodeState{waiting, checking, barred, pending, member, succeeded, leaving}
		if !slices.Contains(states, nodeState(n.State)) {
			return fmt.Errorf("node %.100q: state %.100q is unknown", n.Node.ID, n.State)
		}
	}
	if (p == releasing || p == running) && len(s.World) == 0 {
		return fmt.Errorf("world: nobody is in it, but the phase is %s", p)
	}
	if s.Here < 0 || s.Here > len(s.Nodes) {
		return fmt.Errorf("%d nodes are here, of %d", s.Here, len(s.Nodes))
	}
	if err := refersTo(s.World, 0, len(s.Nodes)); err != nil {
		return fmt.Errorf("world: %w", err)
	}
	if err := refersTo(slices.Collect(maps.Values(s.Wishes)), 0, s.Here); err != nil {
		return fmt.Errorf("wishes: %w", err)
	}
	if s.Resume == nil {
		return nil
	}
	if err := refersTo(s.Resume.World, -1, len(s.Nodes)); err != nil {
		return fmt.Errorf("world being rebuilt: %w", err)
	}
	if err := refersTo(s.Resume.Stopped, 0, len(s.Nodes)); err != nil {
		return fmt.Errorf("nodes that have stopped: %w", err)
	}
	return nil
}

func refersTo(indexes []int, low, high int) error {
	for _, i := range indexes {
		if i < low || i >= high {
			return fmt.Errorf("node %d is not between %d and %d", i, low, high-1)
		}
	}
	return nil
}

// mapped is f of every element, nil of none.
func mapped[A, B any](as []A, f func(A) B) []B {
	var bs []B
	for _, a := range as {
		bs = append(bs, f(a))
	}
	return bs
}
