package run

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/policy"
)

// saves runs testdata/saves.py.
func (b *training) saves(opts []string, mode string, args ...string) *launched {
	script, err := filepath.Abs("testdata/saves.py")
	require.NoError(b.t, err)
	opts = append([]string{"--standalone", "--ckpt-shm-dir=" + b.shm}, opts...)
	return b.run(append(append(opts, script, mode, b.dir, b.ckpts), args...)...)
}

// A DISK save that was asked for gets to disk, however fast they come and however little memory there is.
func TestTorchCheckpointEverySaveGetsToDisk(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		ranks, bytes, n, memory int
	}{{1, 4 << 10, 20, 0}, {2, 4 << 20, 12, 64 << 20}} {
		t.Run(fmt.Sprintf("%d ranks", c.ranks), func(t *testing.T) {
			b := newTraining(t, 0)
			if c.memory > 0 {
				b.shm = smallMemory(t, c.memory)
			}
			l := b.saves([]string{fmt.Sprint("--nproc-per-node=", c.ranks)}, "burst", fmt.Sprint(c.bytes), fmt.Sprint(c.n))
			require.Equal(t, 0, l.wait(), l.err.String())
			for step := 1; step <= c.n; step++ {
				require.FileExists(t, filepath.Join(b.ckpts, ".dlrover", fmt.Sprintf("%d.json", step)), l.err.String())
			}
			require.Equal(t, c.n, b.latest())
			require.NotContains(t, l.err.String(), "while training waits", "the daemon writes them all")
			b.requireMemoryIsGone()
		})
	}
}

// Each rank has its save complete before it lets go of the segment: the words of the others make the daemon look then.
func TestTorchCheckpointSlowUnlock(t *testing.T) {
	t.Parallel()
	b := newTraining(t, 0)
	l := b.saves([]string{"--nproc-per-node=4"}, "unlock")
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Equal(t, 1, b.latest())
	require.NotContains(t, l.err.String(), "a newer one came first")
}

// A save that was given up does not hold the end of the job, and there is one line about it. Its workers have
// succeeded, and the job has not.
func TestTorchCheckpointGivenUp(t *testing.T) {
	t.Parallel()
	b := newTraining(t, 0)
	l := b.saves([]string{"--nproc-per-node=2", "--exit-code-policy=reason"}, "refused")
	require.Equal(t, int(policy.SaveLost), l.wait(), l.err.String())
	require.Regexp(t, `dlrover-run: .*the workers succeeded, but not all of their checkpoints are on disk: \d+ saves are`,
		l.err.String())
	require.Equal(t, 1, strings.Count(l.err.String(), "a checkpoint was not committed"), l.err.String())
	require.LessOrEqual(t, strings.Count(l.err.String(), "saving what is in memory"), 1)
	require.Equal(t, 1, strings.Count(l.err.String(), "not all checkpoints are on disk"))
	require.Len(t, b.rows("found"), 2)
}

// A sidecar ends as it has to say, too.
func TestTorchCheckpointGivenUpBySidecar(t *testing.T) {
	long(t)
	t.Parallel()
	b := newTraining(t, 0)
	side := b.start("checkpointd", nil, "--job=side", "--shm-dir="+b.shm)
	socket := filepath.Join(b.shm, fmt.Sprintf("dlrover-%d", os.Getuid()), "side", "sock")
	eventually(t, "the sidecar's socket", func() bool { _, err := os.Stat(socket); return err == nil })
	l := b.saves([]string{"--nproc-per-node=2", "--ckpt-sidecar=side"}, "refused")
	require.Equal(t, 1, l.wait(), l.err.String())
	side.signal(syscall.SIGTERM)
	require.Equal(t, 1, side.wait(), side.err.String())
	require.Regexp(t, `checkpointd: error: \d+ saves are not on disk; they stay in memory, in `, side.err.String())
}

// The newest save of a directory is there at once and for the next process, whatever was saved to others since.
func TestTorchCheckpointSeveralDirectories(t *testing.T) {
	t.Parallel()
	b := newTraining(t, 0)
	l := b.saves([]string{"--nproc-per-node=1", "--max-restarts=1", "--no-save-at-breakpoint"}, "several")
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Equal(t, []string{"20 21 22 23", "20 21 22 23"}, b.rows("found"))
}

// After going back the latest save counts, not the one with the highest step.
func TestTorchCheckpointGoesBack(t *testing.T) {
	long(t)
	t.Parallel()
	for _, c := range []struct{ option, next string }{{"--save-at-breakpoint", "3"}, {"--no-save-at-breakpoint", "5"}} {
		t.Run(c.option, func(t *testing.T) {
			b := newTraining(t, 0)
			l := b.saves([]string{"--nproc-per-node=1", "--max-restarts=1", c.option}, "back")
			require.Equal(t, 0, l.wait(), l.err.String())
			require.Equal(t, []string{"3", "3"}, b.rows("found"))
			latest, err := os.ReadFile(filepath.Join(b.ckpts, "dlrover_latest.txt"))
			require.NoError(t, err)
			require.Equal(t, c.next, strings.TrimSpace(string(latest)))
		})
	}
}
