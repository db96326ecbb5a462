package rendezvous

import (
	"cmp"

	"dlrover-run/internal/job"
	"dlrover-run/internal/stable"
)

// statuses lists the nodes for a status page: members by rank, then those waiting.
func (m *members) statuses(topo Topology, bars map[string]*job.Cause) []NodeStatus {
	ns := make([]NodeStatus, 0, len(m.nodes))
	for _, n := range m.sorted(everyNode) {
		rank := n.rank
		if n.idle() {
			rank = -1 // its former one may be another's by now
		}
		ns = append(ns, NodeStatus{
			Name: n.Name, State: n.stateText(), GroupRank: rank, Addr: n.Addr, Slots: n.Slots,
			Connected: n.attached > 0, Suspect: n.suspect(), Barred: cmp.Or(bars[n.Name], n.bar),
			Since: n.since, Restarts: max(n.starts-1, 0), Role: n.Role, Machine: n.Machine, Devices: n.Devices,
			Switch: topo.leafOf(n),
		})
	}
	stable.Sort(ns, func(a, b NodeStatus) int {
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

// lastStatuses are the nodes of a run that ends with o. Those with workers count as succeeded or failed.
func (m *members) lastStatuses(topo Topology, bars map[string]*job.Cause, o job.Outcome) []NodeStatus {
	ns := m.statuses(topo, bars)
	failed := map[string]bool{}
	for _, n := range m.nodes {
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
