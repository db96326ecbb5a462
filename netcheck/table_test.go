package netcheck

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/testkit"
)

// tally is how well an algorithm names the nodes that are at fault, on average over trials.
type tally struct {
	exact, blamed, missed float64
	mean, slowest         time.Duration
}

func (t *tally) add(want, got []bool) {
	exact := 1.0
	for i := range want {
		switch {
		case want[i] && !got[i]:
			t.missed++
			exact = 0
		case !want[i] && got[i]:
			t.blamed++
			exact = 0
		}
	}
	t.exact += exact
}

func (t *tally) over(trials int) {
	t.exact, t.blamed, t.missed = t.exact/float64(trials), t.blamed/float64(trials), t.missed/float64(trials)
	t.mean /= time.Duration(trials)
}

// accuracy runs ours and DLRover's on n nodes of which f fail a share d of their tests; any test fails with chance e.
func accuracy(n, f int, d, e float64, trials int, seed uint64) (ours, theirs tally) {
	for i := range trials {
		s := newSim(seed+uint64(i), n)
		s.spurious = e
		bad := make([]bool, n)
		for _, x := range s.rng.Perm(n)[:f] {
			s.nodes[x].fails = d
			bad[x] = true
		}
		s.run()
		got := make([]bool, n)
		for j, x := range s.nodes {
			got[j] = x.verdict.State == StateFaulty
			ours.slowest = max(ours.slowest, x.done)
			ours.mean += x.done / time.Duration(n)
		}
		ours.add(bad, got)
		rng := rand.New(rand.NewPCG(seed+uint64(i), 9))
		theirs.add(bad, dlrover2(n, rng, func(a, b int) bool {
			return bad[a] && rng.Float64() < d || bad[b] && rng.Float64() < d || rng.Float64() < e
		}))
	}
	ours.over(trials)
	theirs.over(trials)
	return ours, theirs
}

// seedOf is printed where a table fails.
func seedOf(n, f int) uint64 { return uint64(n*100_000 + f*1000) }

// tableRows are the rows of all tables: nodes, and how many are at fault.
func tableRows() [][2]int {
	rows := [][2]int{{3, 1}, {4, 1}, {4, 2}, {5, 1}, {5, 2}, {6, 1}, {6, 2}, {7, 1}, {7, 2}, {8, 1}, {8, 4}, {9, 2},
		{16, 1}, {16, 2}, {16, 4}, {17, 4}, {64, 1}, {64, 4}, {256, 13}}
	if !testing.Short() {
		rows = append(rows, [][2]int{{64, 2}, {256, 1}, {256, 2}, {256, 4}, {1024, 1}, {1024, 2},
			{1024, 4}, {1024, 11}, {1024, 52}, {4096, 1}, {4096, 2}, {4096, 4}, {4096, 41}, {4096, 205}}...)
	}
	return rows
}

func trialsOf(n int) int {
	if testing.Short() {
		return max(2, min(12, 120/n))
	}
	return max(10, min(1000, 25_000/n))
}

func show(t *testing.T, format string, args ...any) {
	if os.Getenv("NETCHECK_TABLES") != "" {
		fmt.Printf(format+"\n", args...)
	} else {
		t.Logf(format, args...)
	}
}

// With perfect tests ours is exact wherever it can be, and so never worse than DLRover's two rounds. With spurious
// failures it stays exact in 99 of 100 cases.
func TestTablesOfFaultyNodes(t *testing.T) {
	noise := []float64{0, 0.005, 0.02}
	if testing.Short() {
		noise = noise[:2]
	}
	for _, e := range noise {
		for _, row := range tableRows() {
			n, f := row[0], row[1]
			ours, theirs := accuracy(n, f, 1, e, trialsOf(n), seedOf(n, f))
			what := fmt.Sprintf("%d nodes, %d faulty, %.1f %% spurious, seeds from %d", n, f, 100*e, seedOf(n, f))
			show(t, "%-58s ours %.3f (+%.2f -%.2f) mean %4.1fs max %4.1fs  dlrover2 %.3f (+%.2f -%.2f)",
				what, ours.exact, ours.blamed, ours.missed, ours.mean.Seconds(), ours.slowest.Seconds(),
				theirs.exact, theirs.blamed, theirs.missed)
			luck := 0.0 // what few trials can tell
			if e > 0 {
				luck = 2 / float64(trialsOf(n))
			}
			require.GreaterOrEqual(t, ours.exact, theirs.exact-luck, what)
			require.LessOrEqual(t, ours.blamed, theirs.blamed+luck, what)
			switch {
			case e == 0 && (n > 8 || f <= n/3):
				require.Equal(t, 1.0, ours.exact, what)
			case e == 0.005 && f*2 < n:
				require.GreaterOrEqual(t, ours.exact, 0.99-luck, what)
			}
			require.Less(t, ours.slowest, 45*time.Second, what)
		}
	}
}

// A node that fails only most of its tests is found less often, but never less often than by DLRover.
func TestTableOfIntermittentNodes(t *testing.T) {
	for _, row := range [][2]int{{4, 1}, {16, 1}, {64, 4}, {256, 1}, {1024, 4}} {
		n, f := row[0], row[1]
		if testing.Short() && n > 64 {
			continue
		}
		ours, theirs := accuracy(n, f, 0.7, 0.005, max(20, trialsOf(n)), seedOf(n, f))
		what := fmt.Sprintf("%d nodes, %d fail 70 %%, seeds from %d", n, f, seedOf(n, f))
		show(t, "%-58s ours %.3f (+%.2f -%.2f)   dlrover2 %.3f (+%.2f -%.2f)", what, ours.exact, ours.blamed, ours.missed,
			theirs.exact, theirs.blamed, theirs.missed)
		require.GreaterOrEqual(t, ours.exact, theirs.exact, what)
		require.Less(t, ours.missed, theirs.missed+0.05, what)
	}
}

func TestOneDeadNodeOfAnyNumberIsFound(t *testing.T) {
	sizes := []int{3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 17, 31, 100, 255, 256}
	for _, n := range sizes {
		for seed := range uint64(max(2, min(20, 100/n))) {
			s := newSim(seed, n)
			s.nodes[int(seed)%n].fails = 1
			s.run()
			s.states(t, map[int]State{int(seed) % n: StateFaulty})
			require.True(t, s.nodes[int(seed)%n].verdict.Excluded)
			require.GreaterOrEqual(t, s.nodes[int(seed)%n].verdict.Partners, 2)
			require.GreaterOrEqual(t, s.nodes[int(seed)%n].verdict.Confidence, 0.98)
		}
	}
}

// brokenPaths breaks a share of all pairs.
func (s *sim) brokenPaths(share float64) func(a, b int) bool {
	bad := map[[2]int]bool{}
	return func(a, b int) bool {
		k := [2]int{a, b}
		if _, known := bad[k]; !known {
			bad[k] = s.rng.Float64() < share
		}
		return bad[k]
	}
}

// Where only paths are broken nobody is blamed; where many are, it is the fabric.
func TestTableOfPaths(t *testing.T) {
	for _, c := range []struct {
		n                 int
		share             float64
		noticed, isFabric float64 // at least
	}{{16, 0.01, 0.05, 0}, {64, 0.01, 0.3, 0}, {256, 0.01, 0.8, 0}, {256, 0.02, 0.9, 0.2},
		{256, 0.05, 1, 0.9}, {256, 0.1, 1, 1}, {256, 0.3, 1, 1}, {1024, 0.01, 1, 0},
		{1024, 0.02, 1, 0.2}, {1024, 0.05, 1, 1}, {1024, 0.2, 1, 1}} {
		for _, slow := range []bool{false, true} {
			if testing.Short() && c.n > 256 {
				continue
			}
			trials := max(2, min(100, 2*trialsOf(c.n)))
			noticed, isFabric := 0.0, 0.0
			for seed := range uint64(trials) {
				s := newSim(seed, c.n)
				s.check.cfg.Spec.ExcludeStraggler = true
				paths := s.brokenPaths(c.share)
				if slow {
					s.slowPath = func(a, b int) float64 { return map[bool]float64{true: 0.5, false: 1}[paths(a, b)] }
				} else {
					s.badPath = func(a, b int) bool { return paths(min(a, b), max(a, b)) }
				}
				s.run()
				for _, x := range s.nodes {
					require.NotEqual(t, StateFaulty, x.verdict.State, "%+v slow=%v seed %d: %+v", c, slow, seed, x.verdict)
				}
				if len(s.check.Picture().Paths) > 0 {
					noticed += 1 / float64(trials)
				}
				if s.check.results.cause != "" {
					isFabric += 1 / float64(trials)
				}
			}
			show(t, "%4d nodes, %2.0f %% of paths broken, slow=%-5v noticed %.2f fabric %.2f", c.n, 100*c.share, slow,
				noticed, isFabric)
			if !testing.Short() && !slow {
				require.GreaterOrEqual(t, noticed, c.noticed-1e-9, "%+v", c)
				require.GreaterOrEqual(t, isFabric, c.isFabric-1e-9, "%+v", c)
			}
		}
	}
}

// deadLeaf cuts off one leaf of 16, and kills some nodes elsewhere.
func deadLeaf(seed uint64, n, dead int, labels bool) (s *sim, leaf int) {
	s = newSim(seed, n)
	s.spurious = 0.005
	leaf = s.rng.IntN(n / 16)
	s.badPath = func(a, b int) bool { return (a/16 == leaf) != (b/16 == leaf) }
	for j, x := range s.nodes {
		if labels {
			x.node.Switch = fmt.Sprint("leaf", j/16)
		}
	}
	for dead > 0 {
		if x := s.nodes[s.rng.IntN(n)]; x.i/16 != leaf && x.fails == 0 {
			x.fails = 1
			dead--
		}
	}
	return s, leaf
}

// The uplink of a leaf is dead: with labels the leaf is named and nobody blamed, without them it is an island.
func TestTableOfLeaves(t *testing.T) {
	for _, n := range []int{64, 256, 1024} {
		for _, dead := range []int{0, 4} {
			for _, labels := range []bool{true, false} {
				if testing.Short() && n > 256 {
					continue
				}
				blamed, islands := 0.0, 0.0
				trials := max(3, min(200, 2*trialsOf(n)))
				for seed := range uint64(trials) {
					s, leaf := deadLeaf(seed, n, dead, labels)
					s.run()
					for _, x := range s.nodes {
						switch {
						case x.fails > 0:
							require.Equal(t, StateFaulty, x.verdict.State, "%d nodes, %d dead, seed %d", n, dead, seed)
						case labels && x.i/16 == leaf:
							require.Equal(t, StateLeaf, x.verdict.State, "%d nodes, %d dead, seed %d", n, dead, seed)
						case labels:
							require.NotEqual(t, StateFaulty, x.verdict.State, "%d nodes, %d dead, seed %d", n, dead, seed)
						case x.verdict.State == StateFaulty:
							blamed += 1 / float64(trials)
						case x.verdict.State == StateIsland:
							islands += 1 / float64(trials)
						}
					}
				}
				show(t, "%4d nodes, a leaf of 16 cut off, %d dead, labels=%-5v blamed %.2f, island of %.1f", n, dead,
					labels, blamed, islands)
				require.LessOrEqual(t, blamed, 0.6)
				if !labels {
					require.Greater(t, islands, 13.0)
				}
			}
		}
	}
}

// slowNodes makes f nodes slow in sending, receiving or both, and says of which kind each is.
func (s *sim) slowNodes(f int, share float64, turn int) map[int]string {
	kinds := map[int]string{}
	for k, i := range s.rng.Perm(len(s.nodes))[:f] {
		x := s.nodes[i]
		switch (k + turn) % 3 {
		case 0:
			x.tx, kinds[i] = share, "net.tx"
		case 1:
			x.rx, kinds[i] = share, "net.rx"
		case 2:
			x.tx, x.rx, kinds[i] = share, share, "net.both"
		}
	}
	return kinds
}

func TestTableOfSlowNodes(t *testing.T) {
	for _, c := range []struct {
		n, f                    int
		share, disturbed, paths float64
		exact                   float64 // at least
	}{{4, 1, 0.5, 0, 0, 1}, {4, 1, 0.5, 0.05, 0, 0.99}, {3, 1, 0.5, 0.05, 0, 0.9}, {7, 1, 0.5, 0.05, 0, 0.99},
		{16, 1, 0.5, 0.05, 0, 0.99}, {64, 4, 0.5, 0.05, 0, 0.99}, {64, 4, 0.7, 0.2, 0, 0.9},
		{1024, 52, 0.5, 0.05, 0, 0.98}, {1024, 52, 0.5, 0.05, 0.01, 0.97}} {
		if testing.Short() && c.n > 64 {
			continue
		}
		trials := max(5, min(300, trialsOf(c.n)))
		var got tally
		for seed := range uint64(trials) {
			s := newSim(seed, c.n)
			s.check.cfg.Spec.ExcludeStraggler = true
			s.disturbed = c.disturbed
			kinds := s.slowNodes(c.f, c.share, int(seed))
			paths := s.brokenPaths(c.paths)
			s.slowPath = func(a, b int) float64 { return map[bool]float64{true: 0.5, false: 1}[paths(a, b)] }
			s.run()
			want, is := make([]bool, c.n), make([]bool, c.n)
			for i, x := range s.nodes {
				want[i], is[i] = kinds[i] != "", x.verdict.State == StateFaulty
			}
			got.add(want, is)
			got.slowest = max(got.slowest, s.took())
		}
		got.over(trials)
		show(t, "%4d nodes, %2d at %.1fx, %2.0f %% disturbed, %.0f %% slow paths: exact %.3f (+%.2f -%.2f) max %.1fs",
			c.n, c.f, c.share, 100*c.disturbed, 100*c.paths, got.exact, got.blamed, got.missed, got.slowest.Seconds())
		if !testing.Short() || c.exact == 1 {
			require.GreaterOrEqual(t, got.exact, c.exact, "%+v", c)
		}
	}
}

// A sender, a receiver and a path at half the rate among four nodes are named with their direction, 20 times of 20.
func TestHalfTheRateAmongFour(t *testing.T) {
	for seed := range uint64(20) {
		for what, slow := range map[string]func(*sim){
			"net.tx":   func(s *sim) { s.nodes[2].tx = 0.5 },
			"net.rx":   func(s *sim) { s.nodes[2].rx = 0.5 },
			"net.both": func(s *sim) { s.nodes[2].tx, s.nodes[2].rx = 0.5, 0.5 },
		} {
			s := newSim(seed, 4)
			slow(s)
			s.run()
			s.states(t, map[int]State{2: StateSlow})
			require.Equal(t, what, s.nodes[2].verdict.Kind)
			require.InDelta(t, 0.5, s.nodes[2].verdict.Findings[0].Value/s.nodes[2].verdict.Findings[0].Median, 0.1)
		}
		s := newSim(seed, 4)
		s.slowPath = func(a, b int) float64 { return map[bool]float64{true: 0.4, false: 1}[a == 0 && b == 3] }
		s.run()
		s.states(t, map[int]State{0: StatePath, 3: StatePath})
		paths := s.check.Picture().Paths
		require.Len(t, paths, 1)
		require.Regexp(t, `^node0 > node3: 0.4\d? of the median rate|^node0 > node3: 0.3\d of`, paths[0])
	}
}

// 5 % of many nodes are faulty: nobody but suspects and those who test them works after the base rounds, and the
// healthy do not wait for the end.
func TestOnlySuspectsWorkAfterRoundThree(t *testing.T) {
	n := 4096
	if testing.Short() {
		n = 320
	}
	s := newSim(1, n)
	s.spurious = 0.005
	for _, i := range s.rng.Perm(n)[:n/20] {
		s.nodes[i].fails = 1
	}
	failed := map[int]bool{}
	for i, x := range s.nodes {
		failed[i] = x.fails > 0
	}
	s.run()
	tested, calm := map[int]bool{}, 0
	for _, w := range s.work {
		if w.round > 3 {
			require.NotEqual(t, baseTest, w.kind)
			tested[w.ends[0]] = true
		}
	}
	for _, x := range s.nodes {
		require.Less(t, x.done, 45*time.Second)
		if x.done < 13*time.Second {
			calm++
		}
	}
	require.Less(t, len(tested), n/4, "suspects")
	require.Greater(t, calm, n*4/10, "healthy nodes that did not wait")
}

// The state of a check is bounded, and its time.
func TestTenThousandNodes(t *testing.T) {
	testkit.Long(t, "it measures memory")
	before := heapNow()
	begin := time.Now()
	s := newSim(1, 10_000)
	sim := heapNow() - before
	s.run()
	show(t, "10,000 nodes: %v of CPU with the simulation, decided after %v", time.Since(begin), s.took())
	s.queue, s.work, s.notes = nil, nil, nil
	perNode := float64(heapNow()-before-sim) / 10_000
	show(t, "%.0f bytes a node", perNode)
	require.Less(t, perNode, 10_000.)
	require.Less(t, s.took(), 10*time.Second)
	runtime.KeepAlive(s)
}

func heapNow() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
