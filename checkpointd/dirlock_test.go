package checkpointd_test

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/fsx"
)

// watched calls a function before it writes a file whose name has that suffix.
type watched struct {
	fsx.FS
	suffix string
	before func()
}

func (w watched) WriteFile(path string, b []byte) error {
	if strings.HasSuffix(path, w.suffix) {
		w.before()
	}
	return w.FS.WriteFile(path, b)
}

// Workers complete saves by themselves at times. The tracker does not go back if they and the daemon do so one at a
// time.
func TestWorkersWaitWhileASaveIsPublished(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	sum := sha256.Sum256([]byte(dir))
	var path string
	var kept atomic.Bool
	disk := watched{FS: fsx.OS{}, suffix: "dlrover_latest.txt", before: func() {
		f, err := os.Open(path)
		if err != nil {
			return
		}
		defer f.Close()
		kept.Store(unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == unix.EWOULDBLOCK)
	}}
	n := newNode(t, func(c *checkpointd.Config) {
		c.FS, path = disk, filepath.Join(c.Dir.Path(), "turn-"+hex.EncodeToString(sum[:8]))
	})
	n.put(single(dir, 10), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	require.True(t, kept.Load(), "a worker that locks the file of the directory has to wait")

	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, unix.Flock(int(f.Fd()), unix.LOCK_EX), "and then it has its turn")
	n.put(single(dir, 20), "seg/l0-1.seg")
	require.Equal(t, false, n.ask(map[string]any{"op": "wait", "dir": dir, "step": 20, "timeout_ms": 300})["ok"])
	require.NoError(t, f.Close())
	require.Equal(t, true, n.wait(dir, 20)["ok"])
}

// A worker that writes a save by itself may outlive the daemon: the next daemon does not take its files for leftovers.
func TestWorkersOwnSaveIsLeftToIt(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	n.put(single(dir, 10), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	n.stop()
	stage := func(save string) string { return filepath.Join(dir, ".dlrover/stage", save) }
	for _, save := range []string{"a-worker", "b-worker", "c-dead"} { // in the order of recovery
		require.NoError(t, os.MkdirAll(stage(save), 0o700))
		plan := filepath.Join(stage(save), "shard-0.plan")
		require.NoError(t, os.WriteFile(plan, []byte("[]"), 0o600))
		require.NoError(t, os.Chtimes(plan, time.Time{}, time.Now().Add(-2*time.Hour)))
	}
	alive, err := os.Create(filepath.Join(n.dir.Path(), "writing-a-worker.0"))
	require.NoError(t, err)
	defer alive.Close()
	require.NoError(t, unix.Flock(int(alive.Fd()), unix.LOCK_EX))
	require.NoError(t, os.WriteFile(filepath.Join(n.dir.Path(), "writing-b-worker.0"), nil, 0o600)) // it was killed
	n.start()
	require.Eventually(t, func() bool {
		_, err := os.Stat(stage("c-dead"))
		return os.IsNotExist(err)
	}, patience, time.Millisecond)
	require.NoDirExists(t, stage("b-worker"))
	require.FileExists(t, filepath.Join(stage("a-worker"), "shard-0.plan"))
}
