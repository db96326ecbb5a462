package netcheck

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// The table of stragglers: compute and network are told apart, whatever the number of nodes.
func TestStragglers(t *testing.T) {
	for _, n := range []int{3, 4, 6, 16} {
		for _, c := range []struct {
			what string
			slow func(*simNode)
			kind string
		}{
			{"compute 2x", func(x *simNode) { x.matmul = 2 }, "compute"},
			{"compute 1.2x", func(x *simNode) { x.matmul = 1.2 }, "compute"},
			{"compute 1.1x", func(x *simNode) { x.matmul = 1.1 }, ""},
			{"sends 0.5x", func(x *simNode) { x.tx = 0.5 }, "net.tx"},
			{"receives 0.5x", func(x *simNode) { x.rx = 0.5 }, "net.rx"},
			{"both 0.25x", func(x *simNode) { x.tx, x.rx = 0.25, 0.25 }, "net.both"},
			{"sends 0.9x", func(x *simNode) { x.tx = 0.9 }, ""},
		} {
			seeds := uint64(20)
			if testing.Short() {
				seeds = 5
			}
			for seed := range seeds {
				for _, exclude := range []bool{false, true} {
					s := full(seed, n)
					s.check.cfg.Spec.ExcludeStraggler = exclude
					for i, x := range s.nodes {
						x.matmul = 1 + 0.01*float64(i%3)
					}
					slow := s.nodes[int(seed)%n]
					c.slow(slow)
					s.run()
					requireStraggler(t, s, slow, c.kind, exclude, fmt.Sprintf("%d nodes, %s, seed %d", n, c.what, seed))
				}
			}
		}
	}
}

// requireStraggler requires that exactly the slow node is named, with the kind, or nobody for kind "".
func requireStraggler(t *testing.T, s *sim, slow *simNode, kind string, exclude bool, what string) {
	t.Helper()
	for _, x := range s.nodes {
		want := StateOK
		if x == slow && kind != "" {
			want = StateSlow
			if exclude {
				want = StateFaulty
			}
		}
		require.Equal(t, want, x.verdict.State, "%s: node %d: %+v", what, x.i, x.verdict)
		require.Equal(t, want == StateFaulty, x.verdict.Excluded, what)
		if want != StateOK {
			require.Equal(t, kind, x.verdict.Kind, what)
			require.NotEmpty(t, x.verdict.Findings)
		}
	}
}

func TestTwoNodesShowNoStraggler(t *testing.T) {
	s := full(1, 2)
	s.nodes[0].matmul = 3
	s.run()
	s.states(t, nil)
}

func TestAStragglerIsFarByBothMeasures(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   bool
	}{
		{[]float64{1, 1, 1.16}, true},
		{[]float64{1, 1, 1.14}, false},                 // the ratio
		{[]float64{1, 1.2, 0.8, 1.1, 0.9, 1.5}, false}, // the field is wide
		{[]float64{1, 1.02, 0.98, 1.01, 0.99, 1.5}, true},
		{[]float64{1, 1, 0.2}, false}, // faster is none
	} {
		last := c.values[len(c.values)-1]
		med, sigma := spread(append([]float64(nil), c.values...))
		require.Equal(t, c.want, straggles(last, med, sigma), "%v: %v %v", c.values, med, sigma)
	}
}

func TestOneNodeIsComparedWithTheLastCheck(t *testing.T) {
	s := full(1, 4)
	s.run()
	s.states(t, nil)
	for _, x := range s.nodes[1:] {
		x.absent = true
	}
	s.nodes[0].matmul = 1.3
	s.at(0, Expect{IDs: []string{"n0"}})
	s.at(0, Arrive{s.nodes[0].node})
	s.drain()
	require.Equal(t, StateSlow, s.nodes[0].verdict.State)
	require.Equal(t, "compute", s.nodes[0].verdict.Kind)
	require.False(t, s.nodes[0].verdict.Paired)
}
