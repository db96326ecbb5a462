package rendezvous

import (
	"cmp"
	"slices"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/stable"
)

// members are the nodes that are here, in a world or not, and how many there are in each state.
type members struct {
	nodes    map[string]*node // by ID
	wishes   map[int]*node    // newest node of each wished rank
	left     map[string]bool  // IDs that have left: a Join that was under way must not bring them back
	arrivals int

	waiting  int // nodes in state waiting
	checking int // nodes in state checking
	again    int // nodes under a check's bar that the gate checks again, or may
	barred   int // other nodes in state barred
	stopping int // nodes in state pending
}

func newMembers() *members {
	return &members{nodes: map[string]*node{}, wishes: map[int]*node{}, left: map[string]bool{}}
}

// find returns the node with the ID, or ErrUnknownNode.
func (m *members) find(id string) (*node, error) {
	if n := m.nodes[id]; n != nil {
		return n, nil
	}
	return nil, ErrUnknownNode
}

// here reports whether n has not gone.
func (m *members) here(n *node) bool { return m.nodes[n.ID] == n }

// remove takes out a node that goes away.
func (m *members) remove(n *node) {
	delete(m.nodes, n.ID)
	m.count(n, -1)
}

// leave remembers that the ID has left.
func (m *members) leave(id string) {
	if len(m.left) > MaxNodes {
		clear(m.left) // their requests have long ended
	}
	m.left[id] = true
}

// idle is the number of nodes without workers.
func (m *members) idle() int { return m.waiting + m.checking + m.again + m.barred }

// superseded is a dead node that n replaces, or nil.
func (m *members) superseded(n *node) *node {
	if o := m.wisher(n.Rank); o != nil && o.supersededBy(n.Node) {
		return o
	}
	return nil
}

// wish books the rank that n wishes for, unless a node of a later generation wishes for it.
func (m *members) wish(n *node) {
	if o := m.wisher(n.Rank); o == nil || n.Generation >= o.Generation {
		m.wishes[n.Rank] = n
	}
}

// possible is how many nodes a world might be chosen from.
func (m *members) possible() int { return m.waiting + m.checking + m.again }

// arrived adds a node. One with the same ID makes way for it.
func (m *members) arrived(now time.Time, who Node) *node {
	if o := m.nodes[who.ID]; o != nil {
		m.count(o, -1)
	}
	n := &node{Node: who, rank: -1, arrival: m.arrivals, since: now.Add(-who.Uptime), detached: now}
	m.arrivals++
	m.nodes[n.ID] = n
	return n
}

// become moves n to another state.
func (m *members) become(n *node, s nodeState) {
	m.count(n, -1)
	n.state = s
	m.count(n, 1)
}

// setBar gives n a check's bar or, with nil, takes it away; with again, the next gate may check it again.
func (m *members) setBar(n *node, bar *job.Cause, again bool) {
	m.count(n, -1)
	n.bar, n.again = bar, again
	m.count(n, 1)
}

// count keeps the numbers of nodes by state, so that no decision has to look at all of them.
func (m *members) count(n *node, by int) {
	switch {
	case n.state == waiting:
		m.waiting += by
	case n.state == pending:
		m.stopping += by
	case n.state == checking && n.bar == nil:
		m.checking += by
	case n.state == checking || n.state == barred && n.again:
		m.again += by
	case n.state == barred:
		m.barred += by
	}
}

// sorted lists the nodes that f picks, in order of arrival: no order of a map decides anything.
func (m *members) sorted(f func(*node) bool) []*node {
	var ns []*node
	for _, n := range m.nodes {
		if f(n) {
			ns = append(ns, n)
		}
	}
	slices.SortFunc(ns, func(a, b *node) int { return cmp.Compare(a.arrival, b.arrival) })
	return ns
}

func everyNode(*node) bool { return true }

// barredAs lists the nodes of the name that are barred, by name or by a check.
func (m *members) barredAs(name string) []*node {
	return m.sorted(func(n *node) bool { return n.Name == name && (n.state == barred || n.bar != nil) })
}

// wisher is the newest node that wished for the rank, if it is still here.
func (m *members) wisher(rank int) *node {
	o := m.wishes[rank]
	if rank < 0 || o == nil || !m.here(o) {
		return nil
	}
	return o
}

// candidates are the nodes from which a world of the size may be chosen. Where the gate has opened without all answers,
// they include the nodes whose answer is missing.
func (m *members) candidates(size int) []*node {
	opened := size > m.waiting
	var ns []*node
	for _, n := range m.nodes {
		if n.state == waiting || opened && n.state == checking && n.bar == nil {
			ns = append(ns, n)
		}
	}
	return ns
}

// gaters is the number of nodes without workers that can be checked and may get workers.
func (m *members) gaters() (sum int) {
	for _, n := range m.nodes {
		if n.can(CanGate) && (n.state == waiting || n.state == checking || n.state == barred && n.again) {
			sum++
		}
	}
	return sum
}

// inDoubt: most nodes are suspect at once.
func (m *members) inDoubt() bool { return len(m.nodes) >= 4 && 2*m.suspects() > len(m.nodes) }

func (m *members) suspects() (count int) {
	for _, n := range m.nodes {
		if n.suspect() {
			count++
		}
	}
	return count
}

// named are the nodes of one name.
func (m *members) named(name string) (ns []Node) {
	for _, n := range m.nodes {
		if n.Name == name {
			ns = append(ns, n.Node)
		}
	}
	stable.Sort(ns, func(a, b Node) int { return cmp.Compare(a.ID, b.ID) })
	return ns
}
