package checkpointd_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd"
)

// locked reports whether a worker could not have a segment for its next save.
func (n *node) locked(name string) bool {
	n.t.Helper()
	f, err := os.OpenFile(filepath.Join(n.dir.Path(), name), os.O_RDWR, 0)
	require.NoError(n.t, err)
	defer f.Close()
	return unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}) != nil
}

// While workers start again, what was in memory is kept from their saves, and written when somebody asks for it, or a
// while later.
func TestBreakpointOfARestart(t *testing.T) {
	for _, asked := range []bool{true, false} {
		n, dir := newNode(t), t.TempDir()
		s := single(dir, 10)
		s.Disk = false
		n.put(s, "seg/l0-0.seg")
		begin := time.Now()
		require.NoError(t, n.control().Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.AfterRestart))
		require.Eventually(t, func() bool { return n.locked("seg/l0-0.seg") }, patience, time.Millisecond)
		res := n.ask(map[string]any{"op": "offers", "rank": 0, "dir": dir})
		require.Len(t, res["offers"], 1)
		require.Equal(t, true, res["more"])
		_, err := os.Stat(filepath.Join(dir, "dlrover_latest.txt"))
		if time.Since(begin) < time.Second {
			require.ErrorIs(t, err, os.ErrNotExist)
		}
		if asked {
			n.ask(map[string]any{"op": "offers", "rank": 0, "dir": dir, "timeout_ms": patience.Milliseconds()})
			requireStep(t, dir, 10, 1)
			continue
		}
		require.Eventually(t, func() bool { _, err := os.Stat(filepath.Join(dir, "dlrover_latest.txt")); return err == nil },
			patience, time.Millisecond)
		require.GreaterOrEqual(t, time.Since(begin), time.Second)
		requireStep(t, dir, 10, 1)
	}
}
