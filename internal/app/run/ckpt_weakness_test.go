package run

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/ckptd"
)

// smallMemory mounts a file system in memory of that many bytes.
func smallMemory(t *testing.T, bytes int) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "shm") // short: a socket goes there
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.Remove(dir)) })
	if err := syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV,
		"mode=0700,size="+strconv.Itoa(bytes)); err != nil {
		t.Skipf("WHAT HAPPENS WHEN SHARED MEMORY IS FULL IS NOT TESTED: mount a small tmpfs: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	return dir
}

// A container with a small /dev/shm: that is said, with the remedy, checkpoints go to disk all the same, and nobody
// dies of SIGBUS.
func TestTorchCheckpointSmallMemory(t *testing.T) {
	long(t)
	t.Parallel()
	for _, c := range []struct {
		name, want string
		bytes      int
	}{
		{"not even the client", "no room for the checkpoint client", 64 << 10},
		{"no save", "--shm-size", 1 << 20},
		{"a save, but not of each worker", "--shm-size", 3 << 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newTraining(t, 10)
			b.shm = smallMemory(t, c.bytes)
			l := b.run(b.args([]string{"--standalone", "--nproc-per-node=2", "--max-restarts=0"}, 5, "sharded", "large")...)
			require.Equal(t, 0, l.wait(), l.err.String())
			require.Equal(t, 10, b.latest())
			require.Len(t, b.starts(), 2, "nobody was restarted")
			require.Contains(t, l.err.String(), c.want)
			for r := range 2 {
				require.FileExists(t, filepath.Join(b.ckpts, "10", "rank_"+strconv.Itoa(r)+".pt"))
			}
			b.requireMemoryIsGone()
		})
	}
}

// A launcher is killed while its daemon cannot get on with saving, and the next one starts at once: its daemon has to
// wait for that one, but the workers do not, and the end of the job does not wait longer.
func TestTorchCheckpointNextLauncherComesEarly(t *testing.T) {
	long(t)
	t.Parallel()
	b := newTraining(t, 100000)
	opts := b.c10d("1:1")
	l := b.run(b.args(opts, 1000000)...)
	eventually(t, "training", func() bool { return b.trained() >= 10 && len(b.daemons()) == 1 })
	first := b.daemons()[0]
	require.NoError(t, syscall.Kill(first, syscall.SIGSTOP))
	l.signal(syscall.SIGKILL)
	l.wait()
	eventually(t, "the workers' end", func() bool { return len(b.workers()) == 0 })
	trained, before := b.trained(), len(b.starts())
	b.steps = trained + 30
	l = b.run(b.args(opts, 1000000)...)
	eventually(t, "the training goes on", func() bool { return b.trained() == trained+30 })
	require.GreaterOrEqual(t, b.starts()[before], trained-2, "from memory")
	time.Sleep(ckptd.OrderBudget + time.Second) // longer than the launcher waits for an answer otherwise
	require.Contains(t, b.daemons(), first)
	require.NoError(t, syscall.Kill(first, syscall.SIGCONT))
	require.Equal(t, 0, l.wait(), l.err.String())
	b.requireMemoryIsGone()
}

// Who reads the launcher's log dies with the launcher, as at the end of a pipe: the daemon's first word about it must
// not be its last.
func TestTorchCheckpointLogReaderKilled(t *testing.T) {
	t.Parallel()
	b := newTraining(t, 100000)
	in, out, err := os.Pipe()
	require.NoError(t, err)
	cmd := exec.Command(filepath.Join(binDir, "dlrover-run"), b.standalone(1000000)...)
	cmd.Dir, cmd.Env, cmd.Stderr, cmd.Stdout = b.dir, b.env, out, out
	require.NoError(t, cmd.Start())
	require.NoError(t, out.Close())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	eventually(t, "training", func() bool { return b.trained() >= 10 && len(b.daemons()) == 1 })
	require.NoError(t, in.Close())
	require.NoError(t, cmd.Process.Kill())
	eventually(t, "the daemon's end", func() bool { return len(b.daemons()) == 0 })
	require.GreaterOrEqual(t, b.latest(), b.trained()-2)
	b.requireMemoryIsGone()
}
