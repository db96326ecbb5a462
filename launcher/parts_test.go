package launcher

import (
	"cmp"
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
	g := &group{epoch: Epoch{Directive: Directive{EpochID: job.EpochID{Round: 1}}}}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		st.cfg.stopParts(StopRequest{Epoch: g.epoch})
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

func says(name string, res CheckResult, err error) Part {
	return Part{Name: name, Check: func(context.Context, CheckRequest) (CheckResult, error) { return res, err }}
}

// bubble is a synctest bubble for a test of an agent without workers.
func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

func TestChecksAreAnswered(t *testing.T) {
	soon, later := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC)
	pass := CheckResult{Passed: true}
	for name, tt := range map[string]struct {
		parts []Part
		want  string // what the rendezvous is told
		seen  []string
	}{
		"no checker": {nil, "cleared until 0001", nil},
		"one":        {[]Part{says("a", pass, nil)}, "cleared until 0001", []string{`checked "" true `}},
		"the earliest end counts": {
			[]Part{says("a", CheckResult{Passed: true, Until: later}, nil),
				says("b", CheckResult{Passed: true, Until: soon}, nil), says("c", pass, nil)},
			"cleared until 2030", []string{`checked "" true `}},
		"the first that does not pass decides": {
			[]Part{says("a", pass, nil), says("b", CheckResult{Reason: "GPU 3 is\n slow"}, nil),
				says("c", CheckResult{Reason: "not asked"}, nil)},
			"barred: b: GPU 3 is slow", []string{"checked \"b\" false GPU 3 is\n slow"}},
		"nothing is proved": {[]Part{says("a", CheckResult{Again: true, Reason: "its time was over"}, nil)},
			"barred: a: its time was over, not decided",
			[]string{`checked "a" false its time was over`}},
		"no reason": {[]Part{says("a", CheckResult{}, nil)}, "barred: a: it does not say why",
			[]string{`checked "a" false `}},
		"an error": {
			[]Part{says("a", pass, errors.New("no such device"))},
			"barred: a: could not check: no such device", []string{`checked "a" false could not check: no such device`}},
	} {
		bubble(t, name, func(t *testing.T) {
			b, seen := newBare(tt.parts...), &observed{}
			b.cfg.Observers = []func(Event){seen.event}
			b.begin(t, Directive{Kind: job.Check})
			require.Equal(t, []string{tt.want}, b.said())
			require.Equal(t, tt.seen, seen.read())
			b.tell(Directive{Kind: job.Done})
			require.Equal(t, Result{Reason: policy.Success}, <-b.done)
		})
	}
}

func (b *bare) Cleared(_ context.Context, res CheckResult) error {
	defer b.note("cleared until %s", res.Until.Format("2006"))()
	return nil
}

func (b *bare) Doubt(_ context.Context, reason string) error {
	defer b.note("doubt: %s", reason)()
	return nil
}

func TestReasonOfACheckIsBounded(t *testing.T) {
	reason := CheckInfo{Part: "p", CheckResult: CheckResult{Reason: strings.Repeat("é", maxReason)}}.reason()
	require.LessOrEqual(t, len(reason), maxReason)
	require.Greater(t, len(reason), maxReason-2)
	require.True(t, strings.HasSuffix(reason, "é"))
}

func TestNewerDirectiveEndsACheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBare(Part{Name: "polite", Check: func(ctx context.Context, _ CheckRequest) (CheckResult, error) {
			<-ctx.Done()
			return CheckResult{}, ctx.Err()
		}})
		b.begin(t, Directive{Kind: job.Check}, Directive{Kind: job.Wait, Cause: job.Cause{Text: "a spare"}})
		require.Contains(t, b.log.String(), "a spare")
		require.Empty(t, b.said(), "its answer does not count")
		b.tell(Directive{Kind: job.Done})
		<-b.done
		require.NotContains(t, b.log.String(), "does not return")
	})
}

func TestCheckThatDoesNotEndIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		block := make(chan struct{})
		b := newBare(Part{Name: "stubborn", Check: func(context.Context, CheckRequest) (CheckResult, error) {
			<-block
			return CheckResult{Passed: true}, nil
		}}, says("next", CheckResult{Reason: "never asked"}, nil))
		b.begin(t, Directive{Kind: job.Check}, Directive{Kind: job.Wait},
			Directive{Kind: job.Wait, Cause: job.Cause{Text: "the newest"}})
		require.NotContains(t, b.log.String(), "the newest")
		time.Sleep(partGrace)
		synctest.Wait()
		require.Contains(t, b.log.String(), "the newest")
		close(block)
		synctest.Wait()
		require.Empty(t, b.said(), "a late answer does not count")
		require.Equal(t, 1, strings.Count(b.log.String(), "does not return"))
		require.Contains(t, b.log.String(), "part=stubborn")
		b.tell(Directive{Kind: job.Done})
		<-b.done
	})
}

func TestSignalEndsACheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBare(Part{Name: "polite", Check: func(ctx context.Context, _ CheckRequest) (CheckResult, error) {
			<-ctx.Done()
			return CheckResult{}, ctx.Err()
		}})
		signals := make(chan os.Signal, 1)
		b.cfg.Signals, b.cfg.Terminate = signals, func(os.Signal) bool { return true }
		b.begin(t, Directive{Kind: job.Check})
		signals <- syscall.SIGTERM
		require.Equal(t, policy.Signaled(15), (<-b.done).Reason)
		require.Equal(t, []string{"leave: received SIGTERM"}, b.said())
	})
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

func TestBarIsSaidOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, seen := newBare(), &observed{}
		b.cfg.Observers, b.cfg.StayWhenBarred = []func(Event){seen.event}, true
		bar := Directive{Kind: job.Bar, Cause: because(job.CauseOperator, "disk full")}
		b.begin(t, bar, bar, Directive{Kind: job.Bar, Cause: because(job.CauseCheck, "node-x: slow")},
			Directive{Kind: job.Wait}, bar)
		require.Equal(t, []string{"barred operator: disk full", "barred check: node-x: slow", "barred operator: disk full"},
			seen.read())
		require.Equal(t, 3, strings.Count(b.log.String(), "this node gets no workers"))
		require.Equal(t, 1, strings.Count(b.log.String(), "it stays, because other nodes depend on it"))
		b.tell(Directive{Kind: job.Done})
		<-b.done
	})
}

// A check that has not passed ends the launcher, whoever has found out, and its last words say which and why.
func TestBarredLauncherLeaves(t *testing.T) {
	for name, tt := range map[string]struct {
		parts []Part
		told  []Directive
		why   string
		said  []string
	}{
		"its own check": {
			[]Part{says("speed", CheckResult{Reason: "GPU 3 is slow"}, nil)},
			[]Directive{{Kind: job.Check}, {Kind: job.Bar, Cause: because(job.CauseCheck, "speed: GPU 3 is slow")}},
			"speed: GPU 3 is slow", []string{"barred: speed: GPU 3 is slow", "leave: its check has not passed"}},
		"somebody else": {
			[]Part{{Name: "net", Check: func(ctx context.Context, _ CheckRequest) (CheckResult, error) {
				<-ctx.Done()
				return CheckResult{}, nil
			}}},
			[]Directive{{Kind: job.Check}, {Kind: job.Bar, Cause: because(job.CauseCheck, "it does not take part")}},
			"it does not take part", []string{"leave: its check has not passed"}},
	} {
		bubble(t, name, func(t *testing.T) {
			b, seen := newBare(tt.parts...), &observed{}
			b.cfg.Observers = []func(Event){seen.event}
			b.begin(t, tt.told...)
			res := <-b.done
			require.Equal(t, policy.NodeCheckFailed, res.Reason)
			want := "this node has not passed its check and is left out of the job: " + tt.why
			require.EqualError(t, res.Err, want)
			require.Equal(t, want, res.Verdict)
			require.Equal(t, tt.said, b.said())
			require.Contains(t, seen.read(), "barred check: "+tt.why)
		})
	}
}

// A launcher on which others depend ends with the job: with its check as the reason if that has failed.
func TestBarredLauncherThatStays(t *testing.T) {
	for kind, want := range map[job.Kind]policy.Reason{job.Done: policy.Success, job.Fail: policy.NodeCheckFailed} {
		bubble(t, string(kind), func(t *testing.T) {
			b := newBare(says("speed", CheckResult{Reason: "GPU 3 is slow"}, nil))
			b.cfg.StayWhenBarred = true
			b.begin(t, Directive{Kind: job.Check},
				Directive{Kind: job.Bar, Cause: because(job.CauseCheck, "speed: GPU 3 is slow")})
			require.Contains(t, b.log.String(), "it stays")
			b.tell(Directive{Kind: kind, Cause: because(job.CauseCheck, "too few")})
			res := <-b.done
			require.Equal(t, want, res.Reason)
			require.Equal(t, kind == job.Fail, strings.Contains(res.Verdict, "speed: GPU 3 is slow"))
			require.NoError(t, res.Err)
		})
	}
}

// joinsOnly is a rendezvous that tells a node that joins again nothing.
type joinsOnly struct {
	*bare
	err error // of a doubt
}

func (b *joinsOnly) Doubt(ctx context.Context, reason string) error {
	return cmp.Or(b.bare.Doubt(ctx, reason), b.err)
}

func (b *joinsOnly) Rejoin(context.Context, Directive, []verdict.Failure) error {
	defer b.note("rejoin")()
	return nil
}

// A doubt is reported before the node joins again, and does not hold up the join.
func TestDoubts(t *testing.T) {
	says := func(why string) Doubter { return Doubter{"nic", func(context.Context) string { return why }} }
	hangs := Doubter{"nic", func(ctx context.Context) string { <-ctx.Done(); time.Sleep(time.Minute); return "late" }}
	for name, tt := range map[string]struct {
		doubter Doubter
		want    []string
	}{
		"nobody":   {Doubter{}, []string{"rejoin"}},
		"none":     {says(" "), []string{"rejoin"}},
		"one":      {says("eth0:\n down"), []string{"doubt: nic: eth0: down", "rejoin"}},
		"too late": {hangs, []string{"rejoin"}},
	} {
		bubble(t, name, func(t *testing.T) {
			b := newBare()
			b.cfg.Doubter = tt.doubter
			b.cfg.Rendezvous = &joinsOnly{b, nil}
			b.begin(t, Directive{Kind: job.Stop, EpochID: job.EpochID{Round: 1}})
			time.Sleep(doubtTime + partGrace)
			synctest.Wait()
			require.Equal(t, tt.want, b.said())
			b.tell(Directive{Kind: job.Done})
			<-b.done
			time.Sleep(time.Minute) // what was left behind ends
		})
	}
}

// A rendezvous that cannot be told of a doubt ends the launcher as one that cannot be joined does.
func TestDoubtThatCannotBeTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBare()
		b.cfg.Doubter = Doubter{"nic", func(context.Context) string { return "down" }}
		b.cfg.Rendezvous = &joinsOnly{b, errors.New("gone")}
		b.begin(t, Directive{Kind: job.Stop, EpochID: job.EpochID{Round: 1}})
		require.EqualError(t, (<-b.done).Err, "rejoin: gone")
	})
}

// The others of a run that ends by checks say so.
func TestJobThatEndsByChecks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBare()
		b.begin(t, Directive{Kind: job.Fail, Cause: because(job.CauseCheck, "too few; node-y is barred: slow")})
		res := <-b.done
		require.Equal(t, policy.TooFewPassed, res.Reason)
		require.Equal(t, "too few; node-y is barred: slow", res.Verdict)
	})
}

// gated is a fakeRdzv that bars its node first and gives it workers once it is cleared.
type gated struct{ *fakeRdzv }

func (g *gated) Cleared(context.Context, CheckResult) error {
	defer g.note("cleared")()
	g.tell(job.Lead, "")
	return nil
}

func TestBarredNodeThatPassesGetsWorkers(t *testing.T) {
	r := newRig(t, `exit 0`, 0)
	lead := <-r.fakeRdzv.dirs
	require.Equal(t, job.Lead, lead.Kind)
	r.fakeRdzv.dirs <- Directive{Kind: job.Bar, Cause: because(job.CauseCheck, "node-x: slow")}
	r.fakeRdzv.dirs <- Directive{Kind: job.Check}
	r.cfg.StayWhenBarred = true
	r.cfg.Rendezvous, r.cfg.Parts = &gated{r.fakeRdzv}, []Part{says("speed", CheckResult{Passed: true}, nil)}
	require.Equal(t, Result{Reason: policy.Success}, r.run(t))
	require.Equal(t, []string{"cleared", "ready", "success", "leave: done"}, r.fakeRdzv.said())
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

func TestReasonsOfFailure(t *testing.T) {
	fail := func(kind job.CauseKind) Directive {
		return Directive{Kind: job.Fail, Cause: because(kind, "because")}
	}
	bar := Directive{Kind: job.Bar, Cause: because(job.CauseCheck, "node-x: slow")}
	for name, tt := range map[string]struct {
		told    []Directive
		parts   []Part
		want    policy.Reason
		verdict string
	}{
		"timeout":   {[]Directive{fail(job.CauseTimeout)}, nil, policy.RendezvousTimeout, "because"},
		"check":     {[]Directive{fail(job.CauseCheck)}, nil, policy.TooFewPassed, "because"},
		"hang":      {[]Directive{fail(job.CauseHang)}, nil, policy.Hung, "because"},
		"deadline":  {[]Directive{fail(job.CauseDeadline)}, nil, policy.Deadline, "because"},
		"no step":   {[]Directive{fail(job.CauseNoStep)}, nil, policy.NoFirstStep, "because"},
		"operator":  {[]Directive{fail(job.CauseOperator)}, nil, policy.OperatorStop, "because"},
		"elsewhere": {[]Directive{fail("worker-failure")}, nil, policy.RendezvousClosed, "because"},
		"barred by a check": {[]Directive{bar, fail(job.CauseCheck)}, nil, policy.NodeCheckFailed,
			"because; this node had not passed its check: node-x: slow"},
		"barred by an operator": {[]Directive{{Kind: job.Bar, Cause: because(job.CauseOperator, "")}, fail(job.CauseHang)},
			nil, policy.Hung, "because"},
		"not barred any more": {[]Directive{bar, {Kind: job.Wait}, fail(job.CauseHang)}, nil, policy.Hung, "because"},
		"passed after a bar":  {[]Directive{bar, {Kind: job.Check}, fail(job.CauseHang)}, nil, policy.Hung, "because"},
		"own check": {[]Directive{{Kind: job.Check}, bar, fail(job.CauseOperator)},
			[]Part{says("speed", CheckResult{Reason: "slow"}, nil)}, policy.NodeCheckFailed,
			"because; this node had not passed its check: speed: slow"},
		"the cause says it": {[]Directive{bar,
			{Kind: job.Fail, Cause: because(job.CauseCheck, "of 2 nodes 1 passed: node-x: slow")}}, nil, policy.NodeCheckFailed,
			"of 2 nodes 1 passed: node-x: slow"},
	} {
		bubble(t, name, func(t *testing.T) {
			b := newBare(tt.parts...)
			b.cfg.StayWhenBarred = true
			b.begin(t, tt.told...)
			res := <-b.done
			require.Equal(t, tt.want, res.Reason)
			require.Equal(t, tt.verdict, res.Verdict)
		})
	}
}

// An order's cause counts for more than what the workers did when they were stopped; a loss counts for nothing then.
func TestOrderExplainsTheEndOfAJob(t *testing.T) {
	v := verdict.Judge(verdict.Evidence{Failures: []verdict.Failure{{Rank: 1, ExitCode: 1, PID: 7}}})
	res := outcome{cause: because(job.CauseOperator, "alice: wrong data"), verdict: v}.result()
	require.Equal(t, policy.OperatorStop, res.Reason)
	require.Equal(t, "alice: wrong data", res.Verdict)
	require.Contains(t, outcome{cause: because(job.CauseHang, ""), verdict: v}.result().Verdict, "rank 1",
		"an order that does not say why")
	require.Contains(t, outcome{cause: because("worker-failure", "c"), verdict: v}.result().Verdict, "rank 1")
	v = verdict.Judge(verdict.Evidence{Losses: []verdict.Loss{{}}})
	require.Equal(t, policy.Hung, outcome{cause: job.Cause{Kind: job.CauseHang}, verdict: v}.reason())
}

// What ended the job decides the blame; what the workers of this node did decides whose it is.
func TestBlameOfFailure(t *testing.T) {
	failure := func(rank, second int, f verdict.Failure) verdict.Failure {
		f.Rank, f.PID, f.At = rank, 7, time.Unix(int64(second), 0)
		if f.ExitCode == 0 {
			f.ExitCode = 1
		}
		return f
	}
	xid := verdict.Failure{LastLines: "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus."}
	oom := verdict.Failure{ExitCode: -9, OOM: &verdict.OOM{}}
	stoppedOOM := oom
	stoppedOOM.Stopped = true
	plain := verdict.Failure{LastLines: "the data set is empty"}
	type failures = []verdict.Failure
	for name, tt := range map[string]struct {
		own, others failures
		kind        job.CauseKind
		want        policy.Blame
	}{
		"hardware here": {failures{failure(0, 1, xid)}, nil, job.CauseFailure, policy.OwnHardware},
		"hardware here, others fail": {failures{failure(0, 1, xid)}, failures{failure(1, 2, plain)}, job.CauseFailure,
			policy.OwnHardware},
		"hardware elsewhere": {nil, failures{failure(1, 1, xid)}, job.CauseFailure, policy.OtherHardware},
		"hardware elsewhere, and a consequence here": {failures{failure(0, 2, plain)}, failures{failure(1, 1, xid)},
			job.CauseBudget, policy.OtherHardware},
		"hardware here, after that of another": {failures{failure(0, 2, xid)}, failures{failure(1, 1, xid)}, job.CauseFailure,
			policy.OwnHardware},
		"hardware here, after a program": {failures{failure(0, 2, xid)}, failures{failure(1, 1, plain)}, job.CauseFailure,
			policy.Nobody},
		"memory here":      {failures{failure(0, 1, oom)}, nil, job.CauseFailure, policy.OwnMemory},
		"memory elsewhere": {nil, failures{failure(1, 1, oom)}, job.CauseFailure, policy.Nobody},
		"memory elsewhere, and a stopped worker here": {failures{failure(0, 2, stoppedOOM)}, failures{failure(1, 1, oom)},
			job.CauseFailure, policy.Nobody},
		"a program":          {failures{failure(0, 1, plain)}, nil, job.CauseFailure, policy.Nobody},
		"an order":           {failures{failure(0, 1, xid)}, nil, job.CauseOperator, policy.Nobody},
		"a hang":             {failures{failure(0, 1, xid)}, nil, job.CauseHang, policy.Nobody},
		"too few came again": {failures{failure(0, 1, xid)}, nil, job.CauseTimeout, policy.Nobody},
		"nothing known":      {nil, nil, job.CauseFailure, policy.Nobody},
	} {
		t.Run(name, func(t *testing.T) {
			v := verdict.Judge(verdict.Evidence{Failures: slices.Concat(tt.own, tt.others)})
			require.Equal(t, tt.want, outcome{cause: because(tt.kind, "c"), verdict: v, local: tt.own}.result().Blame)
		})
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

// mapped is an agent that needs the world, with a diary of its starts.
func mapped() (*bare, *diary) {
	d := &diary{}
	b := newBare(Part{Name: "mapped", Start: func(r *StartRequest) { d.write("start with %d nodes", len(r.World)) }})
	b.cfg.NeedsWorld = true
	return b, d
}

func TestWorldThatCannotBeFetchedFailsTheEpoch(t *testing.T) {
	good := []job.Member{{GroupRank: 0, Slots: 4}, {GroupRank: 1, Node: "b", RankBase: 4, Slots: 2}}
	spoil := func(f func(ms []job.Member)) []job.Member {
		ms := slices.Clone(good)
		f(ms)
		return ms
	}
	for name, tt := range map[string]struct {
		world []job.Member
		err   error
		want  string
	}{
		"an error":      {nil, errors.New("gone"), "gone"},
		"another size":  {good[:1], nil, "it has 1 nodes instead of 2: another world has been sealed meanwhile"},
		"another order": {spoil(func(ms []job.Member) { ms[0].GroupRank = 1 }), nil, "its node 0 () has rank 1"},
		"another base": {spoil(func(ms []job.Member) { ms[1].RankBase = 2 }), nil,
			"its node 1 (b) has rank 1 and 2 workers from rank 2 on"},
		"another node": {spoil(func(ms []job.Member) { ms[1].Slots = 3 }), nil,
			"its node 1 (b) has rank 1 and 3 workers"},
		"others may differ": {spoil(func(ms []job.Member) { ms[0].Slots, ms[0].RankBase = 9, 9 }), nil, ""},
	} {
		bubble(t, name, func(t *testing.T) {
			e := Epoch{Directive: Directive{Place: job.Place{GroupRank: 1, GroupWorldSize: 2, RankBase: 4}}, World: tt.world}
			if tt.want == "" {
				require.NoError(t, e.checkWorld(2))
				return
			}
			b, p := mapped()
			b.world, b.worldErr, b.max = tt.world, tt.err, 1
			b.begin(t, Directive{Kind: job.Run, EpochID: job.EpochID{Round: 7, Epoch: 2}, Place: e.Place})
			require.Equal(t, []string{"world", "failing: restart", "rejoin", "ready", "world"}, b.said()[:5], "%s", b.log)
			require.Contains(t, b.failures[0].Message,
				"cannot fetch the world of round 7, epoch 2 from the rendezvous: "+tt.want)
			require.Equal(t, 4, b.failures[0].Rank)
			require.Empty(t, p.read(), "nothing is started")
			require.Equal(t, policy.WorkerFailed, (<-b.done).Reason)
		})
	}
}

// silent is a rendezvous that does not tell the world until ctx ends.
type silent struct{ *bare }

func (s silent) World(ctx context.Context) ([]job.Member, error) {
	<-ctx.Done()
	s.note("gave up")()
	return nil, ctx.Err()
}

func TestNewerDirectiveDropsTheFetchOfAWorld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, _ := mapped()
		b.cfg.Rendezvous = silent{b}
		run := Directive{Kind: job.Run, EpochID: job.EpochID{Round: 1}, Place: job.Place{GroupWorldSize: 1}}
		b.begin(t, run, run)
		require.Empty(t, b.said(), "a confirmation changes nothing")
		b.tell(Directive{Kind: job.Wait})
		require.Equal(t, []string{"gave up"}, b.said())
		b.tell(Directive{Kind: job.Fail, Cause: job.Cause{Text: "over"}})
		require.Equal(t, "over", (<-b.done).Verdict)
	})
}

func TestSignalEndsTheFetchOfAWorld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, _ := mapped()
		b.cfg.Rendezvous = silent{b}
		signals := make(chan os.Signal, 1)
		b.cfg.Signals, b.cfg.Terminate = signals, func(os.Signal) bool { return true }
		b.begin(t, Directive{Kind: job.Run, EpochID: job.EpochID{Round: 1}})
		signals <- syscall.SIGINT
		require.Equal(t, policy.Signaled(2), (<-b.done).Reason)
	})
}

func TestOldAnswerOfAFetchIsDropped(t *testing.T) {
	a := &Agent{}
	a.onWorld(&fetch{cancel: func() { t.Error("not ours") }})
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
