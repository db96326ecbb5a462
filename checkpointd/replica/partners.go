package replica

import (
	"cmp"
	"slices"
)

// Peer is a node that can keep copies of other nodes' shards.
type Peer struct {
	Node   int
	Addr   string // of its Server
	Switch string // the network switch it hangs on; nodes of an unknown switch, "", count as one switch
}

// Partners returns the peers that keep the copies of node self: `copies` of them, or all others when there are fewer.
// Every node is the partner of exactly as many, and as many pairs as possible have different switches, so that the
// loss of a switch costs no shard. The answer depends on the set of peers, self among them, and not on their order:
// all nodes that know the same peers agree. Nil when self is not among the peers.
func Partners(self int, peers []Peer, copies int) []Peer {
	peers = slices.SortedFunc(slices.Values(peers), func(a, b Peer) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Switch, b.Switch), cmp.Compare(a.Addr, b.Addr))
	})
	peers = slices.CompactFunc(peers, func(a, b Peer) bool { return a.Node == b.Node })
	me := slices.IndexFunc(peers, func(p Peer) bool { return p.Node == self })
	copies = min(copies, len(peers)-1)
	if me < 0 || copies <= 0 {
		return nil
	}
	slices.SortStableFunc(peers, func(a, b Peer) int { return cmp.Compare(a.Switch, b.Switch) })
	groups := bySwitch(peers)
	return assign(groups, traffic(groups, copies), self)
}

// bySwitch cuts peers, which are sorted by switch, into one group for each switch.
func bySwitch(peers []Peer) (groups [][]Peer) {
	for i, p := range peers {
		if i == 0 || p.Switch != peers[i-1].Switch {
			groups = append(groups, nil)
		}
		last := &groups[len(groups)-1]
		*last = append(*last, p)
	}
	return groups
}

// traffic says how many copies go from each group to each group, with as few as possible inside a group. It starts
// with the nodes in a ring, where the partners are the nodes about half way round. Unless one group is close to half of
// all nodes, that never meets the own group; where it does, detour exchanges such copies.
func traffic(groups [][]Peer, copies int) [][]int {
	var ring []int // the group of each node
	for g, members := range groups {
		for range members {
			ring = append(ring, g)
		}
	}
	x := make([][]int, len(groups))
	for g := range x {
		x[g] = make([]int, len(groups))
	}
	n := len(ring)
	for c := range copies {
		shift := n/2 + (c+1)/2*(c%2*2-1) // n/2, n/2+1, n/2-1, n/2+2, ... never 0 modulo n
		for i, g := range ring {
			x[g][ring[(i+shift)%n]]++
		}
	}
	for detour(groups, x) {
	}
	return x
}

// detour reroutes as many copies as one cycle of groups allows, so that fewer stay in their group; false when x is the
// best already. It is the negative cycle of a minimum-cost flow, found by Bellman and Ford's method: nodes 0..k-1 are the
// groups that send, k..2k-1 the same groups as receivers, and a copy inside a group costs 1.
func detour(groups [][]Peer, x [][]int) bool {
	k, inside := len(groups), 0
	for g := range x {
		inside += x[g][g]
	}
	if inside == 0 || k == 1 {
		return false
	}
	dist, from := make([]int, 2*k), make([]int, 2*k)
	last := -1
	for range 2 * k {
		last = -1
		for a := range k {
			for b := range k {
				cost := 0
				if a == b {
					cost = 1
				}
				if room(groups, x, a, b) > 0 && dist[a]+cost < dist[k+b] {
					dist[k+b], from[k+b], last = dist[a]+cost, a, k+b
				}
				if x[a][b] > 0 && dist[k+b]-cost < dist[a] {
					dist[a], from[a], last = dist[k+b]-cost, k+b, a
				}
			}
		}
		if last < 0 {
			return false
		}
	}
	for range 2 * k { // whatever changed so late is on the cycle or behind it
		last = from[last]
	}
	reroute(groups, x, from, last)
	return true
}

// room is how many more copies may go from group a to group b: no node gets the same shard twice, or its own.
func room(groups [][]Peer, x [][]int, a, b int) int {
	pairs := len(groups[a]) * len(groups[b])
	if a == b {
		pairs -= len(groups[a])
	}
	return pairs - x[a][b]
}

// reroute sends as many copies as fit round the cycle that `from` leads back along, start being on it.
func reroute(groups [][]Peer, x [][]int, from []int, start int) {
	k := len(groups)
	walk := func(visit func(a, b int, add bool)) {
		for to := start; ; {
			if f := from[to]; f < k {
				visit(f, to-k, true)
			} else {
				visit(to, f-k, false)
			}
			if to = from[to]; to == start {
				return
			}
		}
	}
	most := -1
	walk(func(a, b int, add bool) {
		fits := x[a][b]
		if add {
			fits = room(groups, x, a, b)
		}
		if most < 0 || fits < most {
			most = fits
		}
	})
	walk(func(a, b int, add bool) {
		if add {
			x[a][b] += most
		} else {
			x[a][b] -= most
		}
	})
}

// assign hands the copies between groups to their nodes in turn, and returns the partners of self. A group's nodes take
// turns in sending across all the groups it sends to, and in receiving across all that it receives from: each comes
// up equally often, and no pair comes twice.
func assign(groups [][]Peer, x [][]int, self int) (partners []Peer) {
	sent, received := make([]int, len(groups)), make([]int, len(groups))
	take := func(a, b, from, to int) {
		if groups[a][from].Node == self {
			partners = append(partners, groups[b][to%len(groups[b])])
		}
	}
	for g, members := range groups { // first the copies that stay: node i sends to i+1, i+2, ...
		size := len(members)
		each, more := x[g][g]/size, x[g][g]%size
		for i := range size {
			n := each
			if i < more {
				n++
			}
			for j := range n {
				take(g, g, i, i+1+j)
			}
		}
		sent[g], received[g] = more, each+1+more
	}
	for a := range groups {
		for b := range groups {
			if a == b {
				continue
			}
			takeTurns(x[a][b], len(groups[a]), &sent[a], &received[b], func(from, to int) { take(a, b, from, to) })
		}
	}
	return partners
}

// takeTurns deals `count` copies from `size` senders, of whom *sent is the next, to receivers, of whom *received is the
// next. One sender deals all its copies before the following one does.
func takeTurns(count, size int, sent, received *int, take func(from, to int)) {
	for i := range min(count, size) {
		for range (count - i + size - 1) / size {
			take((*sent+i)%size, *received)
			*received++
		}
	}
	*sent += count
}
