package run

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// unmount swaps the checkpoint directory for an empty one, as when its storage is no longer mounted; mount swaps it
// back.
func (b *training) unmount() (mount func()) {
	b.t.Helper()
	away := b.ckpts + ".away"
	require.NoError(b.t, os.Mkdir(away, 0o755))
	swap := func() {
		require.NoError(b.t, unix.Renameat2(unix.AT_FDCWD, b.ckpts, unix.AT_FDCWD, away, unix.RENAME_EXCHANGE))
	}
	swap()
	return swap
}

// The storage vanishes while the job saves, then the job is told to end: nothing is written to the mount point.
func TestTorchCheckpointVanishedStorageSIGTERM(t *testing.T) {
	long(t)
	t.Parallel()
	b := newTraining(t, 100000)
	l := b.run(b.args([]string{"--standalone", "--nproc-per-node=2", "--shutdown-timeout=3"}, 5)...)
	eventually(t, "a committed step", func() bool { return b.latest() >= 10 })
	b.unmount()
	at := b.trained()
	eventually(t, "saves that cannot be written", func() bool { return b.trained() >= at+10 })
	l.signal(syscall.SIGTERM)
	require.Equal(t, 1, l.wait(), l.err.String())
	left, err := os.ReadDir(b.ckpts)
	require.NoError(t, err)
	require.Empty(t, left, l.err.String())
}

// A launcher is killed while it waits for checkpoints that cannot be written: its daemon ends, with its directory or
// with what it waits for.
func TestTorchCheckpointLauncherKilledAtItsEnd(t *testing.T) {
	long(t)
	t.Parallel()
	for name, release := range map[string]func(b *training, mount func()){
		"the storage is back":              func(_ *training, mount func()) { mount() },
		"the runtime directory is removed": func(b *training, _ func()) { require.NoError(b.t, removeBelow(b.shm)) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newTraining(t, 30)
			l := b.run(b.standalone(7)...)
			eventually(t, "two commits, so that the daemon knows of one", func() bool { return b.latest() >= 14 })
			mount := b.unmount()
			eventually(t, "the end of the workers", func() bool {
				return b.trained() == 30 && strings.Contains(l.err.String(), "saving what is in memory")
			})
			daemon := b.daemons()
			require.Len(t, daemon, 1)
			l.signal(syscall.SIGKILL)
			l.wait()
			require.Equal(t, daemon, b.daemons())
			release(b, mount)
			eventually(t, "the daemon's end", func() bool { return len(b.daemons()) == 0 })
		})
	}
}

// removeBelow removes what is in a directory, as somebody does who wants the memory back.
func removeBelow(dir string) (err error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*"))
	for _, path := range paths {
		err = errors.Join(err, os.RemoveAll(path))
	}
	return err
}
