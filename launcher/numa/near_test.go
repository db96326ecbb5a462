package numa

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNear(t *testing.T) {
	m := machine{sockets: 2, nodes: 2, cores: 8, threads: 1, gpus: []int{1, -1, 0, 1}}
	places, err := Near(m.tree(), m.devices(), 5, []int{0, 1, 4, 5, 6, 7})
	require.NoError(t, err)
	require.Len(t, places, 5)
	for i, want := range map[int][]int{0: {4, 5, 6, 7}, 2: {0, 1}, 3: {4, 5, 6, 7}} {
		require.Equal(t, want, places[i].CPUs)
		require.Equal(t, m.gpus[i], places[i].Node)
		require.NoError(t, places[i].Err)
	}
	for i, why := range map[int]string{1: "0000:11:00.0: its numa_node is -1 (unknown)", 4: "4 are visible"} {
		require.Equal(t, -1, places[i].Node)
		require.Nil(t, places[i].CPUs)
		require.ErrorContains(t, places[i].Err, why)
	}
	places, err = Near(m.tree(), m.devices(), 1, []int{0})
	require.NoError(t, err)
	require.ErrorContains(t, places[0].Err, "this process may use only [0]")
	_, err = Near(tree(nil), m.devices(), 1, []int{0})
	require.ErrorContains(t, err, "there is no NUMA node")
}
