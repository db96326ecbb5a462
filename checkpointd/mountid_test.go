package checkpointd_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/shm/shmtest"
)

// short is a save with a short timeout.
func short(dir string, step int64) shmtest.Save {
	s := single(dir, step)
	s.Meta.TimeoutS = 2
	return s
}

func requireEmpty(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

// A job does not write to the mount point of storage that is no longer mounted, even after reconnects and with a new
// daemon. The job of another launcher may begin there.
func TestVanishedStorageIsRemembered(t *testing.T) {
	t.Parallel()
	n, dir := newNode(t), filepath.Join(t.TempDir(), "ckpts")
	first := n.control()
	require.NoError(t, first.Lead(t.Context(), "a"))
	n.put(single(dir, 10), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	require.NoError(t, os.Rename(dir, dir+".away"))
	require.NoError(t, os.Mkdir(dir, 0o755))
	require.NoError(t, first.Close())
	require.NoError(t, n.control().Lead(t.Context(), "a"))
	n.put(short(dir, 20), "seg/l0-1.seg")
	require.Contains(t, n.wait(dir, 20)["error"], "mount it, or make")
	n.stop()
	n.start()
	require.NoError(t, n.control().Lead(t.Context(), "a"))
	n.put(short(dir, 30), "seg/l0-2.seg")
	require.Contains(t, n.wait(dir, 30)["error"], "mount it, or make")
	requireEmpty(t, dir)

	require.NoError(t, n.control().Lead(t.Context(), "b"))
	n.put(single(dir, 40), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 40)["ok"])
	requireStep(t, dir, 40, 1)
}

// The same with a file system that is really unmounted, the directory being the mount point or below it.
func TestUnmountedStorage(t *testing.T) {
	t.Parallel()
	for name, below := range map[string]string{"the mount point": "", "below it": "run/ckpts"} {
		t.Run(name, func(t *testing.T) {
			mount := smallDisk(t, 8*stepBytes)
			n, dir := newNode(t), filepath.Join(mount, below)
			n.put(single(dir, 10), "seg/l0-0.seg")
			require.Equal(t, true, n.wait(dir, 10)["ok"])
			open, err := os.Open(filepath.Join(dir, "10/rank_0.pt")) // so that it is busy
			require.NoError(t, err)
			defer open.Close()
			require.NoError(t, syscall.Unmount(mount, syscall.MNT_DETACH))
			defer func() {
				require.NoError(t, syscall.Mount("tmpfs", mount, "tmpfs", 0, ""))
			}() // for the end of the test
			n.put(short(dir, 20), "seg/l0-1.seg")
			require.Contains(t, n.wait(dir, 20)["error"], "mount it, or make")
			requireEmpty(t, mount)
		})
	}
}

// A directory that is deleted while the job runs is created again, with its parents.
func TestDeletedDirectory(t *testing.T) {
	n, top := newNode(t), t.TempDir()
	dir := filepath.Join(top, "run", "ckpts")
	for i, gone := range []string{dir, filepath.Dir(dir), dir} {
		step := int64(10 * (i + 1))
		n.put(single(dir, step), "seg/l0-0.seg")
		require.Equal(t, true, n.wait(dir, step)["ok"])
		requireStep(t, dir, step, 1)
		require.NoError(t, os.RemoveAll(gone))
	}
}
