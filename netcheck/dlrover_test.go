package netcheck

import (
	"math"
	"math/rand/v2"
	"slices"
)

// dlrover2 is DLRover's algorithm, the baseline: two rounds of pairs (an odd one joins the last pair), the second one
// by the times of the first; a node is at fault when it has passed in neither. The second round is made only if any
// node failed in the first.
func dlrover2(n int, rng *rand.Rand, broken func(a, b int) bool) (blamed []bool) {
	times := make([]float64, n)
	for i := range times {
		times[i] = math.Inf(1)
	}
	round := func(groups [][]int) {
		for _, g := range groups {
			failed := false
			for i := range g {
				for j := range i {
					failed = broken(g[j], g[i]) || failed
				}
			}
			if !failed {
				took := 1 + rng.Float64()
				for _, i := range g {
					times[i] = min(times[i], took)
				}
			}
		}
	}
	order := rng.Perm(n)
	round(neighbours(order))
	if slices.ContainsFunc(times, func(t float64) bool { return math.IsInf(t, 1) }) {
		rng.Shuffle(n, func(i, j int) { order[i], order[j] = order[j], order[i] }) // equal times: in the order of reports
		slices.SortStableFunc(order, func(a, b int) int {
			if d := times[a] - times[b]; d != 0 && !math.IsNaN(d) {
				return int(math.Copysign(1, d))
			}
			return 0
		})
		round(extremes(order))
	}
	blamed = make([]bool, n)
	for i, t := range times {
		blamed[i] = math.IsInf(t, 1)
	}
	return blamed
}

// neighbours are pairs in order; what is left over joins the last one.
func neighbours(order []int) (groups [][]int) {
	for g := range slices.Chunk(order, 2) {
		if len(g) == 1 && len(groups) > 0 {
			groups[len(groups)-1] = append(slices.Clone(groups[len(groups)-1]), g[0])
		} else {
			groups = append(groups, g)
		}
	}
	return groups
}

// extremes pairs the fastest with the slowest; the middle one of an odd count joins the last pair.
func extremes(order []int) (groups [][]int) {
	i, j := 0, len(order)-1
	for ; i < j; i, j = i+1, j-1 {
		groups = append(groups, []int{order[i], order[j]})
	}
	if i == j && len(groups) > 0 {
		groups[len(groups)-1] = append(groups[len(groups)-1], order[i])
	}
	return groups
}
