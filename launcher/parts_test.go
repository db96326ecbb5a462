package launcher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/verdict"
)

// diary is what parts and observers were told, in order.
type diary struct {
	mu    sync.Mutex
	lines []string
}

func (d *diary) write(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lines = append(d.lines, fmt.Sprintf(format, args...))
}

func (d *diary) read() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.lines)
}

// everything is a part with every hook of an epoch, and End.
type everything struct{ diary }

func (p *everything) part() Part {
	return Part{Name: "all", Start: p.start, Run: p.run, Stop: p.stop, End: p.end}
}

func (p *everything) start(r *StartRequest) {
	p.write("start %d", r.Epoch.Epoch)
	for i := range r.Env {
		r.Env[i] = append(r.Env[i], fmt.Sprintf("FROM_PART=%s %d of %d", r.World[0].Node, i, r.Place.WorldSize))
	}
	r.Setenv("TORCHELASTIC_RUN_ID=over")
}

func (p *everything) run(ctx context.Context, r RunRequest) {
	p.write("run %d pids of %d", len(r.PIDs), r.Epoch.Epoch)
	<-ctx.Done()
	p.write("ran")
}

func (p *everything) stop(r StopRequest) {
	p.write("stop %d: %s (%s) %t", r.Epoch.Epoch, r.Reason, r.CauseKind, r.Early)
}

func (p *everything) end(r EndRequest) { p.write("end %s within %s", r.Result.Reason, r.Budget) }

func TestPartsAreCalledInOrder(t *testing.T) {
	r := newRig(t, `echo "$FROM_PART $TORCHELASTIC_RUN_ID" > $DIR/$RANK; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; `+
		`: > $DIR/up.$RANK; exec sleep 60`, 0)
	p, procs := &everything{}, r.cfg.Processes
	r.cfg.Parts, r.cfg.NeedsWorld = []Part{p.part()}, true
	r.cfg.Spawn = func(s proc.Spec, id logs.WorkerID) (*proc.Process, error) {
		p.write("spawn %d", id.LocalRank)
		return procs.Start(s)
	}
	r.fakeRdzv.world = []job.Member{{Node: "node-x", Slots: 2}}
	r.whenUp(t, func() { r.fakeRdzv.order(job.Stop, "the world grows") })
	res := r.run(t)
	require.Equal(t, policy.Success, res.Reason)
	EndParts(r.cfg.Parts, EndRequest{Result: res})
	require.Equal(t, []string{
		"start 0", "spawn 0", "spawn 1", "run 2 pids of 0", "ran", "stop 0: the world grows () false",
		"start 1", "spawn 0", "spawn 1", "run 2 pids of 1", "ran", "stop 1: the workers have ended () false",
		"end success within 0s",
	}, p.read())
	require.Equal(t, "node-x 1 of 2 over\n", r.read(t, "1"))
	require.Equal(t, []string{"ready", "world", "rejoin", "ready", "world", "success", "leave: done"}, r.fakeRdzv.said())
}

func TestSignalIsToldEarly(t *testing.T) {
	r := newRig(t, `: > $DIR/up.$RANK; exec sleep 60`, 0)
	p := &stops{}
	r.cfg.Parts = []Part{p.part()}
	r.whenUp(t, func() { r.signals <- syscall.SIGTERM })
	r.run(t)
	require.Equal(t, []string{"received SIGTERM true", "received SIGTERM false"}, p.read())
}

type stops struct{ diary }

func (p *stops) part() Part {
	return Part{Name: "stopper", Stop: func(r StopRequest) { p.write("%s %t", r.Reason, r.Early) }}
}

func TestStopSaysItsCause(t *testing.T) {
	a := &Agent{pending: &Directive{Kind: job.Stop, Cause: because(job.CauseOperator, "scaled")}}
	e := Epoch{Directive: Directive{EpochID: job.EpochID{Round: 3}}}
	require.Equal(t, StopRequest{Epoch: e, Reason: "scaled", CauseKind: job.CauseOperator},
		a.stopRequest(&group{epoch: e}, false))
}

// watcher is a part that does one thing as soon as workers run.
func watcher(do func(ctx context.Context, r RunRequest)) Part { return Part{Name: "watcher", Run: do} }

func TestFailureFromOutsideRestarts(t *testing.T) {
	r := newRig(t, `[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; exec sleep 60`, 1)
	why := &stops{}
	r.cfg.Parts = []Part{watcher(func(ctx context.Context, r RunRequest) {
		if r.Epoch.Epoch == 0 {
			r.Fail(verdict.Failure{Rank: 1, LocalRank: 1, PID: r.PIDs[1], Message: "no progress for 600 s"}, policy.RestartFree)
			r.Fail(verdict.Failure{Message: "too late"}, policy.Fail)
		}
		<-ctx.Done()
	}), why.part()}
	seen := &observed{}
	r.cfg.Observers = []func(Event){seen.event}
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.Equal(t, "failing: restart, not charged", r.fakeRdzv.said()[1])
	f := r.fakeRdzv.failures[0]
	require.Equal(t, []any{"no progress for 600 s", "node-x", "host-x", "default", 1, false},
		[]any{f.Message, f.NodeName, f.Host, f.Role, f.ExitCode, f.At.IsZero()})
	require.Len(t, r.fakeRdzv.failures, 2, "reported, and told again with the request to rejoin: %v", r.fakeRdzv.failures)
	require.Equal(t, "no progress for 600 s (exit code 1) false", why.read()[0])
	require.Contains(t, seen.read(), "faulted watcher rank 1: restart, not charged")
}

func TestFailureFromOutsideForGood(t *testing.T) {
	r := newRig(t, `exec sleep 60`, 5)
	r.cfg.Parts = []Part{watcher(func(_ context.Context, r RunRequest) {
		r.Fail(verdict.Failure{Rank: 1, LocalRank: 1, PID: r.PIDs[1], Message: "the GPU is gone"}, policy.Fail)
	})}
	res := r.run(t)
	require.Equal(t, "failing: fail", r.fakeRdzv.said()[1])
	require.Regexp(t, `^rank 1 .*pid [1-9].* failed first: the GPU is gone`, res.Verdict)
	require.Equal(t, 1, res.Local[res.Root].Rank)
	require.Len(t, res.Local, 2, "the worker that was blamed is listed once")
}

func TestFailureThatAsksForSuccessRestarts(t *testing.T) {
	r := newRig(t, `[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; exec sleep 60`, 1)
	r.cfg.Parts = []Part{watcher(func(_ context.Context, r RunRequest) {
		if r.Epoch.Epoch == 0 {
			r.Fail(verdict.Failure{Message: "x", ExitCode: -6, Role: "r", At: time.Unix(9, 0)}, policy.Succeed)
		}
	})}
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.Equal(t, "failing: restart", r.fakeRdzv.said()[1])
	require.Equal(t, []any{-6, "r", time.Unix(9, 0)},
		[]any{r.fakeRdzv.failures[0].ExitCode, r.fakeRdzv.failures[0].Role, r.fakeRdzv.failures[0].At})
}

func TestWatchersReadTheEndOfTheOutput(t *testing.T) {
	r := newRig(t, `echo out of $RANK; [ $RANK = 1 ] && echo bad batch >&2; exec sleep 60`, 0)
	r.cfg.Parts = []Part{watcher(func(ctx context.Context, r RunRequest) {
		for ctx.Err() == nil && (r.Output(0) == "" || r.Output(1) != "bad batch") {
			time.Sleep(time.Millisecond)
		}
		text := r.Output(0) + "/" + r.Output(1) + "/" + r.Output(-1) + r.Output(len(r.PIDs))
		r.Fail(verdict.Failure{Message: text}, policy.Fail)
	})}
	r.run(t)
	require.Equal(t, "out of 0/bad batch/", r.fakeRdzv.failures[0].Message)
}

// The failure of an epoch that is over is nobody's, whenever it is found.
func TestFailureAfterTheEnd(t *testing.T) {
	r := newRig(t, `exit 0`, 1)
	log := &lockedBuffer{}
	r.cfg.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	var c Control
	r.cfg.Parts = []Part{watcher(func(ctx context.Context, r RunRequest) {
		<-ctx.Done()
		c = r.Control
		c.Fail(verdict.Failure{Message: "while stopping"}, policy.Fail)
	})}
	require.Equal(t, policy.Success, r.run(t).Reason)
	c.Fail(verdict.Failure{Message: "after it"}, policy.Fail)
	require.Contains(t, log.String(), `is over, or has failed before, is ignored" part=watcher why="while stopping"`)
	require.Contains(t, log.String(), `why="after it"`)
	require.Empty(t, r.fakeRdzv.failures)
}

func TestFaultOfAGroupThatIsBeingStoppedDoesNotCount(t *testing.T) {
	g := &group{stopping: true, faults: make(chan fault, 1)}
	log := &lockedBuffer{}
	debug := slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	r := &reporter{cfg: &Config{Logger: debug}}
	g.faults <- fault{part: "p", failure: verdict.Failure{Message: "late"}}
	require.Zero(t, r.fault(g, <-g.faultsFound(), false))
	require.Empty(t, g.failures)
	require.Contains(t, log.String(), "why=late")
	g = nil
	require.Nil(t, g.faultsFound())
}

func TestWatcherThatDoesNotReturnIsLeftBehind(t *testing.T) {
	r := newRig(t, `[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; : > $DIR/up.$RANK; exec sleep 60`, 0)
	log, block := &lockedBuffer{}, make(chan struct{})
	defer close(block)
	r.cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	r.cfg.Parts = []Part{watcher(func(_ context.Context, r RunRequest) {
		if r.Epoch.Epoch == 0 {
			<-block
		}
	})}
	r.whenUp(t, func() { r.fakeRdzv.order(job.Stop, "the world grows") })
	begun := time.Now()
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.GreaterOrEqual(t, time.Since(begun), partGrace)
	require.Equal(t, 1, strings.Count(log.String(), "a part of the launcher does not return"))
	require.Contains(t, log.String(), "part=watcher")
}

// observed writes down the events.
type observed struct{ diary }

func (o *observed) event(e Event) {
	switch i := e.(type) {
	case StartInfo:
		o.write("started %d with %d pids", i.Epoch.Epoch, len(i.PIDs))
	case ExitInfo:
		o.write("exited %d with %d %t", i.Worker.LocalRank, i.ExitCode, i.Stopped)
	case SuccessInfo:
		o.write("succeeded %d", i.Epoch.Epoch)
	case StopInfo:
		o.write("stopped %d", i.Epoch.Epoch)
	case SignalInfo:
		o.write("%s %t", i.Signal, i.Again)
	case LeaveInfo:
		o.write("leaving: %s", i.Reason)
	case TimerInfo:
		o.write("timer %s of %d after %s: %s", i.Scope, i.Worker.Rank, i.After, i.Signal)
	case CheckInfo:
		o.write("checked %q %t %s", i.Part, i.Passed, i.Reason)
	case BarInfo:
		o.write("barred %s: %s", i.Cause.Kind, i.Cause.Text)
	case FaultInfo:
		o.write("faulted %s rank %d: %s", i.Part, i.Failure.Rank, i.Action)
	case DecideInfo:
		o.write("decided rank %d: %s: %s", i.Failure.Rank, i.Decision.Action, i.Failure.Policy)
	}
}

func TestObserversHearEverythingOnce(t *testing.T) {
	r := newRig(t, `[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 1 ] && exec sleep 60; exit 7`, 1)
	one, other := &observed{}, &observed{}
	r.cfg.Observers = []func(Event){one.event, func(Event) {}, other.event}
	require.Equal(t, policy.Success, r.run(t).Reason)
	lines := one.read()
	require.Equal(t, lines, other.read())
	require.Equal(t, []string{"started 0 with 2 pids", "exited 0 with 7 false", "exited 1 with -15 true", "stopped 0",
		"started 1 with 2 pids"}, lines[:5])
	require.ElementsMatch(t, []string{"exited 0 with 0 false", "exited 1 with 0 false"}, lines[5:7])
	require.Equal(t, []string{"succeeded 1", "stopped 1"}, lines[7:])
}

func TestObserversHearOfSignals(t *testing.T) {
	r := newRig(t, `trap '' TERM; : > $DIR/up.$RANK; while :; do sleep 0.01; done`, 0)
	seen := &observed{}
	r.cfg.Observers = []func(Event){seen.event}
	r.whenUp(t, func() { r.signals <- syscall.SIGTERM; r.signals <- syscall.SIGTERM })
	r.run(t)
	require.Equal(t, []string{"terminated false", "leaving: received SIGTERM", "terminated true"}, seen.read()[1:4])
}

func TestNobodyToTellCostsNothing(t *testing.T) {
	st := &starter{cfg: &Config{}}
	g := &group{epoch: Epoch{Directive: Directive{EpochID: job.EpochID{Round: 1}}}, begun: true}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		st.cfg.stopParts(g, StopRequest{Epoch: g.epoch})
		st.runParts(g)
	}))
	require.Nil(t, g.faults)
}

// ender takes some time of the end.
func ender(d *diary, name string, takes time.Duration) Part {
	return Part{Name: name, End: func(r EndRequest) {
		d.write("%s may take %s", name, r.Budget)
		time.Sleep(takes)
	}}
}

func TestPartsEndInReverseOrderWithinOneBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &diary{}
		EndParts([]Part{ender(d, "first", 0), {}, ender(d, "second", time.Hour), ender(d, "third", 4*time.Second)},
			EndRequest{Budget: 10 * time.Second})
		require.Equal(t, []string{"third may take 10s", "second may take 6s", "first may take 0s"}, d.read())
	})
}

// bare is an agent in a bubble that gets no workers.
type bare struct {
	*fakeRdzv
	cfg  Config
	log  *lockedBuffer
	done chan Result
}

func newBare(parts ...Part) *bare {
	b := &bare{fakeRdzv: &fakeRdzv{dirs: make(chan Directive, 8)}, log: &lockedBuffer{}, done: make(chan Result, 1)}
	b.cfg = Config{
		Slots: 2, Path: "/bin/false", Rendezvous: b, Store: &store{}, Logs: &logs.Logs{}, Parts: parts,
		Processes: struct{ Processes }{}, // nothing is started
		Logger:    slog.New(slog.NewTextHandler(b.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	return b
}

// tell gives directives, and each the time to be handled.
func (b *bare) tell(ds ...Directive) {
	for _, d := range ds {
		b.dirs <- d
		synctest.Wait()
	}
}

func (b *bare) begin(t *testing.T, ds ...Directive) {
	t.Helper()
	a, err := New(b.cfg)
	require.NoError(t, err)
	go func() { b.done <- a.Run() }()
	b.tell(ds...)
}

// bubble is a synctest bubble for a test of an agent without workers.
func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

func TestWaitSaysWhatFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBare()
		b.begin(t, Directive{Kind: job.Wait}, Directive{Kind: job.Wait, Cause: because(job.CauseOperator, "paused by alice")},
			Directive{Kind: job.Wait, Cause: because("refusal", "node-y was refused")},
			Directive{Kind: job.Wait, Cause: because(job.CauseFailure, "rank 3 failed")}, Directive{Kind: job.Done})
		<-b.done
		require.Regexp(t, `(?s)INFO msg="waiting for the other nodes".*WARN msg="waiting; `+
			`no workers are started for now" cause="paused by alice" kind=operator`+
			`.*WARN msg="still waiting for the other nodes" cause="node-y was refused"`+
			`.*WARN msg="the job is held after a failure; [^"]*" cause="rank 3 failed"`, b.log.String())
	})
}

func TestUnknownDirectiveIsSaidOnceAndChangesNothing(t *testing.T) {
	r := newRig(t, `: > $DIR/up.$RANK; while [ ! -e $DIR/go ]; do sleep 0.01; done`, 0)
	log := &lockedBuffer{}
	r.cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	r.whenUp(t, func() {
		r.fakeRdzv.order("ponder", "")
		r.fakeRdzv.order("ponder", "")
		r.fakeRdzv.order("muse", "")
		require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go"), nil, 0o600))
	})
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.Equal(t, 1, strings.Count(log.String(), "directive=ponder"))
	require.Equal(t, 1, strings.Count(log.String(), "directive=muse"))
}

func TestUnknownDirectivesAreBounded(t *testing.T) {
	var u unknownKinds
	log := slog.New(slog.DiscardHandler)
	for i := range 1000 {
		require.True(t, u.strange(job.Kind(fmt.Sprint(i)), log))
	}
	require.Len(t, u, maxStrange)
	for _, k := range []job.Kind{job.Wait, job.Lead, job.Run, job.Stop, job.Done, job.Fail, job.Check, job.Bar} {
		require.False(t, u.strange(k, log))
	}
}

func TestNoticesReachTheirParts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, b := &diary{}, newBare()
		b.cfg.OnNotice = []func(topic, body string){func(topic, body string) { p.write("%s: %s", topic, body) }}
		b.notices = make(chan job.Notice, 2)
		b.notices <- job.Notice{Topic: "stacks", Body: "now"}
		b.notices <- job.Notice{Topic: "log-level", Body: "debug"}
		b.begin(t, Directive{Kind: job.Wait})
		require.Equal(t, []string{"stacks: now", "log-level: debug"}, p.read())
		close(b.notices)
		b.tell(Directive{Kind: job.Done})
		<-b.done
	})
}

func TestNoticesAreOnlyAskedForWhenWanted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBare()
		b.notices = make(chan job.Notice, 1)
		b.notices <- job.Notice{}
		b.begin(t, Directive{Kind: job.Done})
		<-b.done
		require.Len(t, b.notices, 1)
	})
}

func TestSpawnerThatCannotStartAWorker(t *testing.T) {
	r := newRig(t, "", 3)
	r.cfg.Spawn = func(proc.Spec, logs.WorkerID) (*proc.Process, error) { return nil, errors.New("no room") }
	res := r.run(t)
	require.Equal(t, policy.CannotExecute, res.Reason)
	require.Contains(t, res.Verdict, "no room")
}

func TestPartsThatCannotGoTogether(t *testing.T) {
	good := newRig(t, "", 0).cfg
	good.Parts = []Part{{Name: "warm"}, {Name: "warm"}}
	_, err := New(good)
	require.ErrorContains(t, err, `two parts are called "warm"`)
}
