package netcheck

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// seedsOf is how many checks a table has of a row.
func seedsOf(short, long int) uint64 {
	if testing.Short() {
		return uint64(short)
	}
	return uint64(long)
}

// newcomer is a check of node 0 with the others as helpers, which have passed before.
func newcomer(seed uint64, helpers int, faults func(*sim)) *sim {
	s := newSim(seed, 1+helpers)
	s.run()
	for _, x := range s.nodes {
		x.verdict = nil
	}
	s.start, s.helpers = s.now, helpers
	faults(s)
	s.run()
	return s
}

// dead lets all tests of some nodes fail.
func dead(nodes ...int) func(*sim) {
	return func(s *sim) {
		for _, i := range nodes {
			s.nodes[i].fails = 1
		}
	}
}

func TestADeadNewcomerIsLeftOut(t *testing.T) {
	for helpers := 1; helpers <= 8; helpers++ {
		for seed := range seedsOf(5, 100) {
			s := newcomer(seed, helpers, dead(0))
			for i, x := range s.nodes {
				require.Equal(t, i == 0, x.verdict.Excluded, "%d helpers, seed %d: node %d: %+v", helpers, seed, i, x.verdict)
			}
			want := StateFaulty
			if helpers == 1 {
				want = StateUndecided
			}
			require.Equal(t, want, s.nodes[0].verdict.State)
			require.Equal(t, helpers == 1, s.nodes[0].verdict.Again, "of two nodes nothing is proved")
			require.Less(t, s.took(), 16*time.Second)
		}
	}
}

// What helpers have passed in an earlier check is no evidence: they show in every check whether they still pass.
func TestHelpersThatHaveBrokenSince(t *testing.T) {
	for helpers := 3; helpers <= 8; helpers++ {
		for broken := 1; broken <= min(2, helpers-1); broken++ {
			for seed := range seedsOf(5, 100) {
				s := newcomer(seed, helpers, dead([]int{1, 2}[:broken]...))
				require.Equal(t, StateOK, s.nodes[0].verdict.State, "%d of %d broken, seed %d: %+v", broken, helpers, seed,
					s.nodes[0].verdict)
				for i, x := range s.nodes[1:] {
					require.False(t, x.verdict.Excluded && i >= broken, "%d of %d, seed %d: %+v", broken, helpers, seed, x.verdict)
				}
				if helpers <= 5 {
					require.True(t, s.nodes[1].verdict.Excluded)
				}
			}
		}
	}
}

// As long as two nodes reach each other, those that reach nobody are not let in, however many they are.
func TestMostNodesAreDead(t *testing.T) {
	for _, n := range []int{4, 7, 8, 12} {
		for good := 2; good <= n/2; good++ {
			for seed := range seedsOf(40, 400) {
				s := newSim(seed, n)
				bad := s.rng.Perm(n)[good:]
				dead(bad...)(s)
				s.run()
				for i, x := range s.nodes {
					require.Equal(t, slices.Contains(bad, i), x.verdict.Excluded, "%d of %d, seed %d: node %d: %+v", good, n, seed, i,
						x.verdict)
				}
			}
		}
	}
}

// Where nothing passes at all the newcomer waits, and nobody is named.
func TestNothingPassesWithHelpers(t *testing.T) {
	s := newcomer(1, 4, dead(0, 1, 2, 3, 4))
	for i, x := range s.nodes {
		require.NotEqual(t, StateFaulty, x.verdict.State)
		require.Equal(t, i == 0, x.verdict.Excluded)
		require.Equal(t, i == 0, x.verdict.Again)
	}
}

// Two nodes that reach each other by no test train, as the tests may be what is wrong; --check-only ends by Reaches.
func TestTwoNodesThatFailEachOther(t *testing.T) {
	s := newSim(1, 2)
	dead(1)(s)
	s.run()
	for _, x := range s.nodes {
		require.Equal(t, StatePath, x.verdict.State)
		require.False(t, x.verdict.Excluded)
		require.False(t, x.verdict.Reaches())
	}
}

// In a run of which no test has ever passed, tests between nodes may be what is at fault.
func TestOneHelperOfARunWithoutAnyPass(t *testing.T) {
	s := newSim(1, 2)
	s.nodes[0].fails = 1
	s.run()
	s.helpers = 1
	s.run()
	require.Equal(t, StatePath, s.nodes[0].verdict.State)
	require.False(t, s.nodes[0].verdict.Excluded)
}

func TestTimeThatIsOverMakesNobodyOK(t *testing.T) {
	for _, timeout := range []time.Duration{5 * time.Second, 8 * time.Second, 10 * time.Second, 15 * time.Second} {
		for seed := range seedsOf(10, 200) {
			s := newSim(seed, 6)
			s.check.cfg.Spec.Timeout = timeout
			dead(1, 4)(s)
			s.run()
			for i, x := range s.nodes {
				switch {
				case i == 1 || i == 4:
					require.Contains(t, []State{StateUndecided, StateNotTested, StateFaulty, StateUnattributable}, x.verdict.State)
				case x.passed:
					require.False(t, x.verdict.Excluded, "%v, seed %d: node %d: %+v", timeout, seed, i, x.verdict)
				}
				if timeout >= 10*time.Second && (i == 1 || i == 4) {
					require.True(t, x.verdict.Excluded, "%v, seed %d: node %d: %+v", timeout, seed, i, x.verdict)
				}
			}
		}
	}
}

// isNamed says that a verdict holds a low rate against its node.
func isNamed(v *Verdict) bool { return v.State == StateSlow || v.State == StateFaulty }

func TestSlowNodesDoNotHideEachOther(t *testing.T) {
	for _, c := range []struct {
		n, slow int
		share   float64
		all     float64 // at least
	}{{4, 1, 0.25, 1}, {7, 2, 0.25, 0.97}, {7, 3, 0.25, 0.8}, {8, 3, 0.25, 0.97}, {8, 3, 0.5, 0.97}, {12, 4, 0.25, 0.97},
		{16, 5, 0.25, 0.97}, {16, 5, 0.5, 0.97}, {64, 12, 0.25, 0.97}} {
		seeds := seedsOf(10, 300)
		all := 0
		for seed := range seeds {
			s := newSim(seed, c.n)
			slow, named := map[int]bool{}, 0
			for _, i := range s.rng.Perm(c.n)[:c.slow] {
				s.nodes[i].tx, s.nodes[i].rx, slow[i] = c.share, c.share, true
			}
			s.run()
			for i, x := range s.nodes {
				if isNamed(x.verdict) {
					require.True(t, slow[i], "%+v seed %d: node %d: %+v", c, seed, i, x.verdict)
					named++
				}
			}
			if named == c.slow {
				all++
			}
		}
		show(t, "%d of %d nodes at %.2f: all named in %.3f", c.slow, c.n, c.share, float64(all)/float64(seeds))
		require.GreaterOrEqual(t, float64(all)/float64(seeds), c.all-0.2*float64(int(10/seeds)), "%+v", c)
	}
}

// A fifth of all rates is spoilt by something else. One healthy node in a thousand checks may be left out for it.
func TestDisturbedNodesAreNotSlow(t *testing.T) {
	for _, n := range []int{3, 4, 5, 6, 8, 16, 64} {
		seeds := max(20, seedsOf(60, 12_000)/uint64(n))
		for _, slow := range []bool{false, true} {
			out, found := 0, 0
			for seed := range seeds {
				s := newSim(seed, n)
				s.disturbed = 0.2
				s.check.cfg.Spec.ExcludeStraggler = true
				if slow {
					s.nodes[1].tx = 0.5
				}
				s.run()
				for i, x := range s.nodes {
					switch {
					case i == 1 && slow && x.verdict.Excluded:
						found++
					case x.verdict.Excluded:
						out++
						t.Logf("%d nodes, seed %d: node %d: %s", n, seed, i, x.verdict.Reason)
					}
				}
			}
			show(t, "%2d nodes, 20 %% disturbed, one slow=%-5v healthy out %d, slow found %d of %d", n, slow, out, found, seeds)
			require.LessOrEqual(t, out, int(seeds/1000))
			require.True(t, !slow || found*10 >= int(seeds)*9, "%d of %d", found, seeds)
		}
	}
}

// uplinks has leaves of a size whose uplinks carry so many nodes' traffic at once; the first leaf's a share of that.
func (s *sim) uplinks(size int, nodes, first float64) {
	active := map[string][2]int{}
	s.began = func(test string, a, b int) { active[test] = [2]int{a, b} }
	s.ended = func(test string) { delete(active, test) }
	share := func(leaf int) float64 {
		load, capacity := 0, nodes
		for _, ends := range active {
			if (ends[0]/size == leaf) != (ends[1]/size == leaf) {
				load++
			}
		}
		if leaf == 0 {
			capacity *= first
		}
		return capacity / float64(max(load, 1))
	}
	s.slowPath = func(a, b int) float64 {
		if a/size == b/size {
			return 1
		}
		return min(1, share(a/size), share(b/size))
	}
}

// Nobody has told which nodes share a switch. A leaf that is slow together is a leaf: no node is named for it.
func TestSlowUplinksNameNobody(t *testing.T) {
	for _, c := range []struct {
		n, size      int
		nodes, first float64
	}{{64, 8, 8, 1}, {64, 8, 4, 1}, {64, 8, 2, 1}, {64, 16, 4, 1}, {64, 8, 4, 0.5}, {64, 8, 8, 0.5}, {64, 8, 8, 0.25},
		{64, 16, 8, 0.5}, {64, 4, 2, 0.5}, {32, 8, 4, 0.5}, {256, 16, 8, 0.5}} {
		named := 0
		seeds := seedsOf(3, 1000*64/c.n)
		for seed := range seeds {
			s := newSim(seed, c.n)
			s.check.cfg.Spec.ExcludeStraggler = true
			s.disturbed = 0.02
			s.uplinks(c.size, c.nodes, c.first)
			s.run()
			for _, x := range s.nodes {
				if isNamed(x.verdict) {
					named++
					t.Logf("%+v seed %d: node %d: %s", c, seed, x.i, x.verdict.Reason)
				}
			}
		}
		show(t, "%3d nodes in leaves of %2d, uplinks of %g nodes, one of %g: %d named in %d checks", c.n, c.size, c.nodes,
			c.first*c.nodes, named, seeds)
		require.LessOrEqual(t, named, int(seeds/100), "%+v", c)
	}
}

// A check ends when nothing can change its verdicts any more, however much time it may take.
func TestNothingIsTestedInVain(t *testing.T) {
	patient := func(n int) *sim {
		s := newSim(1, n)
		s.check.cfg.Spec.Timeout = 10 * time.Minute
		s.failTime = 5500 * time.Millisecond
		return s
	}
	for _, n := range []int{2, 3, 4, 6, 8, 16, 64} {
		s := patient(n)
		s.slowPath = func(a, b int) float64 { return map[bool]float64{true: 0.3, false: 1}[a == 0 && b == 1] }
		s.run()
		require.Less(t, s.took(), 12*time.Second, "a slow path of %d nodes", n)
		for _, share := range []float64{1, 0.9, 0.7, 0.5} {
			s = patient(n)
			for _, x := range s.nodes {
				x.fails = share
			}
			s.run()
			require.Less(t, s.took(), 2*time.Minute+40*time.Second, "%d nodes fail %v of their tests", n, share)
			if share == 1 {
				require.Less(t, s.took(), time.Minute, "%d nodes fail all tests", n)
			}
		}
		s = patient(n) // what has been sent at the full rate is not sent again at that
		credit := map[*simNode]int{}
		for _, x := range s.nodes {
			x.sent = func(r *Result, _ *simNode) {
				if credit[x]++; credit[x] > 1 && r.Flows != nil {
					r.Flows[0].Mbps *= 0.3
				}
			}
		}
		s.run()
		require.Less(t, s.took(), 25*time.Second, "policers of %d nodes", n)
		for _, x := range s.nodes {
			require.False(t, x.verdict.Excluded)
		}
	}
}

func TestAWrongInterfaceEverywhereIsNamed(t *testing.T) {
	for _, n := range []int{3, 8, 40} {
		s := newSim(1, n)
		for _, x := range s.nodes {
			x.fails, x.node.NICs = 1, []NIC{{Name: "docker0"}}
		}
		s.run()
		require.Contains(t, s.nodes[0].verdict.Reason, "pairs has passed over docker0: unreachable")
		for _, x := range s.nodes {
			require.Equal(t, StateUnattributable, x.verdict.State)
			require.False(t, x.verdict.Excluded)
		}
		s.nodes[1].node.NICs = []NIC{{Name: "eth0"}}
		s.run()
		require.Contains(t, s.nodes[0].verdict.Reason, "pairs has passed: unreachable", fmt.Sprint("not all have the same"))
	}
}
