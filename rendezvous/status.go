package rendezvous

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"dlrover-run/internal/job"
)

// Next is when the Round wants a Tick; zero when only an event can change it.
func (r *Round) Next() time.Time {
	next := r.liveness.at
	limit, _ := r.account.limit(r.orders.paused, r.epoch.starting())
	consider := func(at time.Time) {
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	if r.epoch.phase != finished && len(r.members.nodes) > 0 {
		consider(limit)
	}
	switch r.epoch.phase {
	case forming, gating:
		consider(r.nextDecision())
	case running:
		consider(r.sealer.growAt)
	}
	return next
}

// nextDecision is when time alone changes a world that is not sealed; zero when it never does.
func (r *Round) nextDecision() time.Time {
	switch {
	case r.memory.rebuild != nil:
		return r.memory.rebuild.until
	case !r.account.failPendingAt.IsZero():
		return r.account.failPendingAt
	case !r.gate.failAt.IsZero() && r.orders.paused == nil:
		return r.gate.failAt
	case r.epoch.phase == gating:
		return r.gate.until
	case r.orders.paused != nil || r.members.stopping > 0 || len(r.members.nodes) == 0:
		return time.Time{}
	case !r.memory.holdAt.IsZero():
		return r.memory.holdAt
	case !r.account.backoffAt.IsZero() && !r.epoch.elastic:
		return r.account.backoffAt
	}
	return r.sealer.next()
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// Directive is the present duty of a node.
func (r *Round) Directive(id string) (Directive, error) {
	n := r.members.nodes[id]
	if n == nil {
		return Directive{}, ErrUnknownNode
	}
	return n.dir, nil
}

// Node is a node as it introduced itself.
func (r *Round) Node(id string) (Node, error) {
	n := r.members.nodes[id]
	if n == nil {
		return Node{}, ErrUnknownNode
	}
	return n.Node, nil
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

// IDs are those of all nodes that are here, in no order.
func (r *Round) IDs() []string { return slices.Collect(maps.Keys(r.members.nodes)) }

// Running is the epoch whose workers run; false: none do.
func (r *Round) Running() (job.EpochID, bool) { return r.epoch.id, r.epoch.phase == running }

// Names are those of the nodes with ids that are here.
func (r *Round) Names(ids []string) map[string]string {
	names := make(map[string]string, len(ids))
	for _, id := range ids {
		if n := r.members.nodes[id]; n != nil {
			names[id] = n.Name
		}
	}
	return names
}

// Occupant is a node that is here, and its place in the newest sealed world.
type Occupant struct {
	ID, Name string
	Can      []Ability
	// RankBase is the first rank of its workers, which are Slots; -1: it is in no world.
	RankBase, Slots int
}

// Roster are all nodes that are here, in no order.
func (r *Round) Roster() []Occupant {
	list := make([]Occupant, 0, len(r.members.nodes))
	for id, n := range r.members.nodes {
		o := Occupant{ID: id, Name: n.Name, Can: n.Can, RankBase: -1, Slots: n.Slots}
		if r.epoch.seated(n) {
			o.RankBase = n.rankBase
		}
		list = append(list, o)
	}
	return list
}

// Asked reports whether a node has got a Check that is not answered yet.
func (r *Round) Asked(id string) bool {
	n := r.members.nodes[id]
	return n != nil && n.asked
}

// Named are the nodes of one name: more than one while a launcher that was started again and the one before it are
// here.
func (r *Round) Named(name string) []Node {
	return r.members.named(name)
}

// Size is the number of nodes that are here in any state.
func (r *Round) Size() int { return len(r.members.nodes) }

// Empty reports whether nothing is worth keeping: no node is here and nothing runs.
func (r *Round) Empty() bool { return len(r.members.nodes) == 0 }

// Evidence is the evidence about the end of the newest epoch, the earliest first.
func (r *Round) Evidence() job.Evidence { return r.out.evidence() }

// World is the table of the newest sealed world, by group rank.
func (r *Round) World() []job.Member { return r.epoch.table() }

// Status is a picture of the run.
func (r *Round) Status() Status {
	idle, e, o := r.members.idle(), r.epoch, r.orders
	s := Status{
		Phase: string(e.phase), Round: e.id.Round, Epoch: e.id.Epoch, Params: *r.params, Restarts: r.account.restarts,
		Members: len(r.members.nodes) - idle, Waiting: idle, WorldSize: e.workers,
		Outcome: string(e.outcome), Cause: e.cause, EndedAt: e.finishedAt,
		Paused: o.paused, Bars: o.barred(), Hold: o.hold, Command: o.command,
	}
	if !e.fresh() {
		s.Budget = r.account.status(e.id)
	}
	return s
}

// Nodes lists the nodes for a status page: members by rank, then those waiting.
func (r *Round) Nodes() []NodeStatus {
	ns := make([]NodeStatus, 0, len(r.members.nodes))
	for _, n := range r.members.sorted(everyNode) {
		rank := n.rank
		if n.idle() {
			rank = -1 // its former one may be another's by now
		}
		ns = append(ns, NodeStatus{
			Name: n.Name, State: n.stateText(), GroupRank: rank, Addr: n.Addr, Slots: n.Slots,
			Connected: n.attached > 0, Suspect: n.suspect(), Barred: cmp.Or(r.orders.bars[n.Name], n.bar),
			Since: n.since, Restarts: max(n.starts-1, 0), Role: n.Role, Machine: n.Machine, Devices: n.Devices,
		})
	}
	slices.SortStableFunc(ns, func(a, b NodeStatus) int {
		return cmp.Or(cmp.Compare(order(a.GroupRank), order(b.GroupRank)), cmp.Compare(a.Name, b.Name))
	})
	return ns
}

// failedState is the state of a node whose workers have all ended, some by a failure.
const failedState = "failed"

func (n *node) stateText() string {
	if n.state == succeeded && n.failed {
		return failedState
	}
	return string(n.state)
}

// lastStates are the nodes of a run that ends with o: of those with workers whether they count as succeeded or failed.
func (r *Round) lastStates(o job.Outcome) []NodeStatus {
	ns := r.Nodes()
	failed := map[string]bool{}
	for _, n := range r.members.nodes {
		failed[n.Name] = failed[n.Name] || n.failed
	}
	for i := range ns {
		n := &ns[i]
		n.Connected, n.Suspect = false, false
		switch {
		case n.GroupRank < 0:
		case failed[n.Name]:
			n.State = failedState
		default:
			n.State = string(o)
		}
	}
	return ns
}

// Ended are the nodes of a run that has ended, as they were then. The caller must not write to them.
func (r *Round) Ended() []NodeStatus { return r.ended }

// Away: the node with this ID has no request open, and nothing is known of its connection.
func (r *Round) Away(id string) bool {
	return r.liveness.away(id)
}

// Life is where the launcher of a node listens; the zero value: nowhere, or there is no such node.
func (r *Round) Life(id string) Life {
	if n := r.members.nodes[id]; n != nil {
		return n.Node.Life
	}
	return Life{}
}

// Lacks describes the nodes that the run waits for.
func (r *Round) Lacks() Lack { return r.shortage.lacks() }
