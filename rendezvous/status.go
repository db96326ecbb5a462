package rendezvous

import (
	"iter"
	"time"

	"dlrover-run/internal/job"
)

// Next is when the Round wants a Tick; zero when only an event can change it.
func (r *Round) Next() time.Time {
	next := r.liveness.at
	limit, _ := r.memory.limit()
	consider := func(at time.Time) {
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	if r.epoch.phase != finished && len(r.members.nodes) > 0 {
		consider(limit)
	}
	switch {
	case r.epoch.phase == running:
		consider(r.sealer.growAt)
	case !r.epoch.collecting():
	case r.memory.rebuild != nil:
		consider(r.memory.rebuild.until)
	case !r.account.failPendingAt.IsZero():
		consider(r.account.failPendingAt)
	case !r.gate.failAt.IsZero() && r.orders.paused == nil:
		consider(r.gate.failAt)
	default:
		consider(r.sealer.next(r.memory.holdAt))
	}
	return next
}

// Member is a node that is here.
type Member struct {
	ID, Name string
	Can      []Ability
	// RankBase is the first rank of its workers, which are Slots; -1: it is not in the newest sealed world.
	RankBase, Slots int
	// Life is where its launcher listens; the zero value is nowhere.
	Life Life
	// Directive is its present duty. A launcher that has got the directive with the number Known learns nothing from it; 0
	// is none.
	Directive Directive
	Known     uint64
	// Asked reports that it has got a Check that is not answered yet.
	Asked bool
	// Away reports that it has no request open, and that nothing is known of its connection.
	Away bool
}

func (e *epoch) describe(n *node) Member {
	m := Member{
		ID: n.ID, Name: n.Name, Can: n.Can, RankBase: -1, Slots: n.Slots, Life: n.Life, Directive: n.dir, Known: n.known,
		Asked: n.asked, Away: n.away(),
	}
	if e.seated(n) {
		m.RankBase = n.rankBase
	}
	return m
}

// Member is the node with the ID, or ErrUnknownNode.
func (r *Round) Member(id string) (Member, error) {
	n, err := r.members.find(id)
	if err != nil {
		return Member{}, err
	}
	return r.epoch.describe(n), nil
}

// Members are all nodes that are here, in no order. Several have one name while a launcher that was started again and
// the one before it are here.
func (r *Round) Members() iter.Seq[Member] {
	return func(yield func(Member) bool) {
		for _, n := range r.members.nodes {
			if !yield(r.epoch.describe(n)) {
				return
			}
		}
	}
}

// Seat is a node's place in the newest sealed world.
type Seat struct {
	job.EpochID
	GroupRank int
	Name      string
	// Running: the workers of the epoch run, or those of this node have succeeded.
	Running bool
}

// Seat is that of the node with the ID; ErrUnknownNode: it is not in the newest sealed world.
func (r *Round) Seat(id string) (Seat, error) {
	n := r.members.nodes[id]
	if n == nil || r.memory.rebuild != nil || !r.epoch.seated(n) {
		return Seat{}, ErrUnknownNode
	}
	return Seat{r.epoch.id, n.rank, n.Name, r.epoch.phase == running && (n.state == member || n.state == succeeded)}, nil
}

// Running is the epoch whose workers run; false: none do.
func (r *Round) Running() (job.EpochID, bool) { return r.epoch.id, r.epoch.phase == running }

// Size is the number of nodes that are here in any state.
func (r *Round) Size() int { return len(r.members.nodes) }

// Evidence is the evidence about the end of the newest epoch, the earliest first.
func (r *Round) Evidence() job.Evidence { return r.out.evidence() }

// World is the table of the newest sealed world, by group rank.
func (r *Round) World() []job.Member { return r.epoch.table() }

// ParamsOf are the rules of r.
func ParamsOf(r *Round) Params { return *r.params }

// Status is a picture of the run.
func (r *Round) Status() Status {
	idle, e, o := r.members.idle(), r.epoch, r.orders
	s := Status{
		Phase: string(e.phase), Round: e.id.Round, Epoch: e.id.Epoch, Params: *r.params, Restarts: r.account.restarts,
		Members: len(r.members.nodes) - idle, Waiting: idle, WorldSize: e.workers,
		Outcome: string(e.outcome), Cause: e.cause, EndedAt: e.finishedAt,
		Paused: o.paused, Bars: o.barred(), Hold: o.hold, Command: o.command, Missing: e.missing(r.members), Due: dues(r),
	}
	if !e.fresh() {
		s.Budget = r.account.status(e.id)
	}
	return s
}

// Nodes lists the nodes for a status page: members by rank, then those waiting.
func (r *Round) Nodes() []NodeStatus { return r.members.statuses(r.cfg.Topology, r.orders.bars) }

// Ended are the nodes of a run that has ended, as they were then. The caller must not write to them.
func (r *Round) Ended() []NodeStatus { return r.ended }

// Lacks describes the nodes that the run waits for.
func (r *Round) Lacks() Lack { return r.shortage.lacks() }
