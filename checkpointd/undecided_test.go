package checkpointd_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/coordinator"
)

// away is a coordinator that cannot be reached for an agreement.
type away struct{ coordinator.Coordinator }

func (away) Agree(context.Context, string, int, int, []coordinator.Holding, time.Duration) (coordinator.Plan, bool,
	error) {
	return coordinator.Plan{}, false, errors.New("the checkpoint coordinator is away")
}

// A save that the nodes could not agree on at the end counts as not saved, and stays in memory, until a later save is
// on disk.
func TestNoAgreementAtTheEnd(t *testing.T) {
	n, dir := newNode(t, func(c *checkpointd.Config) { c.Remote = away{coordinator.Local(0)} }), t.TempDir()
	n.join(1, 0, 2)
	s := shard(dir, 10, 0, 1, 1)
	s.Disk = false
	n.put(s, "seg/l0-0.seg")
	require.NoError(t, n.control().Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.AtOnce))
	left, err := n.control().End(t.Context(), 5*time.Second)
	require.NoError(t, err)
	require.Equal(t, 1, left)
	names, err := n.dir.Names()
	require.NoError(t, err)
	require.Len(t, names, 1, "for the next launcher")
	s = shard(dir, 20, 0, 1, 1)
	n.put(s, "seg/l0-1.seg")
	require.Equal(t, true, n.wait(dir, 20)["ok"])
	left, err = n.control().End(t.Context(), 5*time.Second)
	require.NoError(t, err)
	require.Zero(t, left)
	names, err = n.dir.Names()
	require.NoError(t, err)
	require.Empty(t, names)
}

// A save on disk is not lost because the nodes could not agree on it, and an older save does not replace it.
func TestNoAgreementOnASaveOnDisk(t *testing.T) {
	n, dir := newNode(t, func(c *checkpointd.Config) { c.Remote = away{coordinator.Local(0)} }), t.TempDir()
	n.join(1, 0, 2)
	n.put(single(dir, 10), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	end := func() int {
		require.NoError(t, n.control().Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.AtOnce))
		left, err := n.control().End(t.Context(), 5*time.Second)
		require.NoError(t, err)
		return left
	}
	require.Zero(t, end())

	newer := single(dir, 30)
	newer.Disk, newer.Saved = false, time.Now().Add(time.Minute)
	n.put(newer, "seg/l0-1.seg")
	require.Equal(t, 1, end())
	n.put(single(dir, 20), "seg/l0-2.seg")
	require.Equal(t, true, n.wait(dir, 20)["ok"])
	left, err := n.control().End(t.Context(), 5*time.Second)
	require.NoError(t, err)
	require.Equal(t, 1, left)
}
