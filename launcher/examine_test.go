package launcher

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/verdict"
)

// timedOut makes rank 1 fail by the timeout of a collective.
const timedOut = `[ $RANK = 0 ] && { : > $DIR/up.0; exec sleep 60; }; while [ ! -e $DIR/up.0 ]; do sleep 0.01; done; ` +
	`printf 'Traceback (most recent call last):\nRuntimeError: [unbound_buffer.cc:81] ` +
	`Timed out waiting 3000ms for recv operation to complete\n' >&2; exit 1`

// examiner does one thing before the workers are stopped.
type examiner struct {
	diary
	do func(ctx context.Context, pids []int)
}

func (x *examiner) examiner() Examiner { return Examiner{"examiner", x.examine} }

func (x *examiner) examine(ctx context.Context, e Epoch, pids []int, why string) {
	x.write("epoch %d, %d pids: %s", e.Epoch, len(pids), why)
	if x.do != nil {
		x.do(ctx, pids)
	}
}

func TestLivingWorkersAreExaminedWhenACollectiveTimedOut(t *testing.T) {
	r := newRig(t, timedOut, 0)
	x := &examiner{}
	x.do = func(_ context.Context, pids []int) {
		x.write("lives: %t, ended: %t", syscall.Kill(pids[0], 0) == nil, pids[1] == 0)
	}
	seen := &observed{}
	r.cfg.Examiner, r.cfg.Observers = x.examiner(), []func(Event){seen.event}
	res := r.run(t)
	require.Equal(t, []string{
		"epoch 0, 2 pids: RuntimeError: [unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to complete",
		"lives: true, ended: true",
	}, x.read())
	require.Equal(t, 1, res.Local[res.Root].Rank)
	require.True(t, res.Local[1].Stopped, "%+v", res.Local)
}

// Whoever ends by itself while the others are looked at was not stopped.
func TestEndDuringAnExamination(t *testing.T) {
	r := newRig(t, `[ $RANK = 0 ] && { : > $DIR/up.0; while [ ! -e $DIR/go ]; do sleep 0.01; done; exit 5; }; `+
		timedOut[len(`[ $RANK = 0 ] && { : > $DIR/up.0; exec sleep 60; }; `):], 0)
	x := &examiner{do: func(ctx context.Context, pids []int) {
		require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go"), nil, 0o600))
		for ctx.Err() == nil && syscall.Kill(pids[0], 0) == nil {
			time.Sleep(time.Millisecond) // its parent, this process, collects it
		}
	}}
	r.cfg.Examiner = x.examiner()
	res := r.run(t)
	require.Len(t, x.read(), 1)
	require.Equal(t, []any{2, 0, 5, false},
		[]any{len(res.Local), res.Local[1].Rank, res.Local[1].ExitCode, res.Local[1].Stopped})
}

func TestNothingElseIsExamined(t *testing.T) {
	lives := `[ $RANK = 0 ] && { : > $DIR/up.0; exec sleep 60; }; while [ ! -e $DIR/up.0 ]; do sleep 0.01; done; `
	for name, script := range map[string]string{
		"closed connection": `[ $RANK = 0 ] && exec sleep 60; echo "RuntimeError: Connection closed by peer" >&2; exit 1`,
		"kill":              `[ $RANK = 0 ] && exec sleep 60; kill -9 $$$$`,
		"nobody lives":      timedOut[len(lives):],
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, script, 0)
			if name == "nobody lives" {
				r.cfg.Slots = 1
			}
			x := &examiner{}
			r.cfg.Examiner = x.examiner()
			require.Equal(t, policy.WorkerFailed, r.run(t).Reason)
			require.Empty(t, x.read())
		})
	}
}

// Who is stopped for the sake of another node's failure hears of it by the directive.
func TestExaminationOnTheOtherNodes(t *testing.T) {
	const cause = "rank 9 (node 1 gpu-07, local rank 1) failed: RuntimeError: Operation timed out! (exit code 1)"
	for _, tc := range []struct {
		cause string
		kind  job.CauseKind
		want  []string
	}{
		{cause, job.CauseFailure, []string{"epoch 0, 2 pids: " + cause}},
		{"rank 9 (node 1 gpu-07, local rank 1) failed: RuntimeError: Connection closed by peer", job.CauseFailure, nil},
		{cause, "growth", nil},
	} {
		r := newRig(t, `: > $DIR/up.$RANK; exec sleep 60`, 0)
		x := &examiner{}
		r.cfg.Examiner = x.examiner()
		r.whenUp(t, func() {
			r.fakeRdzv.mu.Lock()
			defer r.fakeRdzv.mu.Unlock()
			d := r.fakeRdzv.d
			d.Kind, d.Cause.Text, d.Cause.Kind = job.Fail, tc.cause, tc.kind
			r.fakeRdzv.dirs <- d
		})
		r.run(t)
		require.Equal(t, tc.want, x.read())
	}
}

// A worker that saw the timeout may end after one whose connection that timeout has closed.
func TestTimeoutThatASiblingHasTold(t *testing.T) {
	r := newRig(t, `[ $RANK = 0 ] && { printf 'Traceback (most recent call last):\nRuntimeError: Operation timed `+
		`out!\n' >&2; `+
		`: > $DIR/up.0; exec sleep 60; }; while [ ! -e $DIR/up.0 ]; do sleep 0.01; done; `+
		`printf 'Traceback (most recent call last):\nRuntimeError: Connection closed by peer\n' >&2; exit 1`, 0)
	x := &examiner{}
	r.cfg.Examiner = x.examiner()
	r.run(t)
	require.Equal(t, []string{"epoch 0, 2 pids: RuntimeError: Operation timed out!"}, x.read())
}

func TestExaminationIsBounded(t *testing.T) {
	r := newRig(t, timedOut, 0)
	log := &lockedBuffer{}
	r.cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	release, asked, stopped := make(chan struct{}), make(chan time.Time, 1), time.Time{}
	defer close(release)
	x := &examiner{do: func(context.Context, []int) { asked <- time.Now(); <-release }}
	r.cfg.Examiner = x.examiner()
	r.cfg.Processes = stopsAt{r.cfg.Processes, &stopped}
	require.Equal(t, policy.WorkerFailed, r.run(t).Reason)
	took := stopped.Sub(<-asked)
	require.True(t, took >= examineTime && took < 10*time.Second, "%s; a busy machine may add to a second", took)
	require.Contains(t, log.String(), "part=examiner")
}

// stopsAt notes when the workers are stopped.
type stopsAt struct {
	Processes
	at *time.Time
}

func (s stopsAt) Stop(ps []*proc.Process, sig syscall.Signal, grace time.Duration, force <-chan struct{}) error {
	*s.at = time.Now()
	return s.Processes.Stop(ps, sig, grace, force)
}

// Who is told to end has no time for it.
func TestSignalEndsAnExamination(t *testing.T) {
	r := newRig(t, timedOut, 0)
	ended := make(chan error, 1)
	x := &examiner{do: func(ctx context.Context, _ []int) {
		r.signals <- syscall.SIGTERM
		<-ctx.Done()
		ended <- ctx.Err()
	}}
	r.cfg.Examiner = x.examiner()
	require.Equal(t, policy.Signaled(15), r.run(t).Reason)
	require.ErrorIs(t, <-ended, context.Canceled, "not its deadline")
}

func TestFailureFromOutsideThatIsATimeoutIsExamined(t *testing.T) {
	r := newRig(t, `exec sleep 60`, 0)
	x := &examiner{}
	r.cfg.Examiner = x.examiner()
	r.cfg.Parts = []Part{watcher(func(_ context.Context, r RunRequest) {
		r.Fail(verdict.Failure{Message: "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)"}, policy.Fail)
	})}
	r.run(t)
	require.Equal(t, []string{"epoch 0, 2 pids: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)"},
		x.read())
}

// A worker that not even SIGKILL ends holds devices and ports: the node is of no use to the job.
func TestWorkerThatCannotBeKilledBarsItsNode(t *testing.T) {
	r := newRig(t, `[ $RANK = 0 ] && exec sleep 60; exit 1`, 3)
	r.cfg.Processes = undying{r.cfg.Processes}
	res := r.run(t)
	require.Equal(t, policy.Unclassified, res.Reason)
	require.Equal(t, policy.OwnHardware, res.Blame)
	require.ErrorContains(t, res.Err, "survived SIGKILL")
	require.Contains(t, r.fakeRdzv.said(), "bar: stop the workers: pid 7 survived SIGKILL")
}

type undying struct{ Processes }

func (u undying) Stop(ps []*proc.Process, sig syscall.Signal, grace time.Duration, force <-chan struct{}) error {
	return errors.Join(u.Processes.Stop(ps, sig, grace, force), errors.New("pid 7 survived SIGKILL"))
}
