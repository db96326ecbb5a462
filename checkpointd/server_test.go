package checkpointd

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestALoadIsLoggedOncePerEpoch(t *testing.T) {
	d, log := logged(t)
	r := request{Dir: "/ckpt", Step: 3, Source: "memory"}
	for range 3 {
		d.loaded(r)
	}
	require.Equal(t, []string{"checkpoint loaded"}, log.texts)
	r.Step = 4
	d.loaded(r)
	d.SetWorld(World{Term: 1, Epoch: 1, GroupWorldSize: 1})
	d.loaded(r)
	require.Len(t, log.texts, 3)
	d.loaded(request{Dir: "/other"})
	require.Len(t, log.texts, 3, "nothing was loaded from there")
}
