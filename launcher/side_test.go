package launcher

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/verdict"
)

// sidesRig has a scheduler beside its workers: the script runs as both.
func sidesRig(t *testing.T, scheduler, worker string, maxRestarts int) *rig {
	t.Helper()
	r := newRig(t, `if [ "$ROLE" = scheduler ]; then : ; `+scheduler+`
else : ; `+worker+`
fi`, maxRestarts)
	r.cfg.Sides = func(Epoch) ([]Side, error) {
		return []Side{{Name: "scheduler", Env: []string{"ROLE=scheduler"}}}, nil
	}
	return r
}

// log is what the scheduler of an attempt has printed.
func (r *rig) log(t *testing.T, attempt string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(r.dir, "logs", "*", attempt, "scheduler.log"))
	require.NoError(t, err)
	require.Len(t, found, 1)
	data, err := os.ReadFile(found[0])
	require.NoError(t, err)
	return string(data)
}

const untilGone = `while [ ! -e $DIR/%s ]; do sleep 0.01; done`

func until(file string) string { return strings.Replace(untilGone, "%s", file, 1) }

// A scheduler is not a rank, outlives the workers, and may take its time after the job's success.
func TestSideEndsByItself(t *testing.T) {
	r := sidesRig(t, `echo "sched $RANK$LOCAL_RANK"; echo more >&2; : > $DIR/up; `+until("late")+`; : > $DIR/down`,
		until("up")+`; : > $DIR/worker.$RANK`, 0)
	r.when(t, "worker.0", func() {
		require.Eventually(t, func() bool { return len(r.fakeRdzv.said()) == 3 }, 10*time.Second, 5*time.Millisecond)
		require.NoError(t, os.WriteFile(filepath.Join(r.dir, "late"), nil, 0o600))
	})
	require.Equal(t, Result{Reason: policy.Success}, r.run(t))
	require.FileExists(t, filepath.Join(r.dir, "down"))
	require.Equal(t, "sched \nmore\n", r.log(t, "attempt_0"))
	require.Equal(t, []string{"ready", "success", "leave: done"}, r.fakeRdzv.said())
}

func TestSideThatStaysAfterTheSuccessIsStopped(t *testing.T) {
	r := sidesRig(t, `: > $DIR/up; exec sleep 60`, until("up")+`; : > $DIR/worker.$RANK`, 0)
	r.when(t, "worker.0", func() {
		require.Eventually(t, func() bool { return len(r.fakeRdzv.said()) == 3 }, 10*time.Second, 5*time.Millisecond)
		r.signals <- syscall.SIGTERM // nobody waits for it any more
	})
	require.Equal(t, policy.Success, r.run(t).Reason)
}

func TestSideThatFailsEndsTheEpoch(t *testing.T) {
	r := sidesRig(t, until("up.1")+`; [ -e $DIR/again ] && exit 0; : > $DIR/again; echo "no port" >&2; exit 3`,
		`: > $DIR/up.$RANK; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 60`, 1)
	require.Equal(t, policy.Success, r.run(t).Reason)
	f := r.fakeRdzv.failures[0]
	require.Equal(t, `the scheduler beside the workers ended before they did, last output "no port"`, f.Message)
	require.Equal(t, 3, f.ExitCode)
	require.Equal(t, "scheduler", f.Role)
	require.False(t, f.Stopped)
	require.Empty(t, r.log(t, "attempt_1"))
}

func TestSideThatFailsLastEndsTheJob(t *testing.T) {
	r := sidesRig(t, until("up.1")+`; kill -SEGV $$$$`, `: > $DIR/up.$RANK; exec sleep 60`, 0)
	res := r.run(t)
	require.Equal(t, policy.WorkerFailed, res.Reason)
	require.Contains(t, res.Verdict, "role scheduler")
	require.Contains(t, res.Verdict, "the scheduler beside the workers ended before they did (SIGSEGV")
}

// What saves something when it is told to end may need the scheduler for that.
func TestSideOutlivesStoppedWorkers(t *testing.T) {
	r := sidesRig(t, `echo $$$$ > $DIR/pid; : > $DIR/up; exec sleep 60`,
		until("up")+`; trap 'sleep 0.2; kill -0 $(cat $DIR/pid) && : > $DIR/alive.$RANK; exit 1' TERM; : > $DIR/up.$RANK
while :; do sleep 0.01; done`, 0)
	r.whenUp(t, func() { r.signals <- syscall.SIGTERM })
	require.Equal(t, policy.Signaled(int(syscall.SIGTERM)), r.run(t).Reason)
	require.FileExists(t, filepath.Join(r.dir, "alive.0"))
	require.FileExists(t, filepath.Join(r.dir, "alive.1"))
}

// lateLoss is a run whose other node fails once the workers of this one have succeeded.
type lateLoss struct {
	*fakeRdzv
	failed bool
}

func (l *lateLoss) Success(ctx context.Context, d Directive) error {
	if l.failed {
		return l.fakeRdzv.Success(ctx, d)
	}
	l.failed = true
	defer l.note("success")()
	l.tell(job.Stop, "another node has failed")
	return nil
}

func (l *lateLoss) Rejoin(ctx context.Context, d Directive, fs []verdict.Failure) error {
	return l.fakeRdzv.Rejoin(ctx, d, fs)
}

// The scheduler of workers that have succeeded serves those of other nodes, until they start anew.
func TestKeptSideEndsBeforeTheNextEpoch(t *testing.T) {
	r := sidesRig(t, `[ -e $DIR/pid ] && kill -0 $(cat $DIR/pid) && : > $DIR/two; echo $$$$ > $DIR/pid
: > $DIR/up.$MARK; [ -e $DIR/second ] || { trap ': > $DIR/second; exit 0' TERM; while :; do sleep 0.01; done; }`,
		until("up."), 0)
	r.cfg.Rendezvous = &lateLoss{fakeRdzv: r.fakeRdzv}
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.NoFileExists(t, filepath.Join(r.dir, "two"))
	require.FileExists(t, filepath.Join(r.dir, "second"))
	require.Equal(t, []string{"ready", "success", "rejoin", "ready", "success", "leave: done"}, r.fakeRdzv.said())
}

func TestSideThatCannotStartEndsTheJob(t *testing.T) {
	r := sidesRig(t, "", "", 3)
	r.cfg.Sides = func(Epoch) ([]Side, error) { return nil, os.NewSyscallError("port 8118 is taken", syscall.EBUSY) }
	res := r.run(t)
	require.Equal(t, policy.CannotExecute, res.Reason)
	require.Contains(t, res.Verdict, "port 8118 is taken")
}

// aloneRig is a node that has the scheduler and no workers.
func aloneRig(t *testing.T, scheduler string, maxRestarts int) *rig {
	t.Helper()
	r := newRig(t, scheduler, maxRestarts)
	r.cfg.Slots, r.cfg.Share = 0, "scheduler"
	r.cfg.Preset.Sides = func(preset.Vars) ([]Side, error) {
		return []Side{{Name: "scheduler"}, {Name: "pserver-0"}}, nil
	}
	return r
}

// It runs as long as the job does, ends by itself when that has succeeded, and says nothing of a success of its own.
func TestSideWithoutWorkers(t *testing.T) {
	r := aloneRig(t, `: > $DIR/up; `+until("late")+`; : > $DIR/down`, 0)
	r.when(t, "up", func() {
		r.fakeRdzv.order(job.Done, "")
		require.Eventually(t, func() bool { return len(r.fakeRdzv.said()) == 2 }, 10*time.Second, 5*time.Millisecond)
		require.NoError(t, os.WriteFile(filepath.Join(r.dir, "late"), nil, 0o600))
	})
	require.Equal(t, Result{Reason: policy.Success}, r.run(t))
	require.FileExists(t, filepath.Join(r.dir, "down"))
	require.Equal(t, []string{"ready", "leave: done"}, r.fakeRdzv.said())
}

func TestSideWithoutWorkersThatFailsEndsTheEpoch(t *testing.T) {
	r := aloneRig(t, `[ -e $DIR/again ] && { : > $DIR/up; exec sleep 60; }; : > $DIR/again; echo "no port" >&2; exit 3`, 1)
	r.when(t, "up", func() { r.fakeRdzv.order(job.Stop, ""); r.signals <- syscall.SIGTERM })
	require.Equal(t, policy.Signaled(int(syscall.SIGTERM)), r.run(t).Reason)
	f := r.fakeRdzv.failures[0]
	require.Equal(t, `the scheduler beside the workers ended before they did, last output "no port"`, f.Message)
	require.Equal(t, "scheduler", f.Role)
}

func TestNobodyOnANode(t *testing.T) {
	r := newRig(t, "true", 0)
	for _, share := range []string{"", preset.Workers} {
		r.cfg.Slots, r.cfg.Share = 0, share
		require.ErrorContains(t, r.cfg.Validate(), "0 workers on this node; need at least 1")
	}
}
