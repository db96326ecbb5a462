package launcher

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
)

// done tells that the job has succeeded while workers of this node run, which may go on.
func (s *fakeRdzv) done() {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.d
	d.Kind, d.Rules.LetRun = job.Done, true
	s.dirs <- d
}

// What is left of a job that has succeeded runs to its end, whatever that is, with or without the daemon.
func TestWorkersRunToTheirEndAfterTheJob(t *testing.T) {
	for name, gone := range map[string]bool{"the daemon stays": false, "the daemon goes": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, `: > $DIR/up.$RANK; while [ ! -e $DIR/go ]; do sleep 0.01; done; : > $DIR/end.$RANK; exit 3`, 3)
			r.fakeRdzv.err = &ReasonError{Reason: policy.MasterUnreachable, Err: os.ErrClosed}
			r.whenUp(t, func() {
				r.fakeRdzv.done()
				if gone {
					r.fakeRdzv.expel()
				}
				require.Eventually(t, func() bool { return len(r.fakeRdzv.dirs) == 0 }, 10*time.Second, time.Millisecond)
				require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go"), nil, 0o600))
			})
			res := r.run(t)
			require.Equal(t, policy.Success, res.Reason)
			require.NoError(t, res.Err)
			require.FileExists(t, filepath.Join(r.dir, "end.0"))
			require.FileExists(t, filepath.Join(r.dir, "end.1"))
			require.Empty(t, r.fakeRdzv.failures, "how they end does not count")
		})
	}
}

func TestWhatIsLeftOfAJobIsStoppedWhenItHangs(t *testing.T) {
	r := newRig(t, `: > $DIR/up.$RANK; exec sleep 60`, 3)
	r.cfg.Parts = []Part{watcher(func(ctx context.Context, run RunRequest) {
		for ctx.Err() == nil {
			if _, err := os.Stat(filepath.Join(r.dir, "hangs")); err == nil {
				run.Fail(verdict.Failure{Message: "no step"}, policy.RestartCharged)
				break
			}
			time.Sleep(time.Millisecond)
		}
		<-ctx.Done()
	})}
	r.whenUp(t, func() {
		r.fakeRdzv.done()
		require.Eventually(t, func() bool { return len(r.fakeRdzv.dirs) == 0 }, 10*time.Second, time.Millisecond)
		require.NoError(t, os.WriteFile(filepath.Join(r.dir, "hangs"), nil, 0o600))
	})
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.Empty(t, r.fakeRdzv.failures)
}

func TestASignalEndsWhatIsLeftOfAJob(t *testing.T) {
	r := newRig(t, `trap ': > $DIR/told.$RANK; exit 0' TERM; : > $DIR/up.$RANK; while :; do sleep 0.01; done`, 0)
	r.whenUp(t, func() {
		r.fakeRdzv.done()
		r.fakeRdzv.expel()
		require.Eventually(t, func() bool { return len(r.fakeRdzv.dirs) == 0 }, 10*time.Second, time.Millisecond)
		r.signals <- syscall.SIGTERM
	})
	res := r.run(t)
	require.Equal(t, policy.Success, res.Reason)
	require.Equal(t, syscall.SIGTERM, res.Signal)
	require.FileExists(t, filepath.Join(r.dir, "told.0"))
}

// A node that is stopping its workers, with all the time in the world, has less when it has to leave.
func TestALeaveShortensTheGraceOfAStop(t *testing.T) {
	r := newRig(t, `trap ': > $DIR/told.$RANK' TERM; : > $DIR/up.$RANK; while :; do sleep 0.01; done`, 0)
	r.cfg.ShutdownTimeout, r.cfg.LeaveGrace = time.Hour, 200*time.Millisecond
	r.cfg.Restart.Grace = time.Hour
	r.whenUp(t, func() { r.fakeRdzv.order(job.Stop, "the world grows") })
	r.when(t, "told.0", func() { r.signals <- syscall.SIGTERM })
	res := r.run(t)
	require.Equal(t, policy.Signaled(15), res.Reason)
	require.Equal(t, syscall.SIGTERM, res.Signal)
}
