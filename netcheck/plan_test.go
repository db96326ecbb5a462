package netcheck

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func noLeaf(int) string { return "" }

// met requires that every round is a matching and that no pair occurs twice; it returns the pairs.
func met(t *testing.T, n int, rounds [][][2]int) map[[2]int]int {
	t.Helper()
	pairs := map[[2]int]int{}
	for r, round := range rounds {
		busy := map[int]bool{}
		for _, p := range round {
			require.False(t, busy[p[0]] || busy[p[1]], "%d nodes, round %d: %v", n, r, p)
			require.NotEqual(t, p[0], p[1])
			busy[p[0]], busy[p[1]] = true, true
			_, again := pairs[unordered(p[0], p[1])]
			require.False(t, again, "%d nodes, round %d: %v again", n, r, p)
			pairs[unordered(p[0], p[1])] = r
		}
	}
	return pairs
}

func TestFewNodesAllMeet(t *testing.T) {
	for n, rounds := range map[int]int{0: 0, 1: 0, 2: 1, 3: 3, 4: 3, 5: 5, 6: 5} {
		p := plan(n, noLeaf, rand.New(rand.NewPCG(1, 1)))
		require.Len(t, p, rounds)
		require.Len(t, met(t, n, p), n*(n-1)/2)
	}
}

func TestManyNodesMeetThreeTimes(t *testing.T) {
	for _, n := range []int{7, 8, 9, 64, 101, 255, 256, 1000} {
		p := plan(n, noLeaf, rand.New(rand.NewPCG(uint64(n), 1)))
		require.Len(t, p, baseRounds+n%2)
		met(t, n, p)
		rest := map[int]bool{}
		for _, round := range p {
			require.Len(t, round, n/2)
			busy := map[int]bool{}
			for _, q := range round {
				busy[q[0]], busy[q[1]] = true, true
			}
			for i := range n {
				if !busy[i] {
					require.False(t, rest[i], "%d rests twice", i)
					rest[i] = true
				}
			}
		}
	}
}

func TestLabelledNodesMeetInTheirLeafAndAcross(t *testing.T) {
	for _, c := range []struct{ n, size int }{{8, 4}, {64, 16}, {255, 5}, {256, 16}, {1000, 32}, {300, 150}} {
		leaf := func(i int) string { return fmt.Sprint(i / c.size) }
		p := plan(c.n, leaf, rand.New(rand.NewPCG(1, 1)))
		require.Len(t, p, baseRounds)
		met(t, c.n, p)
		for r, round := range p {
			inLeaf := 0
			for _, q := range round {
				if leaf(q[0]) == leaf(q[1]) {
					inLeaf++
				}
			}
			if r == 0 {
				require.Greater(t, inLeaf*10, len(round)*7, "%+v", c)
			} else {
				require.LessOrEqual(t, inLeaf*20, len(round), "%+v", c)
			}
		}
	}
}

func TestLabels(t *testing.T) {
	require.False(t, labelled(10, noLeaf))
	require.False(t, labelled(10, func(int) string { return "one" }))
	require.True(t, labelled(10, func(i int) string { return []string{"", "a", "b"}[min(i, 2)] }))
	require.False(t, labelled(10, func(i int) string { return []string{"", "", "a", "b"}[min(i, 3)] }))
}

func TestSubjectsMeetTwoHelpers(t *testing.T) {
	for subjects := 1; subjects <= 8; subjects++ {
		for w := max(2, subjects); w <= 4*subjects+4; w++ {
			for _, references := range []int{1, referencePairs} {
				p := withHelpers(upTo(0, subjects), upTo(subjects, subjects+w), references)
				partners := map[int]int{}
				between := 0
				for q := range met(t, subjects+w, p) {
					if q[0] >= subjects {
						between++
					} else {
						partners[q[0]]++
					}
				}
				for s := range subjects {
					require.Equal(t, 2, partners[s])
				}
				require.Positive(t, between, "%d subjects, %d helpers", subjects, w)
				require.LessOrEqual(t, between, 2*max(references, subjects))
			}
		}
	}
}

func upTo(from, to int) (xs []int) {
	for i := from; i < to; i++ {
		xs = append(xs, i)
	}
	return xs
}

func TestTwoHelpersAreEnough(t *testing.T) {
	p := withHelpers([]int{0}, []int{1, 2}, 1)
	require.Equal(t, [][][2]int{{{0, 1}}, {{0, 2}}, {{1, 2}}}, p)
}
