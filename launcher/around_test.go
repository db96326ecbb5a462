package launcher

import (
	"context"
	"fmt"
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

// surround gives r both functions and a part, which write a diary. begin is Before.
func surround(r *rig, begin func(context.Context, Epoch) *verdict.Failure) *diary {
	d := &diary{}
	r.cfg.Parts = append(r.cfg.Parts, Part{Name: "diary",
		Start: func(*StartRequest) { d.write("start") },
		Stop:  func(s StopRequest) { d.write("stop, early %t", s.Early) },
	})
	r.cfg.Before = func(ctx context.Context, e Epoch) *verdict.Failure {
		f := begin(ctx, e)
		d.write("before %d: %t", e.Place.RestartCount, f == nil)
		return f
	}
	r.cfg.After = func(_ context.Context, a AfterRequest) {
		code := "none"
		if a.Failed != nil {
			code = fmt.Sprint(a.Failed.ExitCode)
		}
		d.write("after %d: success %t, failure %s", a.Epoch.Place.RestartCount, a.Succeeded, code)
	}
	return d
}

func passes(context.Context, Epoch) *verdict.Failure { return nil }

// stuck ends with its context, as one that was killed.
func stuck(ctx context.Context, _ Epoch) *verdict.Failure {
	<-ctx.Done()
	return &verdict.Failure{ExitCode: -15, Message: "stopped"}
}

func TestBeforeAndAfterEveryStart(t *testing.T) {
	r := newRig(t, `[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 7`, 1)
	d := surround(r, passes)
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.Equal(t, []string{
		"before 0: true", "start", "stop, early false", "after 0: success false, failure 7",
		"before 1: true", "start", "stop, early false", "after 1: success true, failure none",
	}, d.lines)
}

func TestAFailureBeforeTheStartIsAWorkers(t *testing.T) {
	r := newRig(t, `: > $DIR/up.$RANK`, 1)
	d := surround(r, func(_ context.Context, e Epoch) *verdict.Failure {
		return &verdict.Failure{ExitCode: 3, Message: "no mount", Role: "before"}
	})
	res := r.run(t)
	require.Equal(t, policy.WorkerFailed, res.Reason)
	require.Contains(t, res.Verdict, "no mount")
	require.Contains(t, res.Verdict, "role before")
	require.Equal(t, []string{"before 0: false", "before 1: false"}, d.lines, "nothing was begun that could end")
	require.NoFileExists(t, filepath.Join(r.dir, "up.0"))
	require.Equal(t, "failing: restart", r.fakeRdzv.said()[1])
}

func TestTheFailureBeforeTheStartIsForThePolicy(t *testing.T) {
	r := newRig(t, "", 5)
	r.cfg.Policy.Restart = policy.ExitCode
	surround(r, func(context.Context, Epoch) *verdict.Failure {
		return &verdict.Failure{ExitCode: 3, Message: "no mount"}
	})
	require.Equal(t, policy.WorkerPermanent, r.run(t).Reason)
}

// begun calls f once Before runs for the first time.
func begun(f func(), then func(context.Context, Epoch) *verdict.Failure) func(context.Context, Epoch) *verdict.Failure {
	first := true
	return func(ctx context.Context, e Epoch) *verdict.Failure {
		if first {
			first = false
			f()
			return then(ctx, e)
		}
		return nil
	}
}

func TestADirectiveStopsBefore(t *testing.T) {
	r := newRig(t, "", 0)
	d := surround(r, begun(func() { r.fakeRdzv.order(job.Stop, "the world grows") }, stuck))
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.Equal(t, []string{"before 0: false", "before 1: true", "start", "stop, early false",
		"after 1: success true, failure none"}, d.lines)
	require.Empty(t, r.fakeRdzv.failures)
}

func TestASignalStopsBefore(t *testing.T) {
	r := newRig(t, "", 0)
	d := surround(r, begun(func() { r.signals <- syscall.SIGTERM }, stuck))
	require.Equal(t, policy.Signaled(15), r.run(t).Reason)
	require.Equal(t, []string{"before 0: false"}, d.lines)
	require.Contains(t, r.fakeRdzv.said(), "leave: received SIGTERM")
}

// A Before that passes although it is stopped has an After.
func TestAfterWithoutWorkers(t *testing.T) {
	r := newRig(t, "", 0)
	d := surround(r, begun(func() { r.signals <- syscall.SIGTERM }, func(ctx context.Context, _ Epoch) *verdict.Failure {
		<-ctx.Done()
		return nil
	}))
	require.Equal(t, policy.Signaled(15), r.run(t).Reason)
	require.Equal(t, []string{"before 0: true", "after 0: success false, failure none"}, d.lines)
}

func TestALostRendezvousStopsBefore(t *testing.T) {
	r := newRig(t, "", 0)
	r.fakeRdzv.err = &ReasonError{policy.MasterUnreachable, context.DeadlineExceeded}
	d := surround(r, begun(func() { r.fakeRdzv.expel() }, stuck))
	require.Equal(t, policy.MasterUnreachable, r.run(t).Reason)
	require.Equal(t, []string{"before 0: false"}, d.lines)
}

func TestAfterALeave(t *testing.T) {
	r := newRig(t, `: > $DIR/up.$RANK; exec sleep 60`, 0)
	d := surround(r, passes)
	r.whenUp(t, func() { r.signals <- syscall.SIGTERM })
	require.Equal(t, policy.Signaled(15), r.run(t).Reason)
	require.Equal(t, []string{"before 0: true", "start", "stop, early true", "stop, early false",
		"after 0: success false, failure none"}, d.lines)
}

// What comes after the workers has the rest of the grace when a signal comes, and none after a second signal.
func TestAfterHasLittleTimeOnceTheNodeLeaves(t *testing.T) {
	for name, grace := range map[string]time.Duration{"one signal": 200 * time.Millisecond, "two signals": time.Hour} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, "", 0)
			r.cfg.ShutdownTimeout = grace
			r.cfg.After = func(ctx context.Context, _ AfterRequest) {
				r.signals <- syscall.SIGTERM
				if grace == time.Hour {
					r.signals <- syscall.SIGTERM
				}
				<-ctx.Done()
				require.NoError(t, os.WriteFile(filepath.Join(r.dir, "ended"), nil, 0o600))
			}
			require.Equal(t, policy.Signaled(15), r.run(t).Reason)
			require.FileExists(t, filepath.Join(r.dir, "ended"))
		})
	}
}

// The next start waits until all is done for the one before.
func TestTheNextStartWaitsForAfter(t *testing.T) {
	r := newRig(t, `[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 7`, 1)
	d := surround(r, passes)
	end := r.cfg.After
	r.cfg.After = func(ctx context.Context, a AfterRequest) {
		require.Eventually(t, func() bool { return len(r.fakeRdzv.said()) >= 2 }, 10*time.Second, time.Millisecond)
		d.write("after")
		end(ctx, a)
	}
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.Equal(t, []string{"before 0: true", "start", "stop, early false", "after"}, d.lines[:4])
	require.Equal(t, "before 1: true", d.lines[5])
}

func TestNothingIsRunAroundAHeldRun(t *testing.T) {
	r := newRig(t, "", 0)
	d := surround(r, passes)
	run := <-r.fakeRdzv.dirs
	run.Kind, run.Hold = job.Run, true
	r.fakeRdzv.dirs <- run
	r.fakeRdzv.dirs <- Directive{Kind: job.Fail, Cause: job.Cause{Text: "over"}}
	require.Equal(t, "over", r.run(t).Verdict)
	require.Equal(t, []string{"start", "stop, early false"}, d.lines)
}
