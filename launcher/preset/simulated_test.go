package preset

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A worker that simulates a rank of a larger MindSpore job has no scheduler and no role.
func TestSimulatedMindSpore(t *testing.T) {
	p, err := Lookup("mindspore")
	require.NoError(t, err)
	v := Vars{Rank: 1, LocalRank: 1, LocalWorldSize: 2, WorldSize: 2, Parent: lookupIn(map[string]string{
		"MS_SIMULATION_LEVEL": "1", "RANK_SIZE": "1024",
	})}
	env, err := p.Environ(v)
	require.NoError(t, err)
	require.Subset(t, env, []string{"RANK_ID=1", "DEVICE_ID=1"})
	for _, kv := range env {
		require.NotRegexp(t, "^(MS_ROLE|MS_SCHED_|MS_NODE_ID|RANK_SIZE)", kv)
	}
	sides, err := p.Sides(v)
	require.NoError(t, err)
	require.Empty(t, sides)
}
