package checkpointd

import (
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/shm"
)

func TestWhereTheWritersOfASaveMeet(t *testing.T) {
	local, master := coordinator.Local(0), coordinator.Local(3)
	c := coordinators{local, master}
	here := shm.Meta{Shards: 2, WorldSize: 2, LocalWorldSize: 2}
	wide := shm.Meta{Shards: 2, WorldSize: 2, LocalWorldSize: 1}
	require.Same(t, local, c.forSave(here))
	require.Same(t, local, c.forSave(shm.Meta{Shards: 1, WorldSize: 2, LocalWorldSize: 1}))
	require.Same(t, master, c.forSave(wide))
	d, _ := logged(t)
	require.Equal(t, coordinator.Files(d.cfg.FS), d.coords.forSave(wide), "without a master")
}
