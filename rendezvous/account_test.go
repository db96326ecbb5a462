package rendezvous

import (
	"fmt"
	"math/rand"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

// unbounded is a run that restarts for ever, but for what b bounds.
func unbounded(nodes int, b Budget) Params {
	return Params{Min: nodes, Max: nodes, MaxRestarts: 1 << 30, Budget: b}
}

// crashes lets the workers of a fail at once, and returns how long the next start took; ok: there was one.
func (s *sim) crashes(id string, d Decision) (wait time.Duration, ok bool) {
	s.t.Helper()
	return s.crashesWith(Failing{Decision: d}, id)
}

func (s *sim) crashesWith(e Failing, id string) (wait time.Duration, ok bool) {
	s.t.Helper()
	run := s.runs[id]
	e.ID, e.EpochID = id, run.EpochID
	if e.Failures == nil {
		p := run.Place
		e.Failures = []job.Failure{{Rank: p.RankBase, GroupRank: p.GroupRank, Text: id + " failed", At: s.now}}
	}
	s.must(e)
	return s.restarts(id)
}

// restarts waits for the next start of the workers of a.
func (s *sim) restarts(id string) (wait time.Duration, ok bool) {
	s.t.Helper()
	failed, old := s.now, s.worked[id].EpochID
	for range 5 {
		s.obey()
		if s.worked[id].EpochID != old {
			return s.now.Sub(failed), true
		}
		next := s.r.Next()
		if s.dirs[id].Kind == job.Fail || next.IsZero() {
			return 0, false
		}
		s.pass(max(0, next.Sub(s.now)))
	}
	return 0, false
}

// runsFor lets the workers run.
func (s *sim) runsFor(d time.Duration) { s.pass(d) }

func (s *sim) why() string {
	if c := s.r.Status().Cause; c != nil {
		return string(c.Kind) + ": " + c.Text
	}
	return ""
}

func TestBackoffGrowsAndEndsWithProgress(t *testing.T) {
	s := newSim(t, unbounded(1, Budget{BackoffLimit: -1, SameFailures: -1, BackoffMin: 10 * time.Millisecond,
		BackoffMax: time.Second}))
	s.join("a")
	s.obey()
	want := time.Duration(0)
	for i := range 12 {
		wait, ok := s.crashes("a", RestartFree)
		require.True(t, ok)
		require.LessOrEqual(t, wait, want, i)
		require.GreaterOrEqual(t, wait, want-want/4, i)
		require.Equal(t, i+1, s.r.Status().Budget.Streak)
		want = min(max(2*want, 10*time.Millisecond), time.Second)
	}
	s.runsFor(longEpoch)
	wait, _ := s.crashes("a", RestartFree)
	require.Zero(t, wait, "an epoch of ten minutes is progress")
	_, _ = s.crashes("a", RestartFree)
	wait, _ = s.crashesWith(Failing{Progress: job.Progress{Step: 1, Stepping: true}}, "a")
	require.Zero(t, wait, "so is a step, if nothing is known of checkpoints")
	_, _ = s.crashes("a", RestartFree)
	_, _ = s.crashesWith(Failing{Progress: job.Progress{Checkpoint: 7, Saving: true}}, "a")
	for range 2 {
		wait, _ = s.crashesWith(Failing{Progress: job.Progress{Checkpoint: 7, Saving: true, Step: 1, Stepping: true}}, "a")
	}
	require.NotZero(t, wait, "steps count from the checkpoint, and there have been as many")
	wait, _ = s.crashesWith(Failing{Progress: job.Progress{Checkpoint: 8, Saving: true}}, "a")
	require.Zero(t, wait)
	require.Equal(t, 1, s.r.Status().Budget.Streak)
}

// Where steps are unknown, workers that have run for a while count as having made some.
func TestLateFailuresAreNotCountedAsAlike(t *testing.T) {
	s := newSim(t, unbounded(1, Budget{SameFailures: 2}))
	s.join("a")
	s.obey()
	for range 5 {
		s.runsFor(earlyEpoch)
		_, ok := s.crashes("a", RestartCharged)
		require.True(t, ok)
	}
	s.runsFor(earlyEpoch - time.Second)
	_, ok := s.crashes("a", RestartCharged)
	require.True(t, ok)
	_, ok = s.crashes("a", RestartCharged)
	require.False(t, ok)
}

// TestBackoffCountsFromTheFailure: what workers take to stop is part of it.
func TestBackoffCountsFromTheFailure(t *testing.T) {
	s := newSim(t, unbounded(2, Budget{BackoffMin: time.Second, BackoffMax: time.Second, BackoffLimit: -1}))
	s.join("a", "b")
	s.obey()
	_, _ = s.crashes("a", RestartCharged)
	s.fail("a", RestartCharged)
	require.Contains(t, s.log[len(s.log)-1].Text, "1 restarts in a row have brought no progress; the next start waits ")
	s.obeyOne("a")
	s.pass(2 * time.Second)
	s.obeyOne("b")
	s.obey()
	require.Equal(t, 2, s.r.Status().Budget.Streak)
	require.Equal(t, 2, s.r.account.restarts)
	require.Len(t, s.runs, 2, "it was over when b had stopped")
	require.Zero(t, s.r.account.backoffAt)
}

func TestWhoComesOrGoesIsNotCharged(t *testing.T) {
	b := Budget{BackoffMin: time.Minute, BackoffMax: time.Minute, BackoffLimit: 1, SameFailures: 2, NoProgress: 1}
	b.Windows[0] = Window{windowJob, 1, time.Hour}
	p := unbounded(2, b)
	p.Min = 1
	s := newSim(t, p)
	s.join("a", "b")
	s.obey()
	_, ok := s.crashes("a", RestartCharged)
	require.True(t, ok)
	before := s.r.account.spent
	before.Same, before.Alike = 0, "" // a node loss ends the row
	for i := range 5 {
		s.vanish("b")
		s.fail("a", RestartCharged)
		s.pass(brokenGraceFailing)
		s.obey()
		require.Equal(t, 1, s.runs["a"].Place.GroupWorldSize, "nobody waits because of a node that has died")
		delete(s.gone, "b")
		s.must(Join{Node: Node{ID: fmt.Sprint("b", i), Name: "b", Rank: -1, Slots: 2}, Params: s.p})
		s.pass(defaultGrowthDelay)
		s.obey()
		require.Equal(t, 2, s.runs["a"].Place.GroupWorldSize)
		s.must(Leave{ID: fmt.Sprint("b", i)})
		delete(s.dirs, fmt.Sprint("b", i))
		delete(s.runs, fmt.Sprint("b", i))
		s.obey()
		s.join("b")
		s.pass(defaultGrowthDelay)
		s.obey()
		require.Equal(t, before, s.r.account.spent)
		require.Equal(t, 1, s.r.account.restarts)
	}
	s.must(Order{Kind: OrderRestart})
	wait, ok := s.restarts("a")
	require.True(t, ok)
	require.Zero(t, wait, "an operator's order costs nothing either")
	require.Equal(t, before, s.r.account.spent)
	s.must(Order{Kind: OrderRestart, Cause: job.CauseHang, Charge: true})
	_, ok = s.restarts("a")
	require.False(t, ok)
}

func TestEveryBoundEndsTheRunWithItsReason(t *testing.T) {
	none := Budget{BackoffMax: -1, BackoffLimit: -1, SameFailures: -1}
	with := func(change func(*Budget)) Budget {
		b := none
		change(&b)
		return b
	}
	noStep := func(text string) Failing {
		return Failing{Progress: job.Progress{Stepping: true}, Failures: []job.Failure{{Rank: 3, Text: text}}}
	}
	alike := func(text string) Failing {
		f := noStep(text)
		f.Failures[0].Fingerprint = "no module named y"
		return f
	}
	for name, c := range map[string]struct {
		b      Budget
		events []Failing
		starts int
		why    string
	}{
		"limit": {with(func(b *Budget) { b.BackoffLimit = 3 }), []Failing{{Decision: RestartFree}}, 3,
			"budget: 3 restarts in a row have brought no progress (--backoff-limit)"},
		"no limit": {none, []Failing{{}}, 200, ""},
		"sum": {with(func(b *Budget) { b.BackoffLimit, b.Sum = 3, true }), []Failing{{Decision: RestartFree,
			Progress: job.Progress{Step: 30, Stepping: true, Checkpoint: 7, Saving: true}}, {Decision: RestartCharged}}, 3,
			"budget: 3 restarts of the job, whether they have brought progress or not (--backoff-limit)"},
		"no sum": {with(func(b *Budget) { b.Sum = true }), []Failing{{}}, 200, ""},
		"no progress": {with(func(b *Budget) { b.NoProgress = 2 }),
			[]Failing{{Progress: job.Progress{Step: 5, Stepping: true}}}, 2,
			"budget: 2 restarts in a row have brought neither a newer checkpoint nor more steps (--no-progress)"},
		"more steps": {with(func(b *Budget) { b.NoProgress = 1 }), []Failing{
			{Progress: job.Progress{Step: 5, Stepping: true}},
			{Progress: job.Progress{Step: 6, Stepping: true}}, {Progress: job.Progress{Step: 7, Stepping: true}}, {}}, 3,
			"budget: 1 restarts in a row have brought neither a newer checkpoint nor more steps (--no-progress)"},
		"alike": {with(func(b *Budget) { b.SameFailures = 3 }),
			[]Failing{alike("rank 1 (node 0 x) failed: no module named y, pid 12345"),
				alike("rank 0 (node 0 x) says: no module named y, pid 9876")}, 2,
			"budget: workers have failed 3 times in a row before their first step (--same-failures): rank 1 (node 0 x) " +
				"failed: no module named y, pid 12345"},
		"not alike": {with(func(b *Budget) { b.SameFailures = 2 }),
			[]Failing{noStep("code 1"), noStep("code 2")}, 200, ""},
		"after a step": {with(func(b *Budget) { b.SameFailures = 2 }), []Failing{noStep("x"), {}}, 200, ""},
		"at once, steps unknown": {with(func(b *Budget) { b.SameFailures = 2 }),
			[]Failing{{Failures: []job.Failure{{Text: "x"}}}}, 1,
			"budget: workers have failed 2 times in a row before their first step (--same-failures): x"},
		"after a checkpoint, steps unknown": {with(func(b *Budget) { b.SameFailures = 2 }),
			[]Failing{{Progress: job.Progress{Saving: true, Checkpoint: 1}},
				{Progress: job.Progress{Saving: true, Checkpoint: 2}},
				{Progress: job.Progress{Saving: true, Checkpoint: 3}}, {}}, 4,
			"budget: workers have failed 2 times in a row before their first step (--same-failures): a failed"},
		"window": {with(func(b *Budget) { b.Windows[1] = Window{windowJob, 4, time.Hour} }), []Failing{{}}, 4,
			"budget: 4 restarts of the job within 1h (--restart-window)"},
		"window of a rank": {with(func(b *Budget) { b.Windows[0] = Window{windowRank, 2, time.Minute} }),
			[]Failing{noStep("x"), {}}, 4, "budget: 2 restarts of rank 3 within 1m (--restart-window)"},
		"window of a node": {with(func(b *Budget) { b.Windows[3] = Window{windowNode, 2, time.Minute} }),
			[]Failing{{}}, 2, "budget: 2 restarts of node a within 1m (--restart-window)"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, unbounded(1, c.b))
			s.join("a")
			s.obey()
			starts := 0
			for i := range 200 {
				if _, ok := s.crashesWith(c.events[i%len(c.events)], "a"); !ok {
					break
				}
				starts++
			}
			require.Equal(t, c.starts, starts)
			if c.why != "" {
				require.Equal(t, c.why, s.why())
			}
		})
	}
}

func TestWindowsForget(t *testing.T) {
	b := Budget{BackoffMax: -1, BackoffLimit: -1}
	b.Windows[0] = Window{windowJob, 2, time.Hour}
	s := newSim(t, unbounded(1, b))
	s.join("a")
	s.obey()
	for range 50 {
		_, ok := s.crashes("a", RestartCharged)
		require.True(t, ok)
		s.runsFor(30 * time.Minute)
	}
	require.LessOrEqual(t, len(s.r.account.spent.Recent), 2)
}

// TestTheSumIsOfAllReplicas: each restart counts once, whoever's failure has led to it; nodes that come and go do not.
func TestTheSumIsOfAllReplicas(t *testing.T) {
	p := unbounded(2, Budget{BackoffMax: -1, BackoffLimit: 2, Sum: true})
	p.Min = 1
	s := newSim(t, p)
	s.join("a", "b")
	s.obey()
	_, ok := s.crashes("a", RestartFree)
	require.True(t, ok)
	s.must(Leave{ID: "b"})
	s.obey()
	require.Equal(t, 1, s.r.Status().Budget.Sum)
	s.join("c")
	s.pass(defaultGrowthDelay)
	s.obey()
	require.Contains(t, s.runs, "c")
	s.runsFor(longEpoch)
	_, ok = s.crashes("c", RestartCharged)
	require.True(t, ok)
	require.Equal(t, 2, s.runs["a"].Spent.Sum)
	s.runsFor(longEpoch)
	_, ok = s.crashes("a", RestartFree)
	require.False(t, ok)
	require.Contains(t, s.why(), "2 restarts of the job, whether")
}

// Successes that are started anew count, too, and the last of them is the run's.
func TestTheSumBoundsAlways(t *testing.T) {
	p := unbounded(1, Budget{BackoffMax: -1, BackoffLimit: 2, Sum: true})
	p.Always = true
	s := newSim(t, p)
	s.join("a")
	s.obey()
	for i := range 3 {
		require.Equal(t, i, s.r.account.spent.Sum)
		s.must(Success{ID: "a", EpochID: s.runs["a"].EpochID})
		s.obey()
	}
	require.Equal(t, job.Succeeded, s.r.epoch.outcome)
}

func TestASuccessCountsForItsEpochAlone(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 1, Always: true,
		Budget: Budget{BackoffMax: -1, Success: SuccessRank0}})
	s.join("a", "b")
	s.obey()
	s.must(Success{ID: "a", EpochID: s.runs["a"].EpochID, Ranks: []int{0}})
	s.obey()
	require.Equal(t, 1, s.runs["a"].Place.RestartCount)
	s.must(Success{ID: "b", EpochID: s.runs["b"].EpochID, Ranks: []int{2}})
	require.Equal(t, running, s.r.epoch.phase)
	s.must(Success{ID: "a", EpochID: s.runs["a"].EpochID, Ranks: []int{0}})
	require.Equal(t, job.Succeeded, s.r.epoch.outcome)
}

// TestAnotherNodesProgressSavesTheRun: it is told when that node has stopped.
func TestAnotherNodesProgressSavesTheRun(t *testing.T) {
	s := newSim(t, unbounded(2, Budget{BackoffMax: -1, BackoffLimit: 1}))
	s.join("a", "b")
	s.obey()
	_, ok := s.crashes("a", RestartCharged)
	require.True(t, ok)
	s.fail("a", RestartCharged)
	d := s.dirs["b"]
	require.Equal(t, job.Stop, d.Kind)
	delete(s.runs, "b")
	s.must(Join{Node: Node{ID: "b", Name: "b", Rank: -1, Slots: 2}, Params: s.p, Stopped: d.EpochID,
		Progress: job.Progress{Step: 9, Stepping: true}})
	s.dirs["b"] = Directive{}
	s.pass(attributionWindow)
	s.obey()
	require.Len(t, s.runs, 2)
}

func TestDeadline(t *testing.T) {
	s := newSim(t, unbounded(1, Budget{BackoffMax: -1, BackoffLimit: -1, Deadline: time.Hour}))
	s.join("a")
	s.obey()
	s.runsFor(30 * time.Minute)
	_, _ = s.crashes("a", RestartCharged)
	s.must(Order{Kind: OrderPause})
	s.obey()
	s.pass(3 * time.Hour)
	require.Equal(t, job.Wait, s.dirs["a"].Kind, "a pause does not count")
	s.must(Order{Kind: OrderResume})
	s.obey()
	s.runsFor(29 * time.Minute)
	require.Equal(t, job.Run, s.dirs["a"].Kind)
	require.Equal(t, s.now.Add(time.Minute), s.r.Status().Budget.Deadline)
	require.Equal(t, s.now.Add(time.Minute), s.r.Next())
	s.runsFor(time.Minute)
	require.Equal(t, job.Fail, s.dirs["a"].Kind)
	require.Equal(t, "deadline: the job has taken longer than 1h (--deadline)", s.why())
	s.runsFor(time.Minute)
	require.Len(t, s.notes(job.Event(job.Failed)), 1, "it ends once")
}

// The time of a run that is held from its start begins with its workers.
func TestDeadlineOfAHeldRun(t *testing.T) {
	p := unbounded(1, Budget{BackoffMax: -1, Deadline: time.Hour})
	p.Hold = true
	s := held(t, p, "a")
	s.runsFor(2 * time.Hour)
	require.Equal(t, running, s.r.epoch.phase)
	require.Zero(t, s.r.Status().Budget.Deadline)
}

func TestStartDeadline(t *testing.T) {
	b := Budget{BackoffMax: -1, BackoffLimit: -1, StartDeadline: time.Minute}
	begin := func() *sim {
		s := newSim(t, unbounded(2, b))
		s.join("a", "b")
		s.obey()
		s.runsFor(time.Minute - 1)
		return s
	}
	s := begin()
	s.must(Stepped{ID: "b", EpochID: job.EpochID{}}) // of another epoch
	s.runsFor(1)
	require.Equal(t, "no-first-step: no worker has made a step within 1m of its start (--start-deadline)", s.why())
	s = begin()
	require.ErrorIs(t, s.step(Stepped{ID: "x", EpochID: s.runs["a"].EpochID}), ErrUnknownNode)
	s.must(Stepped{ID: "b", EpochID: s.runs["a"].EpochID})
	s.runsFor(time.Hour)
	require.Equal(t, job.Run, s.dirs["a"].Kind)
	_, _ = s.crashes("a", RestartCharged)
	s.runsFor(time.Minute)
	require.Equal(t, job.Fail, s.dirs["a"].Kind, "each start has its own")
	s = begin()
	s.succeed("a")
	s.runsFor(time.Hour)
	require.Equal(t, job.Run, s.dirs["b"].Kind, "some workers end without a step")
}

// What an earlier daemon has told of what is spent is told on, if it is one thing alone.
func TestEachThingThatIsSpentIsTold(t *testing.T) {
	at := time.Unix(900, 0).UTC()
	for name, spent := range map[string]Spent{
		"the deadline": {Since: at}, "a streak": {Streak: 1}, "fruitless": {Fruitless: 1}, "same": {Same: 1, Alike: "x"},
		"sum":      {Sum: 1},
		"the best": {Best: job.Progress{Step: 1}}, "recent": {Recent: []restarted{{At: at, Rank: 1}}},
		"held": {Held: true, PausedAt: at}, "a pause": {Since: at, PausedAt: at},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, Params{Min: 2, Max: 2})
			e := Join{Node: Node{ID: "a", Name: "a", Rank: -1, Slots: 1}, Params: s.p, Seen: job.EpochID{Term: 1, Round: 1}}
			e.Spent = &spent
			if !spent.PausedAt.IsZero() {
				e.Paused = &job.Cause{Kind: job.CauseFailure, Text: "b failed"}
			}
			s.must(e)
			require.Equal(t, &spent, s.dirs["a"].Spent)
		})
	}
	s := newSim(t, Params{Min: 2, Max: 2})
	s.join("a")
	require.Contains(t, s.dirs, "a")
	require.Nil(t, s.dirs["a"].Spent)
}

func TestSuccessRules(t *testing.T) {
	for _, c := range []struct {
		rule   SuccessRule
		before []Success // by node
		enough Success
	}{
		{SuccessAll, []Success{{ID: "a"}, {ID: "b", Ranks: []int{2}}}, Success{ID: "b"}},
		{SuccessRank0, []Success{{ID: "b"}, {ID: "a", Ranks: []int{1}}}, Success{ID: "a", Ranks: []int{0}}},
		{SuccessRank0, nil, Success{ID: "a"}},
		{SuccessNode0, []Success{{ID: "b"}, {ID: "a", Ranks: []int{0}}}, Success{ID: "a"}},
		{SuccessNode0, nil, Success{ID: "a"}},
		{SuccessAny, nil, Success{ID: "b", Ranks: []int{3}}},
		{SuccessAny, nil, Success{ID: "b"}},
	} {
		s := newSim(t, unbounded(2, Budget{Success: c.rule}))
		s.join("a", "b")
		s.obey()
		tell := func(e Success) { e.EpochID = s.runs[e.ID].EpochID; s.must(e) }
		for _, e := range c.before {
			tell(e)
			require.Empty(t, s.r.Status().Outcome, c)
		}
		tell(c.enough)
		require.Equal(t, string(job.Succeeded), s.r.Status().Outcome, c)
		require.Equal(t, job.Done, s.dirs["a"].Kind)
		require.Equal(t, job.Done, s.dirs["b"].Kind)
	}
}

// What serves the workers of others has no success of its own, and rank 0 is on the first node that has workers.
func TestSuccessBesideNodesWithoutWorkers(t *testing.T) {
	for _, c := range []struct {
		rule   SuccessRule
		before []string
		enough string
	}{
		{SuccessAll, []string{"b"}, "c"}, {SuccessRank0, []string{"c"}, "b"}, {SuccessNode0, []string{"c"}, "b"},
		{SuccessAny, nil, "c"},
	} {
		s := newSim(t, unbounded(3, Budget{Success: c.rule}))
		for i, id := range []string{"scheduler", "b", "c"} {
			s.joinNode(Node{ID: id, Name: id, Rank: i, Slots: min(i, 1) * 2})
		}
		s.obey()
		require.Equal(t, job.Place{GroupRank: 0, GroupWorldSize: 3, WorldSize: 4}, unplaced(s.runs["scheduler"].Place))
		require.Equal(t, job.Place{GroupRank: 1, GroupWorldSize: 3, WorldSize: 4}, unplaced(s.runs["b"].Place))
		require.Equal(t, job.Place{GroupRank: 2, GroupWorldSize: 3, RankBase: 2, WorldSize: 4}, unplaced(s.runs["c"].Place))
		s.succeed(c.before...)
		require.Empty(t, s.r.Status().Outcome, c)
		s.succeed(c.enough)
		require.Equal(t, string(job.Succeeded), s.r.Status().Outcome, c)
		require.Equal(t, job.Done, s.dirs["scheduler"].Kind)
	}
}

// unplaced is what a Place says of numbers.
func unplaced(p *job.Place) job.Place {
	return job.Place{GroupRank: p.GroupRank, GroupWorldSize: p.GroupWorldSize, RankBase: p.RankBase,
		WorldSize: p.WorldSize}
}

func TestARunThatWouldFailIsHeld(t *testing.T) {
	begin := func(b Budget, decision Decision) *sim {
		s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 1, Budget: b})
		s.join("a", "b")
		s.obey()
		s.fail("b", decision)
		s.pass(attributionWindow)
		s.obey()
		require.Equal(t, job.Wait, s.dirs["a"].Kind)
		require.Equal(t, &job.Cause{Kind: job.CauseFailure, Node: "b", Text: "b failed"}, s.dirs["a"].Paused)
		return s
	}
	hold := Budget{BackoffMax: -1, HoldFailed: true, HoldFor: time.Hour}
	s := begin(hold, Permanent)
	s.pass(time.Hour - 1)
	require.Empty(t, s.r.Status().Outcome)
	s.pass(1)
	require.Equal(t, job.Fail, s.dirs["a"].Kind)
	require.Equal(t, "worker-failure: b failed", s.why())

	s = begin(hold, Permanent)
	s.must(Order{Kind: OrderResume})
	s.obey()
	require.Len(t, s.runs, 2)
	require.Zero(t, s.r.account.restarts, "nobody restarts for nothing")
	s.pass(2 * time.Hour)
	require.Len(t, s.runs, 2)

	for _, s := range []*sim{begin(Budget{}, Hold), begin(Budget{HoldFailed: true}, Permanent)} {
		s.pass(1000 * time.Hour)
		require.Equal(t, job.Wait, s.dirs["b"].Kind, "until an order")
		s.must(Order{Kind: OrderStop})
		require.Equal(t, job.Fail, s.dirs["b"].Kind)
	}

	s = begin(hold, Permanent)
	s.must(Leave{ID: "a"})
	s.must(Leave{ID: "b"})
	require.Nil(t, s.r.Status().Paused, "a run that has failed is over when nobody is left")
}

func TestAHoldOutlivesTheDaemon(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1, Budget: Budget{HoldFailed: true, HoldFor: time.Hour}})
	s.join("a")
	s.obey()
	s.fail("a", Permanent)
	s.obey()
	d := s.dirs["a"]
	require.True(t, d.Spent.Held)
	next := newSim(t, s.p)
	next.must(Join{Node: Node{ID: "a", Name: "a", Slots: 1}, Params: s.p, Seen: d.EpochID, Paused: d.Paused,
		Spent: d.Spent, Stopped: d.EpochID})
	next.must(Attach{ID: "a"})
	next.pass(time.Hour)
	require.Equal(t, job.Fail, next.dirs["a"].Kind)
}

// TestADaemonWithoutMemoryLearnsWhatIsSpent: it neither forgets nor counts twice.
// Where steps or checkpoints are known, and none is new, an epoch was for nothing, however long it was.
func TestLongEpochsForNothing(t *testing.T) {
	for name, p := range map[string]job.Progress{
		"steps": {Step: 5, Stepping: true}, "checkpoints": {Checkpoint: 5, Saving: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, unbounded(1, Budget{BackoffMax: -1, BackoffLimit: -1, SameFailures: -1, NoProgress: 2}))
			s.join("a")
			s.obey()
			for i := range 3 {
				s.runsFor(longEpoch)
				_, ok := s.crashesWith(Failing{Progress: p}, "a")
				require.Equal(t, i < 2, ok)
			}
			require.Contains(t, s.why(), "2 restarts in a row have brought neither")
		})
	}
}

// Only a restart that counts waits, and one that is ordered does not.
func TestAnOrderedRestartDoesNotWait(t *testing.T) {
	b := Budget{BackoffLimit: -1, SameFailures: -1, BackoffMin: time.Second, BackoffMax: time.Second}
	s := newSim(t, unbounded(1, b))
	s.join("a")
	s.obey()
	for i := range 3 {
		_, ok := s.crashes("a", RestartCharged)
		require.True(t, ok)
		require.Len(t, s.notes(job.EventBackOff), i, "the first restart does not wait")
	}
	require.Empty(t, s.r.Status().Budget.Recent, "no window counts them")
	s.ordered(OrderRestart, "")
	require.Zero(t, s.r.Status().Budget.BackoffUntil)
	wait, ok := s.restarts("a")
	require.True(t, ok)
	require.Zero(t, wait)
}

func TestAPauseEndsTheBackOff(t *testing.T) {
	s := newSim(t, unbounded(1, Budget{BackoffMin: time.Minute, BackoffMax: time.Minute, BackoffLimit: -1}))
	s.join("a")
	s.obey()
	for range 2 { // the first restart does not wait
		s.fail("a", RestartCharged)
		s.obey()
	}
	require.Empty(t, s.runs)
	s.ordered(OrderPause, "")
	s.must(Order{Kind: OrderResume})
	s.obey()
	require.Len(t, s.runs, 1)
}

// The wait for the first step begins anew when a world is rebuilt: it may have been made without a daemon.
func TestARebuiltWorldHasAStartDeadline(t *testing.T) {
	v := world(t, unbounded(2, Budget{BackoffMax: -1, StartDeadline: time.Minute}), "a", "b").revive()
	v.comeBack("a", "b")
	v.pass(time.Minute - time.Second)
	require.Equal(t, running, v.r.epoch.phase)
	v.pass(time.Second)
	require.Equal(t, job.CauseNoStep, v.dirs["a"].Cause.Kind)
}

func TestADaemonWithoutMemoryLearnsWhatIsSpent(t *testing.T) {
	b := Budget{BackoffLimit: 5, BackoffMin: time.Second, BackoffMax: time.Minute, Deadline: 3 * time.Hour,
		SameFailures: -1}
	b.Windows[0] = Window{windowNode, 100, time.Hour}
	s := newSim(t, unbounded(2, b))
	s.join("a", "b")
	s.obey()
	for range 3 {
		_, ok := s.crashes("a", RestartFree)
		require.True(t, ok)
	}
	spent := s.r.account.spent
	require.Equal(t, 3, spent.Streak)
	require.Len(t, spent.Recent, 3)
	next := newSim(t, s.p)
	next.now = s.now.Add(time.Second)
	for _, id := range []string{"b", "a"} {
		run := s.runs[id]
		next.must(Join{
			Node: Node{ID: id, Name: id, Rank: -1, Slots: 2}, Params: s.p, Seen: run.EpochID, Restarts: run.Restarts,
			Spent: run.Spent, Resume: &Resume{EpochID: run.EpochID, Place: *run.Place},
		})
		next.worked[id], next.runs[id] = run, run
	}
	require.Equal(t, running, next.r.epoch.phase)
	require.Equal(t, spent, next.r.account.spent)
	for range 2 {
		_, ok := next.crashes("a", RestartFree)
		require.True(t, ok)
	}
	_, ok := next.crashes("a", RestartFree)
	require.False(t, ok)
	require.Contains(t, next.why(), "5 restarts in a row")

	// Who knows of the newest epoch is believed, whoever comes first.
	old, newer := Spent{Streak: 4}, Spent{Streak: -1, Same: -1, Fruitless: -1, Sum: -1, Since: next.now.Add(time.Hour),
		Held: true, Recent: make([]restarted, 99), Alike: strings.Repeat("x", 999)}
	r := New(Config{Term: 9})
	for i, e := range []Join{
		{Seen: job.EpochID{Term: 7, Round: 2, Epoch: 1}, Spent: &newer},
		{Seen: job.EpochID{Term: 7, Round: 2}, Spent: &old}, {Seen: job.EpochID{Term: 7, Round: 2, Epoch: 2}},
	} {
		e.Node, e.Params = Node{ID: fmt.Sprint(i), Name: fmt.Sprint(i), Rank: -1, Slots: 1}, Params{Min: 5, Max: 5}
		_, err := r.Step(next.now, e)
		require.NoError(t, err)
	}
	want := Spent{Since: next.now, Recent: make([]restarted, 32), Alike: strings.Repeat("x", 256)}
	require.Equal(t, want, r.account.spent)
	_, err := r.Step(next.now, Join{Node: Node{ID: "x", Name: "x", Rank: -1, Slots: 1}, Params: Params{Min: 5, Max: 5},
		Seen: job.EpochID{Term: 7, Round: 2, Epoch: 1}, Spent: &Spent{Streak: 3}})
	require.NoError(t, err)
	require.Equal(t, 3, r.account.spent.Streak, "the larger one of one epoch counts")
}

func TestElsewhereAndShrink(t *testing.T) {
	for _, can := range [][]Ability{nil, {CanLeave}} {
		for _, d := range []Decision{RestartElsewhere, Shrink} {
			p := unbounded(3, Budget{BackoffMax: -1})
			p.Min = 2
			s := newSim(t, p)
			s.can = can
			s.join("a", "b", "c")
			s.obey()
			s.fail("a", RestartCharged) // a consequence that is told first
			s.fail("b", d)
			require.Equal(t, can != nil, s.dirs["b"].Leave != nil)
			s.obey()
			require.Equal(t, 2, s.runs["a"].Place.GroupWorldSize)
			require.Equal(t, 1, s.r.account.restarts)
			require.Equal(t, 1, s.r.account.spent.Streak, "it is counted as any other restart")
			_, barred := s.r.Status().Bars["b"]
			require.Equal(t, d == RestartElsewhere || can == nil, barred)
			s.fail("c", d)
			s.obey()
			require.Equal(t, 2, s.r.account.newest.cost.rank)
			s.join("d")
			s.pass(defaultLastCall)
			s.obey()
			require.Equal(t, 2, s.runs["d"].Place.GroupWorldSize, "another node takes the place")
		}
	}
}

// A checkpoint is further than any number of steps from an older one, and steps count from it.
func TestStepsCountFromTheNewestCheckpoint(t *testing.T) {
	s := newSim(t, unbounded(1, Budget{BackoffMax: -1, BackoffLimit: -1, NoProgress: 100}))
	s.join("a")
	s.obey()
	for i, c := range []struct {
		step, checkpoint int64
		fruitless        int
	}{
		{100, 5, 1}, {3, 6, 1}, {4, 6, 1}, {4, 6, 2}, {9, 5, 1}, {8, 6, 2}, {10, 6, 1},
	} {
		p := job.Progress{Step: c.step, Stepping: true, Checkpoint: c.checkpoint, Saving: true}
		_, ok := s.crashesWith(Failing{Decision: RestartCharged, Progress: p}, "a")
		require.True(t, ok)
		require.Equal(t, c.fruitless, s.r.Status().Budget.Fruitless, i)
	}
}

func TestTolerate(t *testing.T) {
	begin := func() *sim {
		s := newSim(t, unbounded(2, Budget{BackoffMax: -1, Tolerate: true}))
		s.join("a", "b")
		s.obey()
		return s
	}
	fails := func(s *sim, id string, left int) {
		s.must(Failing{ID: id, EpochID: s.runs[id].EpochID, Decision: RestartCharged, Tolerated: true, Left: left,
			Failures: []job.Failure{{Rank: left, Text: id + " has failed"}}})
	}
	s := begin()
	fails(s, "a", 1)
	require.Equal(t, job.EventRankFailed, s.log[len(s.log)-1].Event)
	require.Equal(t, job.Run, s.dirs["b"].Kind)
	fails(s, "a", 0)
	require.Equal(t, job.Run, s.dirs["b"].Kind, "b runs on")
	s.succeed("b")
	require.Equal(t, string(job.Succeeded), s.r.Status().Outcome)

	s = begin()
	fails(s, "a", 0)
	fails(s, "b", 0)
	require.Equal(t, job.Stop, s.dirs["a"].Kind, "nobody is left")
	require.Equal(t, "a has failed", s.dirs["a"].Cause.Text)
	s.obey()
	require.Equal(t, 1, s.r.account.restarts)
	s.fail("a", RestartCharged) // such as for a hang
	require.Equal(t, job.Stop, s.dirs["b"].Kind)
	s.obey()
	require.Equal(t, 2, s.r.account.restarts)

	s = begin()
	fails(s, "a", 1)
	fails(s, "b", 0)
	require.Equal(t, job.Run, s.dirs["a"].Kind, "another worker of a runs on")
	fails(s, "a", 0)
	require.Equal(t, job.Stop, s.dirs["a"].Kind)
	s.obey()

	// A daemon that was started again hears of the failure, too.
	next := newSim(t, s.p)
	for _, id := range []string{"a", "b"} {
		run := s.runs[id]
		e := Resume{EpochID: run.EpochID, Place: *run.Place, Done: id == "b"}
		if id == "a" {
			e.Tolerated, e.Decision = true, RestartCharged
		}
		next.must(Join{Node: Node{ID: id, Name: id, Rank: -1, Slots: 2}, Params: s.p, Seen: run.EpochID, Resume: &e})
	}
	require.Equal(t, string(job.Succeeded), next.r.Status().Outcome)
}

// Who decides alone is not disturbed by others, but for the restarts that there are.
func TestThoseWhoseSuccessCountsDecideAlone(t *testing.T) {
	begin := func(restarts int, b Budget) *sim {
		b.BackoffMax, b.Success, b.Alone = -1, SuccessRank0, true
		s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: restarts, Budget: b})
		s.join("a", "b")
		s.obey()
		return s
	}
	beside := func(s *sim, id string, d Decision, left int) {
		s.must(Failing{ID: id, EpochID: s.runs[id].EpochID, Decision: d, Beside: true, Left: left,
			Failures: []job.Failure{{Rank: 3, GroupRank: 1, Text: id + " has failed"}}})
	}
	s := begin(1, Budget{})
	beside(s, "b", RestartCharged, 1)
	require.Equal(t, job.Stop, s.dirs["a"].Kind, "a restart is left")
	s.obey()
	require.Equal(t, 1, s.r.account.restarts)
	beside(s, "b", RestartCharged, 1)
	require.Equal(t, job.EventRankFailed, s.log[len(s.log)-1].Event)
	beside(s, "a", RestartCharged, 1)
	beside(s, "b", RestartCharged, 0)
	s.pass(time.Hour)
	require.Equal(t, job.Run, s.dirs["a"].Kind, "rank 0 goes on")
	require.Equal(t, cost{}, s.r.account.newest.cost)
	require.Equal(t, "failed", s.r.Nodes()[1].State)
	s.succeed("a")
	require.Equal(t, string(job.Succeeded), s.r.Status().Outcome)
	states := map[string]string{}
	for _, n := range s.r.Ended() {
		states[n.Name] = n.State
	}
	require.Equal(t, map[string]string{"a": "succeeded", "b": "failed"}, states)
	require.False(t, s.r.Status().EndedAt.IsZero())

	s = begin(0, Budget{})
	beside(s, "b", RestartCharged, 1)
	s.succeed("b", "a")
	require.Equal(t, "failed", s.r.Ended()[1].State, "although its other worker has succeeded")

	s = begin(0, Budget{})
	beside(s, "b", RestartCharged, 0)
	s.must(Leave{ID: "b"})
	require.Equal(t, job.Run, s.dirs["a"].Kind, "nobody needs b")

	s = begin(0, Budget{})
	beside(s, "b", Permanent, 0)
	s.fail("a", RestartCharged)
	s.pass(attributionWindow)
	require.Equal(t, job.Fail, s.dirs["a"].Kind, "rank 0 has failed")
	require.Len(t, s.r.Evidence().Failures, 2)

	s = begin(9, Budget{})
	beside(s, "b", Permanent, 0)
	require.Equal(t, job.Run, s.dirs["a"].Kind)
	s.fail("a", RestartCharged)
	require.Equal(t, job.Stop, s.dirs["b"].Kind)
	beside(s, "b", Permanent, 0)
	s.obey()
	require.Len(t, s.runs, 2, "and b starts anew with it")
	s.fail("a", RestartCharged)
	beside(s, "a", Permanent, 0)
	s.obey()
	require.Equal(t, 2, s.r.account.restarts, "it is not for those beside rank 0 to end the run")

	s = begin(9, Budget{BackoffLimit: 1})
	beside(s, "b", RestartFree, 0)
	s.obey()
	beside(s, "b", RestartFree, 0)
	require.Equal(t, job.Run, s.dirs["a"].Kind, "the limit of restarts is reached")
	s = begin(0, Budget{})
	beside(s, "b", Hold, 1)
	s.pass(attributionWindow)
	s.obey()
	require.NotNil(t, s.dirs["a"].Paused, "an order of a policy")

	// A daemon that was started again hears of it, too.
	s = begin(0, Budget{})
	next := newSim(t, s.p)
	for _, id := range []string{"a", "b"} {
		run := s.runs[id]
		e := Resume{EpochID: run.EpochID, Place: *run.Place}
		if id == "b" {
			e.Beside, e.Decision = true, RestartCharged
		}
		next.must(Join{Node: Node{ID: id, Name: id, Rank: -1, Slots: 2}, Params: s.p, Seen: run.EpochID, Resume: &e})
	}
	require.Equal(t, running, next.r.epoch.phase)
	require.Equal(t, 1, next.r.epoch.results.exhausted)
}

func TestBudgetValidate(t *testing.T) {
	p := Params{Min: 1, Max: 1}
	require.NoError(t, p.Validate())
	p.Budget = Budget{BackoffLimit: -1, BackoffMin: time.Second, BackoffMax: time.Second, SameFailures: -1, NoProgress: 3,
		Deadline: maxDuration, StartDeadline: maxDuration, Success: SuccessAny, CleanUp: CleanNone, HoldFailed: true,
		HoldFor: maxDuration, Windows: [MaxWindows]Window{{windowRank, 1, 1}, {windowNode, 1000, maxDuration}}}
	require.NoError(t, p.Validate())
	for want, change := range map[string]func(*Budget){
		"--backoff-limit=-2: need":            func(b *Budget) { b.BackoffLimit = -2 },
		"--restart-backoff=2s:1s: need":       func(b *Budget) { b.BackoffMin = 2 * time.Second },
		"--restart-backoff=-1ns:1s: need":     func(b *Budget) { b.BackoffMin = -1 },
		"--same-failures=-2: need":            func(b *Budget) { b.SameFailures = -2 },
		"--no-progress=-1: need":              func(b *Budget) { b.NoProgress = -1 },
		"--deadline, --start-deadline and":    func(b *Budget) { b.Deadline = -1 },
		"(8784h0m0s, 8784h0m0.000000001s":     func(b *Budget) { b.StartDeadline = maxDuration + 1 },
		"--success-rule=most: need":           func(b *Budget) { b.Success = "most" },
		"--clean-up=some: need":               func(b *Budget) { b.CleanUp = "some" },
		"--restart-window=pod=1/1m: need":     func(b *Budget) { b.Windows[3] = Window{"pod", 1, time.Minute} },
		"--restart-window=job=0/1m: need":     func(b *Budget) { b.Windows[3] = Window{"job", 0, time.Minute} },
		"--restart-window=job=1001/1m: need":  func(b *Budget) { b.Windows[3] = Window{"job", 1001, time.Minute} },
		"--restart-window=job=1/0s: need":     func(b *Budget) { b.Windows[3] = Window{"job", 1, 0} },
		"--restart-window=job=1/8785h: need ": func(b *Budget) { b.Windows[3] = Window{"job", 1, maxDuration + time.Hour} },
	} {
		q := p
		change(&q.Budget)
		require.ErrorContains(t, q.Validate(), want)
	}
	require.Error(t, Params{Min: 1, Max: 1, Budget: Budget{BackoffMax: maxDuration + 1}}.Validate())
}

// TestEveryFieldOfABudgetIsNamed changes each field once: two nodes that differ in it are told so.
func TestEveryFieldOfABudgetIsNamed(t *testing.T) {
	run := Params{Min: 1, Max: 1}.WithDefaults()
	for i := range reflect.TypeFor[Budget]().NumField() {
		p := run
		switch f := reflect.ValueOf(&p.Budget).Elem().Field(i); f.Kind() {
		case reflect.Bool:
			f.SetBool(!f.Bool())
		case reflect.String:
			f.SetString("any")
		case reflect.Array:
			f.Index(3).Set(reflect.ValueOf(Window{windowJob, 3, time.Hour}))
		default:
			f.SetInt(f.Int() + 1_000_000_000)
		}
		own, theirs := p.Differences(run)
		require.NotEmpty(t, own, reflect.TypeFor[Budget]().Field(i).Name)
		require.NotEqual(t, own, theirs)
	}
	require.Equal(t, "0", Budget{BackoffMax: -1}.withDefaults().backoffText())
	require.Equal(t, "1h:2h30m", Budget{BackoffMin: time.Hour, BackoffMax: 150 * time.Minute}.backoffText())
	require.Equal(t, 5*time.Millisecond, Budget{BackoffMax: 5 * time.Millisecond}.withDefaults().BackoffMin)
}

func TestFingerprintIsBounded(t *testing.T) {
	n := &node{Node: Node{Name: "a"}}
	for want, fs := range map[string][]job.Failure{
		"x":                      {{Fingerprint: "x", Text: "rank 3 failed: x"}, {Fingerprint: "y"}},
		"rank 3 failed: x":       {{Text: "rank 3 failed: x"}},
		strings.Repeat("é", 128): {{Fingerprint: strings.Repeat("é", 200)}},
	} {
		require.Equal(t, want, fingerprint(fs, n))
	}
}

// histories is how many random histories are tried.
func histories() int {
	switch {
	case os.Getenv("DLROVER_LONG_TESTS") != "":
		return 100_000
	case testing.Short():
		return 300
	}
	return 1500
}

// TestRandomFailureHistories holds the invariants of budgets on random histories of failures.
func TestRandomFailureHistories(t *testing.T) {
	t.Parallel()
	n := histories()
	for part := range 4 {
		t.Run(fmt.Sprint(part), func(t *testing.T) {
			t.Parallel()
			seeds := []int{6740} // a window that ends while a death is waited for
			for i := part; i < n; i += 4 {
				seeds = append(seeds, i)
			}
			for _, i := range seeds {
				if !newHistory(t, int64(i)).play() {
					require.Fail(t, "the history of this seed breaks an invariant", i)
				}
			}
		})
	}
}

// failureHistory is one run with a random budget and random failures.
type failureHistory struct {
	*sim
	rnd     *rand.Rand
	streak  int // as the test counts it
	starts  []time.Time
	broken  time.Time
	charged int
	rested  time.Duration // at most this may the next start wait
}

func newHistory(t *testing.T, seed int64) *failureHistory {
	rnd := rand.New(rand.NewSource(seed))
	size := 1 + rnd.Intn(3)
	b := Budget{
		BackoffLimit: []int{-1, 1, 3, 10}[rnd.Intn(4)], BackoffMin: time.Millisecond << rnd.Intn(12),
		SameFailures: []int{-1, 2, 4}[rnd.Intn(3)], NoProgress: []int{0, 0, 2, 5}[rnd.Intn(4)],
		HoldFailed: rnd.Intn(8) == 0, HoldFor: time.Minute,
	}
	b.BackoffMax = b.BackoffMin << rnd.Intn(10)
	if rnd.Intn(3) == 0 {
		b.Windows[rnd.Intn(MaxWindows)] = Window{[]WindowScope{windowRank, windowNode, windowJob}[rnd.Intn(3)],
			1 + rnd.Intn(4), time.Second << rnd.Intn(12)}
	}
	if rnd.Intn(6) == 0 {
		b.Deadline = time.Minute << rnd.Intn(6)
	}
	s := newSim(t, Params{Min: 1, Max: size, MaxRestarts: []int{0, 2, 1000}[rnd.Intn(3)], LastCall: 1, Budget: b})
	s.now = time.Unix(1_700_000_000, 0).UTC()
	h := &failureHistory{sim: s, rnd: rnd}
	for i := range size {
		h.join(fmt.Sprintf("n%d", i))
	}
	h.obey()
	h.pass(1)
	h.obey()
	return h
}

// play reports whether the invariants hold.
func (h *failureHistory) play() bool {
	for range 30 {
		if h.r.Status().Outcome != "" {
			return h.ended()
		}
		if len(h.runs) == 0 {
			h.pass(time.Hour) // held, or alone
			h.obey()
			if len(h.runs) == 0 {
				return true
			}
		}
		if !h.turn() {
			return false
		}
	}
	return true
}

func (h *failureHistory) turn() bool {
	id := sortedKeys(h.runs)[h.rnd.Intn(len(h.runs))]
	h.runsFor([]time.Duration{0, time.Millisecond, time.Second, time.Minute, longEpoch}[h.rnd.Intn(5)])
	if h.r.epoch.phase != running || h.runs[id].Place == nil {
		return true // its time was over
	}
	before := h.r.account.spent
	restarts, ran := h.r.account.restarts, h.r.account.newest.ran(h.now)
	switch h.rnd.Intn(12) {
	case 0: // preemption
		h.must(Leave{ID: id})
		delete(h.runs, id)
		delete(h.dirs, id)
		h.obey()
		free := h.r.account.restarts <= restarts && h.r.account.spent.Streak <= before.Streak &&
			len(h.r.account.spent.Recent) <= len(before.Recent) && h.r.account.backoffAt.IsZero()
		h.joinNode(Node{ID: fmt.Sprint(id, h.now.UnixNano(), h.rnd.Int()), Name: id, Rank: -1, Slots: 2})
		h.pass(max(defaultGrowthDelay, h.p.LastCall))
		h.obey()
		return free && h.r.account.restarts <= restarts
	case 1:
		return h.permanent(id)
	}
	return h.fails(id, restarts, before, ran)
}

// permanent: nobody is started again, unless an operator resumes what is held.
func (h *failureHistory) permanent(id string) bool {
	epoch := h.r.epoch.id
	h.fail(id, Permanent)
	h.obey()
	h.pass(attributionWindow)
	h.obey()
	if h.p.Budget.HoldFailed {
		return h.r.orders.paused != nil && h.r.epoch.id == epoch && h.resumed()
	}
	return h.r.epoch.id == epoch && h.r.epoch.outcome == job.Failed
}

func (h *failureHistory) resumed() bool {
	h.must(Order{Kind: OrderResume})
	h.obey()
	return len(h.runs) > 0 && h.r.account.spent.Streak == 0
}

func (h *failureHistory) fails(id string, restarts int, before Spent, ran time.Duration) bool {
	d := []Decision{RestartCharged, RestartFree}[h.rnd.Intn(2)]
	p := job.Progress{Stepping: h.rnd.Intn(2) == 0, Saving: h.rnd.Intn(4) == 0}
	if p.Stepping {
		p.Step = int64(h.rnd.Intn(3))
	}
	if p.Saving {
		p.Checkpoint = before.Best.Checkpoint + int64(h.rnd.Intn(2))
	}
	best := before.Best
	newer := p.Saving && (!best.Saving || p.Checkpoint > best.Checkpoint)
	progress := newer || p.Stepping && p.Step > best.Step || ran >= longEpoch || !p.Saving && p.Step > 0
	streak := before.Streak
	if progress {
		streak = 0
	}
	rank := h.runs[id].Place.RankBase
	h.must(Failing{ID: id, EpochID: h.runs[id].EpochID, Decision: d, Progress: p,
		Failures: []job.Failure{{Rank: rank, Text: fmt.Sprint("error ", h.rnd.Intn(2)), At: h.now}}})
	failed, epoch := h.now, h.r.epoch.id
	h.obey()
	for range 3 {
		forms := h.r.epoch.id == epoch && h.r.epoch.phase == forming && h.r.orders.paused == nil
		if next := h.r.Next(); forms && !next.IsZero() {
			h.pass(max(0, next.Sub(h.now)))
			h.obey()
		}
	}
	b := h.p.Budget.withDefaults()
	if h.r.epoch.id == epoch {
		return h.r.epoch.outcome == job.Failed || h.r.orders.paused != nil // there was no restart left
	}
	wait := h.now.Sub(failed)
	most := time.Duration(0)
	if streak > 0 {
		most = min(b.BackoffMin<<(streak-1), b.BackoffMax)
	}
	spent := h.r.account.spent
	charged := restarts
	if d == RestartCharged {
		charged++
	}
	other := func(e restarted) bool { return !h.window(e, id, rank, failed) }
	recent := slices.DeleteFunc(slices.Clone(before.Recent), other)
	return wait <= most && (streak == 0 || wait >= most-most/4) && // the back-off is bounded, and there is one
		h.r.account.restarts == charged && charged <= h.p.MaxRestarts && // and no budget is exceeded
		spent.Streak == streak+1 && (b.BackoffLimit < 0 || spent.Streak <= b.BackoffLimit) &&
		(b.NoProgress == 0 || spent.Fruitless <= b.NoProgress) &&
		(b.SameFailures < 0 || spent.Same < b.SameFailures) && len(recent) < h.most()
}

// window reports whether the budget's window counts e after a failure.
func (h *failureHistory) window(e restarted, node string, rank int, now time.Time) bool {
	for _, w := range h.p.Budget.Windows {
		if w.Max == 0 || now.Sub(e.At) >= w.Per {
			continue
		}
		return w.Scope == windowJob || w.Scope == windowNode && e.Node == node || w.Scope == windowRank && e.Rank == rank
	}
	return false
}

// most is how many restarts the window allows.
func (h *failureHistory) most() int {
	for _, w := range h.p.Budget.Windows {
		if w.Max > 0 {
			return w.Max
		}
	}
	return 1
}

// ended: a run fails for a reason that its budget gives.
func (h *failureHistory) ended() bool {
	c, b := h.r.Status().Cause, h.p.Budget
	switch {
	case c == nil:
		return false
	case c.Kind == job.CauseDeadline:
		return b.Deadline > 0 && !h.now.Before(h.r.account.spent.Since.Add(b.Deadline))
	case c.Kind == job.CauseBudget:
		return strings.Contains(c.Text, " (--")
	}
	return c.Kind == job.CauseFailure || c.Kind == job.CauseTimeout
}

// TestALaterReportMayWeighMore: what a policy decides on purpose counts also from a node that reports second.
func TestALaterReportMayWeighMore(t *testing.T) {
	begin := func(restarts int, second Decision) *sim {
		s := newSim(t, Params{Min: 1, Max: 2, MaxRestarts: restarts, LastCall: 1, Budget: Budget{BackoffMax: -1}})
		s.join("a", "b")
		s.obey()
		epoch := s.runs["b"].EpochID
		s.fail("a", RestartFree)
		s.must(Failing{ID: "b", EpochID: epoch, Decision: second})
		s.pass(attributionWindow)
		s.obey()
		return s
	}
	require.Equal(t, job.Fail, begin(1, Permanent).dirs["a"].Kind)
	require.NotNil(t, begin(1, Hold).dirs["a"].Paused)
	require.Zero(t, begin(1, RestartCharged).r.account.restarts, "most failures only follow the first")
	for _, d := range []Decision{RestartElsewhere, Shrink} {
		s := begin(1, d)
		require.Equal(t, 1, s.runs["a"].Place.GroupWorldSize)
		require.Equal(t, 1, s.r.account.restarts)
		_, barred := s.r.Status().Bars["b"]
		require.True(t, barred, "this launcher cannot be told to leave")
		require.Equal(t, job.Fail, begin(0, d).dirs["a"].Kind, "nothing is left to pay with")
	}
}

// TestADecisionHoldsARunOfOneNode until an order.
func TestADecisionHoldsARunOfOneNode(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1})
	s.join("a")
	s.obey()
	s.fail("a", Hold)
	s.obey()
	s.pass(1000 * time.Hour)
	require.Equal(t, job.Wait, s.dirs["a"].Kind)
	require.Equal(t, "a failed", s.dirs["a"].Paused.Text)
	s.must(Order{Kind: OrderResume})
	s.obey()
	require.Equal(t, job.Run, s.dirs["a"].Kind)
	require.Zero(t, s.r.account.restarts)
}
