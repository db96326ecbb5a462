package netcheck

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// One node reports what it cannot have measured, much too much or much too little. Nobody else is left out for it.
func TestALiarHarmsNobodyElse(t *testing.T) {
	for _, n := range []int{3, 4, 5, 6, 8, 16, 64} {
		for _, factor := range []float64{1e-3, 0.3, 0.5, 2, 10, 1e5} {
			for seed := range uint64(20) {
				s := newSim(seed, n)
				s.check.cfg.Spec.ExcludeStraggler = true
				s.nodes[1].got = func(r *Result, _ *simNode) {
					for i := range r.Flows {
						r.Flows[i].Mbps *= factor
					}
				}
				s.run()
				for i, x := range s.nodes {
					if i != 1 {
						require.False(t, x.verdict.Excluded, "%d nodes, times %g, seed %d: node %d: %+v", n, factor, seed, i, x.verdict)
					}
				}
			}
		}
	}
}
