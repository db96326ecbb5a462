package slow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/job"
)

// ofNodes is a judge of a world of some nodes that has found ranks to be slow since noon.
func ofNodes(nodes int, found ...hang.Slowed) *Judge {
	j := &Judge{world: hang.World{Epoch: job.EpochID{Round: 1}, Nodes: make([]hang.WorldNode, nodes)}}
	for _, s := range found {
		s.Since = noon
		j.found = append(j.found, finding{Slowed: s})
	}
	return j
}

var noon = time.Unix(0, 0)

func TestWhichNodeLeaves(t *testing.T) {
	slowed := func(node string, share float64, doing string, all bool) hang.Slowed {
		return hang.Slowed{Node: node, Ranks: "5", Share: share, Doing: doing, All: all}
	}
	for name, c := range map[string]struct {
		judge *Judge
		want  map[string]int // by node, how many are needed then
	}{
		"nobody is slow":          {ofNodes(4), nil},
		"a spare is needed":       {ofNodes(4, slowed("n2", 0.23, "computing", false)), map[string]int{"n2": 4}},
		"fewer do more":           {ofNodes(16, slowed("n2", 0.23, "computing", false)), map[string]int{"n2": 15}},
		"a rank loads data":       {ofNodes(4, slowed("n2", 0.5, "loading data", false)), nil},
		"all of a node load data": {ofNodes(4, slowed("n2", 0.5, "loading data", true)), map[string]int{"n2": 3}},
		"a rank sleeps":           {ofNodes(4, slowed("n2", 0.5, "asleep", false)), nil},
		"two nodes, for either one": {ofNodes(4, slowed("n2", 0.2, "computing", false),
			slowed("n1", 0.3, "computing", false)), map[string]int{"n1": 3, "n2": 4}},
	} {
		t.Run(name, func(t *testing.T) {
			var d Drains
			require.Empty(t, d.Next(noon.Add(lasting-1), c.judge), "it may pass")
			list := d.Next(noon.Add(lasting), c.judge)
			require.Len(t, list, len(c.want))
			for i, o := range list {
				require.Equal(t, c.want[o.Node], o.Least, o.Node)
				require.Equal(t, job.EpochID{Round: 1}, o.Epoch)
				require.True(t, i == 0 || o.Share <= list[i-1].Share, "the slowest first")
			}
		})
	}
}

func TestOneNodeLeavesAtATime(t *testing.T) {
	var d Drains
	j, at := ofNodes(4, hang.Slowed{Node: "n2", Share: 0.5, Doing: computing}), noon.Add(lasting)
	require.Len(t, d.Next(at, j), 1)
	require.Empty(t, d.Next(at.Add(nextTry-1), j))
	require.Len(t, d.Next(at.Add(nextTry), j), 1, "it could not leave, and may now")
	j.found[0].missed = 1
	require.Empty(t, d.Next(at.Add(2*nextTry), j), "it is slow no more, perhaps")
	j.found[0].missed = 0
	require.Len(t, d.Next(at.Add(2*nextTry), j), 1)
	d.Left(at.Add(2 * nextTry))
	require.Empty(t, d.Next(at.Add(2*nextTry+nextDrain-1), j))
	require.Len(t, d.Next(at.Add(2*nextTry+nextDrain), j), 1)
}
