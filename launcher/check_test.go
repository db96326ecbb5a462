package launcher

import (
	"cmp"
	"context"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
)

func says(name string, res CheckResult, err error) Part {
	return Part{Name: name, Check: func(context.Context, CheckRequest) (CheckResult, error) { return res, err }}
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
