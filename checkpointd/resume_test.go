package checkpointd_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func (n *node) notes() (names []string) {
	entries, err := os.ReadDir(filepath.Join(n.dir.Path(), "prepared"))
	if err != nil {
		require.ErrorIs(n.t, err, fs.ErrNotExist)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// prepared puts shard 0 of 2 of step 1, and ends the daemon when that shard is durable.
func prepared(t *testing.T) (n *node, dir string) {
	t.Helper()
	n, dir = newNode(t), t.TempDir()
	n.put(shard(dir, 1, 0, 2, 2), "seg/l0-0.seg")
	require.Eventually(t, func() bool { return len(n.notes()) == 1 }, patience, 5*time.Millisecond)
	n.stop()
	require.Len(t, n.notes(), 1)
	return n, dir
}

func (n *node) requireCommitted(dir string) {
	n.t.Helper()
	require.Equal(n.t, true, n.wait(dir, 1)["ok"])
	requireStep(n.t, dir, 1, 2)
	requireNoLeftovers(n.t, dir)
	require.Eventually(n.t, func() bool { return len(n.notes()) == 0 }, patience, 5*time.Millisecond)
}

func TestPreparedShardOutlivesDaemonAndSegment(t *testing.T) {
	n, dir := prepared(t)
	inMemory(shard(dir, 2, 0, 2, 2)).Write(t, n.dir, "seg/l0-0.seg") // the worker saves over it
	n.start()
	n.put(shard(dir, 1, 1, 2, 2), "seg/l1-0.seg")
	n.requireCommitted(dir)
}

func TestPreparedShardIsWrittenOnce(t *testing.T) {
	n, dir := prepared(t)
	n.start()
	n.put(shard(dir, 1, 1, 2, 2), "seg/l1-0.seg")
	n.requireCommitted(dir)
	st, err := n.control().Status(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, st.Counters.Flushes, "shard 0 was durable")
}

// clean removes the temporary files.
func clean(t *testing.T, dir string) {
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() && strings.Contains(path, ".tmp") {
			err = os.Remove(path)
		}
		return err
	}))
}

func TestPreparedFilesThatAreGoneAreWrittenAgain(t *testing.T) {
	n, dir := prepared(t)
	clean(t, dir)
	n.start()
	n.put(shard(dir, 1, 1, 2, 2), "seg/l1-0.seg")
	n.requireCommitted(dir)
}

func TestPreparedFilesThatAreGoneForGood(t *testing.T) {
	n, dir := prepared(t)
	clean(t, dir)
	inMemory(shard(dir, 2, 0, 2, 2)).Write(t, n.dir, "seg/l0-0.seg")
	n.start()
	n.put(shard(dir, 1, 1, 2, 2), "seg/l1-0.seg")
	res := n.wait(dir, 1)
	require.Contains(t, res["error"], "no such file", res)
	require.Eventually(t, func() bool { return len(n.notes()) == 0 }, patience, 5*time.Millisecond)
	requireNoLeftovers(t, dir)
}

func TestDamagedNoteIsDropped(t *testing.T) {
	n, dir := prepared(t)
	require.NoError(t, os.WriteFile(filepath.Join(n.dir.Path(), "prepared", n.notes()[0]), []byte("{"), 0o600))
	n.start()
	n.put(shard(dir, 1, 1, 2, 2), "seg/l1-0.seg")
	n.requireCommitted(dir)
}
