package run

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/launcher/torchpython"
)

const timed = `
import os, sys, time
import torch.distributed.elastic.timer as timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
for i in range(100):
    with timer.expires(after=30, scope="quick"):
        pass
with timer.expires(after=float("inf"), scope="never"):
    pass
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with timer.expires(after=0.5, scope="all_reduce"):
        time.sleep(60)
`

// TestTorchFileTimer has the real client's timer expire: its worker is killed and the job restarts.
func TestTorchFileTimer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "timed.py"), []byte(timed), 0o600))
	l := b.start("dlrover-run",
		[]string{"PYTHON_EXEC=" + torchpython.Require(t, "THE FILE TIMER OF PYTORCH IS"), "TORCHELASTIC_ENABLE_FILE_TIMER=1"},
		"--nproc-per-node=2", "--max-restarts=1", "--event-log="+filepath.Join(b.dir, "events"), "timed.py")
	require.Zero(t, l.wait())
	require.Regexp(t, `"msg":"timer \\"all_reduce\\" of [0-9]+ms expired, sent SIGKILL".*"rank":1`, l.err.String())
	require.Contains(t, l.err.String(), `"cause":"rank 1 (node 0`)
	require.NotContains(t, l.err.String(), "quick")
	events, err := os.ReadFile(filepath.Join(b.dir, "events"))
	require.NoError(t, err)
	require.Equal(t, 1, strings.Count(string(events), `"timer-expired"`), string(events))
	left, err := filepath.Glob(filepath.Join(b.dir, "watchdog_timer_*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestFileTimerOnlyWhenAsked(t *testing.T) {
	b := newBench(t)
	for value, want := range map[string]string{"": "", "0": "", "true": "starts no file timer"} {
		l := b.start("dlrover-run", []string{"TORCHELASTIC_ENABLE_FILE_TIMER=" + value},
			b.sh(`[ -z "$TORCHELASTIC_TIMER_FILE" ] && ls $DIR`)...)
		require.Zero(t, l.wait(), value)
		require.NotContains(t, l.out.String(), "watchdog_timer_")
		require.Contains(t, l.err.String(), want)
	}
}

func TestFileTimerAtAPathOfTheUser(t *testing.T) {
	b := newBench(t)
	path := filepath.Join(b.dir, "timer")
	env := []string{"TORCHELASTIC_ENABLE_FILE_TIMER=1", "TORCHELASTIC_TIMER_FILE=" + path}
	show := b.sh(`[ -p "$TORCHELASTIC_TIMER_FILE" ] && echo $TORCHELASTIC_TIMER_FILE`)
	l := b.start("dlrover-run", env, show...)
	require.Zero(t, l.wait())
	require.Equal(t, path+"\n", l.out.String())
	_, err := os.Lstat(path)
	require.ErrorIs(t, err, fs.ErrNotExist)

	require.NoError(t, unix.Mkfifo(path, 0o600))
	other, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // somebody serves it
	require.NoError(t, err)
	l = b.start("dlrover-run", env, show...)
	require.Zero(t, l.wait())
	require.Regexp(t, "^"+b.dir+"/watchdog_timer_[0-9]+/fifo\n$", l.out.String())
	require.Contains(t, l.err.String(), "another process serves $TORCHELASTIC_TIMER_FILE")
	require.NoError(t, other.Close())
	require.NoError(t, os.Remove(path))

	require.NoError(t, os.WriteFile(path, nil, 0o600))
	l = b.start("dlrover-run", append(env, "PET_EXIT_CODE_POLICY=reason"), show...)
	require.Equal(t, 2, l.wait())
	require.Contains(t, l.err.String(), "something else than a named pipe")
}
