package netcheck

import (
	"math/rand/v2"
	"slices"
)

// The number of base matchings for each node. A faulty node that fails a share d of its tests is missed with
// (1-d)^rounds. The retests clear nodes that base tests blame wrongly.
const (
	roundRobinTo = 6 // up to this many nodes all pairs are tested
	baseRounds   = 3
	newRounds    = 2 // of a node that comes to others that have passed
)

// referencePairs is the number of pairs of helpers in a round, which measure the usual rates where these are unknown.
const referencePairs = 3

// plan makes the base rounds of n nodes: pairs of indices, every index at most once a round. leaf names the switch of a
// node, "" for unknown.
func plan(n int, leaf func(int) string, rng *rand.Rand) [][][2]int {
	order := rng.Perm(n)
	switch {
	case n < 2:
		return nil
	case n <= roundRobinTo:
		return circle(order, n)
	case !labelled(n, leaf):
		return circle(order, baseRounds+n%2) // of an odd number one rests in every round
	}
	return byLeaf(order, leaf, rng)
}

// labelled reports whether there are at least two leaves and nearly all nodes have a label.
func labelled(n int, leaf func(int) string) bool {
	known, leaves := 0, map[string]bool{}
	for i := range n {
		if l := leaf(i); l != "" {
			known++
			leaves[l] = true
		}
	}
	return len(leaves) > 1 && known*10 >= n*9
}

// circle returns the first rounds of the circle method over order. No pair occurs twice, and of an odd number another
// one rests in every round. n-1 rounds of an even n, and n of an odd one, are all pairs.
func circle(order []int, rounds int) [][][2]int {
	ring := append([]int(nil), order...)
	if len(ring)%2 == 1 {
		ring = append(ring, -1) // its partner rests
	}
	n := len(ring)
	rounds = min(rounds, n-1)
	out := make([][][2]int, 0, rounds)
	for range rounds {
		var pairs [][2]int
		for i := range n / 2 {
			if a, b := ring[i], ring[n-1-i]; a >= 0 && b >= 0 {
				pairs = append(pairs, [2]int{a, b})
			}
		}
		out = append(out, pairs)
		last := ring[n-1] // the first one keeps its place, the others go round
		copy(ring[2:], ring[1:n-1])
		ring[1] = last
	}
	return out
}

// byLeaf tests in the leaf first, then across leaves.
func byLeaf(order []int, leaf func(int) string, rng *rand.Rand) [][][2]int {
	m := matcher{leaf: leaf, rng: rng, met: map[[2]int]bool{}}
	out := [][][2]int{m.inLeaf(order)}
	for range baseRounds - 1 {
		out = append(out, m.across(order))
	}
	return out
}

// matcher makes random matchings in which no pair occurs twice.
type matcher struct {
	leaf func(int) string
	rng  *rand.Rand
	met  map[[2]int]bool
}

func unordered(a, b int) [2]int { return [2]int{min(a, b), max(a, b)} }

// pair joins neighbours of order; of an odd number the last one rests.
func (m *matcher) pair(order []int) [][2]int {
	var pairs [][2]int
	for i := 0; i+1 < len(order); i += 2 {
		pairs = append(pairs, [2]int{order[i], order[i+1]})
		m.met[unordered(order[i], order[i+1])] = true
	}
	return pairs
}

// inLeaf pairs nodes of the same leaf; the nodes left over in the leaves are paired with each other.
func (m *matcher) inLeaf(order []int) [][2]int {
	waiting := map[string]int{} // by leaf, the node that has no partner yet
	var matched, rest []int
	for _, i := range order {
		if j, ok := waiting[m.leaf(i)]; ok {
			delete(waiting, m.leaf(i))
			matched = append(matched, j, i)
		} else {
			waiting[m.leaf(i)] = i
		}
	}
	for _, i := range order { // not over the map: its order is none
		if j, ok := waiting[m.leaf(i)]; ok && i == j {
			rest = append(rest, i)
		}
	}
	return m.pair(append(matched, rest...))
}

// swaps bounds how often across tries to make a pair better.
const swaps = 64

// across pairs nodes of different leaves as far as it can, by swapping in a random order.
func (m *matcher) across(order []int) [][2]int {
	o := append([]int(nil), order...)
	m.rng.Shuffle(len(o), func(i, j int) { o[i], o[j] = o[j], o[i] })
	for i := 0; i+1 < len(o); i += 2 {
		for try := 0; try < swaps && m.cost(o, i) > 0; try++ {
			m.improve(o, i, 2*m.rng.IntN(len(o)/2))
		}
	}
	return m.pair(o)
}

// improve swaps the second of pair i with the first of pair j where that makes both together better.
func (m *matcher) improve(o []int, i, j int) {
	if i == j {
		return
	}
	before := m.cost(o, i) + m.cost(o, j)
	o[i+1], o[j] = o[j], o[i+1]
	if m.cost(o, i)+m.cost(o, j) >= before {
		o[i+1], o[j] = o[j], o[i+1]
	}
}

// cost of the pair at o[i]: to meet again is worse than to share the leaf.
func (m *matcher) cost(o []int, i int) (cost int) {
	if m.met[unordered(o[i], o[i+1])] {
		cost = 2
	}
	if l := m.leaf(o[i]); l != "" && l == m.leaf(o[i+1]) {
		cost++
	}
	return cost
}

// withHelpers has every subject meet two helpers. The earlier pass of a helper is no evidence. So helpers that
// no subject needs in a round meet each other; those that meet a subject come first. At least one pair of helpers
// meets.
func withHelpers(subjects, helpers []int, references int) [][][2]int {
	rounds := make([][][2]int, newRounds)
	w, met := len(helpers), map[[2]int]bool{}
	meets := func(i, r int) int { return helpers[(i+r*max(w/2, 1))%w] }
	for r := range rounds {
		var needed, free []int
		for i := range subjects {
			rounds[r] = append(rounds[r], [2]int{subjects[i], meets(i, r)})
			needed = append(needed, meets(i, newRounds-1-r))
		}
		for _, x := range append(needed, helpers...) {
			if !slices.Contains(free, x) && !holds(rounds[r], x) {
				free = append(free, x)
			}
		}
		rounds[r] = append(rounds[r], couples(free, max(references, min(len(subjects), w)), met)...)
	}
	if len(met) == 0 {
		rounds = append(rounds, [][2]int{{helpers[0], helpers[1]}})
	}
	return rounds
}

func holds(pairs [][2]int, x int) bool {
	return slices.ContainsFunc(pairs, func(p [2]int) bool { return p[0] == x || p[1] == x })
}

// couples pairs the first with the last, at most so many, without those that have met.
func couples(free []int, most int, met map[[2]int]bool) (pairs [][2]int) {
	for i, j := 0, len(free)-1; i < j && len(pairs) < most; i, j = i+1, j-1 {
		if p := unordered(free[i], free[j]); !met[p] {
			met[p] = true
			pairs = append(pairs, p)
		}
	}
	return pairs
}
