package replica

import (
	"cmp"
	"slices"

	"dlrover-run/internal/stable"
)

// Peer is a node that can keep copies of other nodes' shards.
type Peer struct {
	Node   int
	Addr   string // of its Server
	Switch string // the network switch it hangs on; nodes of an unknown switch, "", count as one switch
}

// Partners returns the peers that keep the copies of node self: `copies` of them, or all others when there are fewer.
// Every node is the partner of exactly as many. As far as possible they hang on another switch than self: of one copy
// as many as can be do, of several hardly fewer. The answer depends on the set of peers, self among them, and not on
// their order: all nodes that know the same peers agree. Nil when self is not among the peers.
func Partners(self int, peers []Peer, copies int) []Peer {
	peers = stable.Sorted(slices.Values(peers), func(a, b Peer) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Switch, b.Switch), cmp.Compare(a.Addr, b.Addr))
	})
	peers = slices.CompactFunc(peers, func(a, b Peer) bool { return a.Node == b.Node })
	stable.Sort(peers, func(a, b Peer) int { return cmp.Compare(a.Switch, b.Switch) })
	me := slices.IndexFunc(peers, func(p Peer) bool { return p.Node == self })
	if me < 0 {
		return nil
	}
	var partners []Peer
	for _, shift := range shifts(peers, min(copies, len(peers)-1)) {
		partners = append(partners, peers[(me+shift)%len(peers)])
	}
	return partners
}

// shifts are the distances of all partners on the ring of peers, which are sorted by switch: about half
// way, where no group is met again that has at most half of all nodes. Around a larger group they lie further apart, so
// that more of its nodes have one copy elsewhere; any shift between the sizes of the group and of the rest is as good.
// None is 0, and no two are the same.
func shifts(peers []Peer, copies int) (out []int) {
	n, group, largest := len(peers), 0, 0
	for i, p := range peers {
		if i > 0 && p.Switch != peers[i-1].Switch {
			group = 0
		}
		group++
		largest = max(largest, group)
	}
	gap := max(1, min(n-largest, (largest-n/2)/max(1, copies/2)))
	for c := range copies {
		out = append(out, n/2+(c+1)/2*(c%2*2-1)*gap) // n/2, then one gap more, one less, two more, ...
	}
	return out
}
