package launcher

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/verdict"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// fakeRdzv is a rendezvous of one node: it releases at once, restarts while restarts are
// left, and records what it is told.
type fakeRdzv struct {
	dirs     chan Directive
	err      error
	notices  chan job.Notice
	world    []job.Member
	worldErr error

	mu       sync.Mutex
	d        Directive
	max      int
	calls    []string
	failures []verdict.Failure
}

func newFakeRdzv(maxRestarts int) *fakeRdzv {
	s := &fakeRdzv{dirs: make(chan Directive, 8), max: maxRestarts}
	place := job.Place{GroupWorldSize: 1, WorldSize: 2, RoleWorldSize: 2}
	s.d = Directive{Kind: job.Lead, EpochID: job.EpochID{Round: 1}, Place: place}
	s.dirs <- s.d
	return s
}

// because is a cause of no node.
func because(k job.CauseKind, text string) job.Cause { return job.Cause{Kind: k, Text: text} }

func (s *fakeRdzv) tell(k job.Kind, cause string) {
	d := s.d
	d.Kind, d.Cause.Text = k, cause
	s.dirs <- d
}

// order is tell from outside of a call.
func (s *fakeRdzv) order(k job.Kind, cause string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tell(k, cause)
}

func (s *fakeRdzv) expel() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.dirs)
}

func (s *fakeRdzv) note(format string, args ...any) func() {
	s.mu.Lock()
	s.calls = append(s.calls, fmt.Sprintf(format, args...))
	return s.mu.Unlock
}

func (s *fakeRdzv) Directives() <-chan Directive { return s.dirs }
func (s *fakeRdzv) Err() error                   { return s.err }
func (s *fakeRdzv) Running(*Directive)           {}

func (s *fakeRdzv) Ready(_ context.Context, d Directive, addr string, port int) error {
	defer s.note("ready")()
	s.d = d
	s.d.Place.MasterAddr, s.d.Place.MasterPort = addr, port
	s.tell(job.Run, d.Cause.Text)
	return nil
}

func (s *fakeRdzv) Failing(_ context.Context, _ Directive, a policy.Action, fs []verdict.Failure) error {
	defer s.note("failing: %s", a)()
	s.failures = append(s.failures, fs...)
	if a == policy.Fail || s.d.Place.RestartCount >= s.max {
		s.tell(job.Fail, "over")
	} else {
		s.tell(job.Stop, fs[0].Reason())
	}
	return nil
}

func (s *fakeRdzv) Rejoin(_ context.Context, _ Directive, fs []verdict.Failure) error {
	defer s.note("rejoin")()
	s.failures = append(s.failures, fs...)
	s.d.Epoch++
	s.d.Place.RestartCount++
	s.tell(job.Lead, "")
	return nil
}

func (s *fakeRdzv) Success(context.Context, Directive) error {
	defer s.note("success")()
	s.tell(job.Done, "")
	return nil
}

func (s *fakeRdzv) RankSucceeded(_ context.Context, _ Directive, rank int) error {
	defer s.note("rank %d succeeded", rank)()
	return nil
}

func (s *fakeRdzv) RankFailed(
	_ context.Context, _ Directive, a policy.Action, fs []verdict.Failure, left int,
) error {
	defer s.note("rank failed: %s, %d left", a, left)()
	s.failures = append(s.failures, fs...)
	if left == 0 {
		s.tell(job.Fail, "over")
	}
	return nil
}

func (s *fakeRdzv) Leave(_ context.Context, reason string, fs []verdict.Failure) (verdict.Evidence, error) {
	defer s.note("leave: %s", reason)()
	return verdict.Evidence{Failures: fs, WorldSize: 2, RestartsUsed: s.d.Place.RestartCount, MaxRestarts: s.max}, nil
}

func (s *fakeRdzv) Leaving(_ context.Context, reason string, _ time.Duration) error {
	defer s.note("leaving: %s", reason)()
	return nil
}

func (s *fakeRdzv) Cleared(context.Context, CheckResult) error {
	defer s.note("cleared")()
	return nil
}

func (s *fakeRdzv) Doubt(_ context.Context, reason string) error {
	defer s.note("doubt: %s", reason)()
	return nil
}

func (s *fakeRdzv) Barred(_ context.Context, res CheckResult) error {
	reason := res.Reason
	if res.Again {
		reason += ", not decided"
	}
	defer s.note("barred: %s", reason)()
	return nil
}

func (s *fakeRdzv) Bar(_ context.Context, reason string) error {
	defer s.note("bar: %s", reason)()
	return nil
}

func (s *fakeRdzv) World(context.Context) ([]job.Member, error) {
	defer s.note("world")()
	return s.world, s.worldErr
}

func (s *fakeRdzv) Notices() <-chan job.Notice { return s.notices }

func (s *fakeRdzv) said() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

type store struct{ resets int }

func (s *store) Reset(bool) { s.resets++ }
func (s *store) Port() int  { return 4242 }

// rig is an agent with two shell workers in a directory of its own.
type rig struct {
	dir      string
	fakeRdzv *fakeRdzv
	store    *store
	signals  chan os.Signal
	cfg      Config
}

func newRig(t *testing.T, script string, maxRestarts int) *rig {
	t.Helper()
	r := &rig{dir: t.TempDir(), fakeRdzv: newFakeRdzv(maxRestarts), store: &store{}, signals: make(chan os.Signal, 4)}
	procs, err := proc.New(proc.Config{})
	require.NoError(t, err)
	out, err := logs.New(logs.Config{
		Dir: filepath.Join(r.dir, "logs"), RunID: "run", Stdout: io.Discard, Stderr: io.Discard,
		Redirects: func(int) logs.Std { return 3 }, Tee: func(int) logs.Std { return 0 },
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, procs.Close()); require.NoError(t, out.Close()) })
	p, err := preset.Lookup("torch")
	require.NoError(t, err)
	r.cfg = Config{
		RunID: "run", Role: "default", NodeName: "node-x", Host: "host-x", Addr: "127.0.0.1", Slots: 2,
		Path: "/bin/sh", Args: []string{"sh", "-c", script}, Name: "script",
		Env: append(os.Environ(), "DIR="+r.dir), Preset: p,
		Policy: policy.Config{MaxRestarts: maxRestarts}, ShutdownTimeout: 10 * time.Second,
		Substitute: argv.SubstituteLocalRank,
		Rendezvous: r.fakeRdzv, Store: r.store, Processes: procs, Logs: out, Signals: r.signals,
		Terminate: func(s os.Signal) bool { return s == syscall.SIGTERM || s == syscall.SIGINT },
	}
	return r
}

func (r *rig) run(t *testing.T) Result {
	t.Helper()
	a, err := New(r.cfg)
	require.NoError(t, err)
	done := make(chan Result, 1)
	go func() { done <- a.Run() }()
	select {
	case res := <-done:
		return res
	case <-time.After(30 * time.Second):
		require.FailNow(t, "the agent does not end", "calls: %v", r.fakeRdzv.said())
		return Result{}
	}
}

// when calls f once the file exists in the rig's directory.
func (r *rig) when(t *testing.T, file string, f func()) {
	t.Helper()
	go func() {
		for range 3000 {
			if _, err := os.Stat(filepath.Join(r.dir, file)); err == nil {
				f()
				return
			}
			time.Sleep(5 * time.Millisecond) // a worker's file has no other notice
		}
		t.Errorf("%s never appeared", file)
	}()
}

// whenUp calls f once both workers have said that they are up.
func (r *rig) whenUp(t *testing.T, f func()) {
	t.Helper()
	r.when(t, "up.0", func() { r.when(t, "up.1", f) })
}

func (r *rig) read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(r.dir, file))
	require.NoError(t, err)
	return string(data)
}

func TestSuccess(t *testing.T) {
	r := newRig(t,
		`echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $TORCHELASTIC_USE_AGENT_STORE $TORCHELASTIC_RUN_ID `+
			`arg$1" > $DIR/$RANK`, 0)
	r.cfg.Args = append(r.cfg.Args, "sh", "${local_rank}")
	res := r.run(t)
	require.Equal(t, Result{Reason: policy.Success}, res)
	require.Equal(t, "1 1 2 127.0.0.1:4242 True run arg1\n", r.read(t, "1"))
	require.Equal(t, []string{"ready", "success", "leave: done"}, r.fakeRdzv.said())
	require.Equal(t, 1, r.store.resets)
}

func TestRestart(t *testing.T) {
	r := newRig(t, `echo x >> $DIR/starts.$RANK; [ $RANK = 0 ] || [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 7`, 3)
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.Equal(t, "x\nx\nx\n", r.read(t, "starts.1"))
	require.Equal(t, 3, r.store.resets, "every epoch gets a fresh store")
	require.Equal(t, "exit code 7", r.fakeRdzv.failures[0].Reason())
}

func TestFailureForGood(t *testing.T) {
	r := newRig(t, `[ $RANK = 0 ] && exec sleep 60; echo "ValueError: bad batch" >&2; exit 3`, 0)
	r.cfg.Policy.MaxRestarts = 0
	res := r.run(t)
	require.Equal(t, policy.WorkerFailed, res.Reason)
	require.Contains(t, res.Verdict, "rank 1 (node 0")
	require.Contains(t, res.Verdict, "ValueError: bad batch")
	require.Equal(t, 3, res.Local[res.Root].ExitCode)
	require.Len(t, res.Local, 2, "the sibling that was stopped is listed, as in torchrun")
	require.True(t, res.Local[1].Stopped)
	require.Equal(t, -int(syscall.SIGTERM), res.Local[1].ExitCode)
}

func TestErrorFileSaysWhy(t *testing.T) {
	r := newRig(t, `[ $RANK = 0 ] && exec sleep 60; printf '{"message":{"message":"RuntimeError: from the file",`+
		`"extraInfo":{"py_callstack":"tb","timestamp":"1700000000"}}}' > $TORCHELASTIC_ERROR_FILE; exit 1`, 0)
	res := r.run(t)
	require.Contains(t, res.Verdict, "RuntimeError: from the file")
	require.Equal(t, "tb", res.Local[res.Root].Traceback)
}

func TestErrorFileThatIsALinkIsNotFollowed(t *testing.T) {
	r := newRig(t, `[ $RANK = 0 ] && exec sleep 60; echo '{"message":"secret"}' > $DIR/other; `+
		`ln -s $DIR/other $TORCHELASTIC_ERROR_FILE; exit 1`, 0)
	require.NotContains(t, r.run(t).Verdict, "secret")
}

func TestOutOfMemory(t *testing.T) {
	r := newRig(t, `[ $RANK = 0 ] && exec sleep 60; kill -9 $$$$`, 0)
	kills := int64(0)
	r.cfg.Memory = func() (proc.MemoryState, error) {
		kills++
		return proc.MemoryState{OOMKills: kills, Limit: 1 << 30, Peak: 1 << 30}, nil
	}
	res := r.run(t)
	require.Equal(t, policy.OutOfMemory, res.Reason, res.Verdict)
	require.Contains(t, res.Verdict, "OOM killer")
	require.Contains(t, res.Verdict, "1.0 GiB")
}

func TestPermanentExitCode(t *testing.T) {
	r := newRig(t, `[ $RANK = 0 ] && exec sleep 60; exit 1`, 5)
	r.cfg.Policy.Restart = policy.ExitCode
	res := r.run(t)
	require.Equal(t, policy.WorkerPermanent, res.Reason)
	require.Equal(t, "failing: fail", r.fakeRdzv.said()[1])
}

func TestRestartMeIsFree(t *testing.T) {
	r := newRig(t, `[ $RANK = 0 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exec sleep 60; `+
		`[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 138`, 5)
	r.cfg.Policy.Restart = policy.ExitCode
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.Equal(t, "failing: restart, not charged", r.fakeRdzv.said()[1])
}

func TestStopFromOutsideRestartsTheWorkers(t *testing.T) {
	r := newRig(t,
		`echo x >> $DIR/starts.$RANK; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; : > $DIR/up.$RANK; exec sleep 60`, 0)
	r.whenUp(t, func() { r.fakeRdzv.order(job.Stop, "the world grows") })
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.Equal(t, "x\nx\n", r.read(t, "starts.0"))
	require.Empty(t, r.fakeRdzv.failures, "workers that were stopped have not failed")
}

func TestSignalIsForwarded(t *testing.T) {
	r := newRig(t, `trap 'echo term > $DIR/got.$RANK; exit 0' TERM; : > $DIR/up.$RANK; while :; do sleep 0.01; done`, 0)
	r.whenUp(t, func() { r.signals <- syscall.SIGTERM })
	res := r.run(t)
	require.Equal(t, policy.Signaled(15), res.Reason)
	require.Equal(t, syscall.SIGTERM, res.Signal)
	require.Equal(t, "term\n", r.read(t, "got.0"))
	require.Equal(t, "term\n", r.read(t, "got.1"))
	require.Contains(t, r.fakeRdzv.said(), "leave: received SIGTERM", "the others hear at once")
}

func TestSecondSignalForces(t *testing.T) {
	r := newRig(t, `trap '' TERM; : > $DIR/up.$RANK; while :; do sleep 0.01; done`, 0)
	r.cfg.ShutdownTimeout = time.Hour
	r.whenUp(t, func() { r.signals <- syscall.SIGTERM; r.signals <- syscall.SIGTERM })
	require.Equal(t, policy.Signaled(15), r.run(t).Reason)
}

func TestOtherSignalsReachTheWorkers(t *testing.T) {
	r := newRig(t, `trap 'exit 0' USR1; : > $DIR/up.$RANK; while :; do sleep 0.01; done`, 0)
	r.whenUp(t, func() { r.signals <- syscall.SIGUSR1 })
	require.Equal(t, policy.Success, r.run(t).Reason)
}

func TestProgramThatCannotStart(t *testing.T) {
	r := newRig(t, "", 3)
	r.cfg.Path = filepath.Join(r.dir, "missing")
	res := r.run(t)
	require.Equal(t, policy.CannotExecute, res.Reason)
	require.Contains(t, res.Verdict, "missing")
}

func TestConfirmationOfTheRunningEpochChangesNothing(t *testing.T) {
	r := newRig(t, `echo x >> $DIR/starts.$RANK; : > $DIR/up.$RANK; while [ ! -e $DIR/go ]; do sleep 0.01; done`, 0)
	r.whenUp(t, func() {
		r.fakeRdzv.order(job.Run, "")
		require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go"), nil, 0o600))
	})
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.Equal(t, "x\n", r.read(t, "starts.0"))
}

// A daemon that was started again takes workers for running that were about to start. In a pause it confirms them.
func TestAConfirmationStartsNoWorkers(t *testing.T) {
	r := newRig(t, `: > $DIR/up.$RANK`, 0)
	run := <-r.fakeRdzv.dirs
	run.Kind, run.Confirms = job.Run, true
	r.fakeRdzv.dirs <- run
	r.fakeRdzv.dirs <- Directive{Kind: job.Fail, Cause: job.Cause{Text: "over"}}
	require.Equal(t, "over", r.run(t).Verdict)
	require.NoFileExists(t, filepath.Join(r.dir, "up.0"))
}

func TestWorkersStartWhenThePauseOfTheirEpochIsOver(t *testing.T) {
	r := newRig(t, `: > $DIR/up.$RANK; while :; do sleep 0.01; done`, 0)
	run := <-r.fakeRdzv.dirs
	run.Kind, run.Confirms = job.Run, true
	r.fakeRdzv.dirs <- run
	run.Confirms = false
	r.fakeRdzv.dirs <- run
	r.whenUp(t, func() { r.fakeRdzv.order(job.Fail, "over") })
	require.Equal(t, "over", r.run(t).Verdict)
}

// A daemon that was started again, or whose confirmation is late, says Run for an epoch
// whose workers are being stopped or have ended.
func TestAnEpochNeverRunsTwice(t *testing.T) {
	r := newRig(t,
		`echo x >> $DIR/starts.$RANK; trap 'sleep 0.2; exit 0' TERM; : > $DIR/up.$RANK; while :; do sleep 0.01; done`, 0)
	r.whenUp(t, func() {
		r.fakeRdzv.order(job.Stop, "the world grows")
		r.fakeRdzv.order(job.Run, "late")
		r.fakeRdzv.order(job.Fail, "over")
	})
	r.run(t)
	require.Equal(t, "x\n", r.read(t, "starts.0"))
}

func TestExpelledNodeEndsItsWorkers(t *testing.T) {
	r := newRig(t, `: > $DIR/up.$RANK; exec sleep 60`, 0)
	r.fakeRdzv.err = &ReasonError{Reason: policy.TokenRefused, Err: errors.New("wrong token")}
	r.when(t, "up.1", r.fakeRdzv.expel)
	res := r.run(t)
	require.Equal(t, policy.TokenRefused, res.Reason)
	require.ErrorContains(t, res.Err, "wrong token")
}

func TestSuccessIsNotLostWithTheDaemon(t *testing.T) {
	r := newRig(t, `exit 0`, 0)
	away := &ReasonError{Reason: policy.MasterUnreachable, Err: errors.New("gone")}
	r.cfg.Rendezvous = &deserted{fakeRdzv: r.fakeRdzv, err: away}
	require.Equal(t, Result{Reason: policy.Success}, r.run(t))
}

// deserted is a rendezvous whose daemon is away when success is reported.
type deserted struct {
	*fakeRdzv
	err error
}

func (d *deserted) Success(context.Context, Directive) error { return d.err }

// An error on standard output is the worker's last word only if it is the last one there, and no signal ended it.
func TestErrorOnStandardOutput(t *testing.T) {
	const trace = `printf 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: bad batch\n'; `
	const words = `echo 'dataset dir is missing' >&2; `
	for name, c := range map[string]struct{ script, want string }{
		"its last word":  {trace + words + `exit 1`, "ValueError: bad batch (exit code 1)"},
		"survived":       {trace + `for i in 1 2 3 4 5 6; do echo step $i; done; ` + words + `exit 1`, "exit code 1"},
		"before a crash": {trace + words + `kill -SEGV $$$$`, "SIGSEGV"},
	} {
		t.Run(name, func(t *testing.T) {
			res := newRig(t, `[ $RANK = 0 ] || exec sleep 60; `+c.script, 0).run(t)
			f := res.Local[res.Root]
			require.True(t, strings.HasSuffix(f.LastLines, "dataset dir is missing"), f.LastLines)
			require.Equal(t, c.want == "ValueError: bad batch (exit code 1)", f.Tells())
			require.Contains(t, f.Reason(), c.want)
		})
	}
}

func TestLogsOfEveryEpochAreKept(t *testing.T) {
	r := newRig(t, `n=$TORCHELASTIC_RESTART_COUNT; echo epoch $n; : > $DIR/said.$RANK.$n; `+
		`while [ ! -e $DIR/said.0.$n ]; do sleep 0.01; done; [ $n = 2 ] || exit 1`, 2)
	require.Equal(t, policy.Success, r.run(t).Reason)
	found, err := filepath.Glob(filepath.Join(r.dir, "logs/run_*/attempt_*/0/stdout.log"))
	require.NoError(t, err)
	var texts []string
	for _, f := range found {
		data, err := os.ReadFile(f)
		require.NoError(t, err)
		texts = append(texts, strings.TrimSpace(string(data)))
	}
	require.Equal(t, []string{"epoch 0", "epoch 1", "epoch 2"}, texts)
}

func TestConfigErrors(t *testing.T) {
	good := newRig(t, "", 0).cfg
	for name, c := range map[string]struct {
		spoil func(*Config)
		want  string
	}{
		"no slots":       {func(c *Config) { c.Slots = 0 }, "0 workers"},
		"no program":     {func(c *Config) { c.Path = "" }, "no program"},
		"negative grace": {func(c *Config) { c.ShutdownTimeout = -1 }, "negative"},
		"no store":       {func(c *Config) { c.Store = nil }, "Store"},
		"bad policy":     {func(c *Config) { c.Policy.Restart = "x" }, "unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := good
			c.spoil(&cfg)
			_, err := New(cfg)
			require.ErrorContains(t, err, c.want)
		})
	}
}

// What outlives an epoch in the store is of no use once another node has served one.
func TestWhichEpochFollows(t *testing.T) {
	at := func(round, epoch int) Directive { return Directive{EpochID: job.EpochID{Round: round, Epoch: epoch}} }
	for _, c := range []struct {
		led, next Directive
		want      bool
	}{
		{at(0, 0), at(1, 0), false}, {at(1, 0), at(1, 0), true}, {at(1, 0), at(1, 1), true}, {at(1, 3), at(2, 0), true},
		{at(1, 0), at(1, 2), false}, {at(1, 0), at(3, 0), false}, {at(2, 0), at(1, 0), false},
	} {
		require.Equal(t, c.want, c.next.follows(c.led), "%v after %v", c.next, c.led)
	}
}
