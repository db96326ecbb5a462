package rendezvous

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/job"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRestartIsAnEpochOfTheSameRound(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 2})
	s.join("a", "b")
	s.obey()
	s.fail("b", RestartCharged)
	require.Equal(t, job.Stop, s.dirs["a"].Kind)
	require.Equal(t, "b failed", s.dirs["a"].Cause.Text)
	s.obey()
	require.Equal(t, "a b", s.order())
	require.Equal(t, 1, s.runs["a"].Round)
	require.Equal(t, 1, s.runs["a"].Epoch)
	for _, id := range []string{"a", "b"} {
		require.Equal(t, 1, s.runs[id].Place.RestartCount, "the restart count is the same on all nodes")
	}
}

func TestRestartBudgetIsTheRuns(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 1})
	s.join("a", "b")
	s.obey()
	s.fail("a", RestartCharged)
	s.obey()
	s.fail("b", RestartFree)
	s.obey()
	require.Equal(t, 1, s.runs["a"].Place.RestartCount, "a free restart is not charged")
	s.fail("b", RestartCharged)
	require.Equal(t, job.Stop, s.dirs["a"].Kind, "workers stop while the cause is being found")
	s.pass(attributionWindow)
	require.Equal(t, job.Fail, s.dirs["a"].Kind)
	require.Equal(t, job.Failed, s.r.Evidence().Outcome)
	require.Equal(t, "b failed", s.r.Evidence().Failures[0].Text)
}

func TestPermanentFailureOfTheOnlyNodeEndsAtOnce(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1, MaxRestarts: 5})
	s.join("a")
	s.obey()
	s.fail("a", Permanent)
	require.Equal(t, job.Fail, s.dirs["a"].Kind)
}

func TestLossShrinksWithoutLastCallOrCharge(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 3})
	s.join("a", "b", "c")
	s.obey()
	s.vanish("b")
	s.pass(BrokenGrace)
	s.obey()
	require.Equal(t, "a c", s.order())
	require.Equal(t, 2, s.runs["a"].Round)
	require.Equal(t, 0, s.runs["a"].Place.RestartCount)
	require.Equal(t, job.CauseLoss, s.runs["a"].Cause.Kind)
}

func TestLeave(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 2})
	s.join("a", "b")
	s.obey()
	s.must(Leave{ID: "a", Reason: "SIGTERM"})
	delete(s.runs, "a")
	delete(s.dirs, "a")
	s.obey()
	require.Equal(t, "b", s.order())
	require.ErrorIs(t, s.step(Leave{ID: "a"}), ErrUnknownNode)
}

func TestSuccessNeedsEveryNode(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.join("a", "b")
	s.obey()
	s.succeed("a")
	require.Equal(t, job.Run, s.dirs["a"].Kind)
	s.succeed("b")
	require.Equal(t, job.Done, s.dirs["a"].Kind)
	require.Equal(t, job.Done, s.dirs["b"].Kind)
}

// One node done, the other failing used to dead-lock the exit barrier against the join.
func TestSucceededNodeRestartsWithTheOthers(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 1})
	s.join("a", "b")
	s.obey()
	s.succeed("a")
	s.fail("b", RestartCharged)
	s.obey()
	require.Equal(t, "a b", s.order())
	s.succeed("a", "b")
	require.Equal(t, job.Done, s.dirs["a"].Kind)
}

func TestLossOfASucceededNodeChangesNothing(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.join("a", "b")
	s.obey()
	s.succeed("a")
	s.vanish("a")
	s.pass(time.Minute)
	require.Equal(t, job.Run, s.dirs["b"].Kind)
	s.succeed("b")
	require.Equal(t, job.Done, s.dirs["b"].Kind)
}

func TestStaleJoinDoesNotCountAsAStop(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 3})
	s.join("a", "b")
	s.obey()
	first := s.runs["b"].EpochID
	s.fail("a", RestartCharged)
	s.obey()
	s.fail("a", RestartCharged)
	s.obeyOne("a")
	s.must(Join{Node: Node{ID: "b", Name: "b", Rank: -1, Slots: 2}, Params: s.p, Stopped: first})
	require.Equal(t, job.Stop, s.dirs["b"].Kind)
	require.Equal(t, job.Wait, s.dirs["a"].Kind, "b's workers still run")
}

func TestCrashLoopingNewcomerDoesNotDisturb(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 3})
	s.join("a", "b")
	s.pass(defaultLastCall)
	s.obey()
	s.join("c")
	require.Equal(t, job.Stop, s.dirs["a"].Kind)
	s.obey()
	s.vanish("c")
	s.pass(BrokenGrace)
	s.obey()
	for i := range 5 {
		id := fmt.Sprint("crash", i)
		s.p.GrowthDelay = 0
		s.joinNode(Node{ID: id, Name: id, Rank: -1, Slots: 2})
		s.vanish(id)
	}
	require.Equal(t, "a b", s.order())
	require.Zero(t, s.r.members.waiting)
}

func TestAlwaysRestartsASucceededWorld(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 1, Always: true})
	s.join("a", "b")
	s.obey()
	s.succeed("a", "b")
	s.obey()
	require.Equal(t, 1, s.runs["a"].Place.RestartCount)
	s.succeed("a", "b")
	require.Equal(t, job.Done, s.dirs["a"].Kind)
}

func TestPermanentFailureWinsOverARestart(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 5})
	s.join("a", "b")
	s.obey()
	s.fail("a", RestartCharged)
	s.fail("b", Permanent)
	s.obey()
	s.pass(attributionWindow)
	require.Equal(t, job.Fail, s.dirs["a"].Kind)
}

// Ten thousand nodes that leave at once cost a moment, not a square.
func TestMassDeparture(t *testing.T) {
	const n = 10_000
	s := newSim(t, Params{Min: 1, Max: n})
	for i := range n {
		id := fmt.Sprint(i)
		s.must(Join{Node: Node{ID: id, Name: id, Rank: -1, Slots: 1}, Params: s.p})
		s.must(Attach{ID: id})
	}
	s.obeyOne(s.r.epoch.world[0].ID)
	require.Equal(t, running, s.r.epoch.phase)
	visits := 0
	for i := range n - 1 {
		acts, err := s.r.Step(s.now, Leave{ID: fmt.Sprint(i)})
		require.NoError(t, err)
		visits += len(acts)
	}
	require.Less(t, visits, 4*n)
	require.Len(t, s.r.epoch.kept.losses, maxKept)
}

func TestStaleReportsAreIgnored(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1, MaxRestarts: 3})
	s.join("a")
	s.obey()
	old := s.runs["a"]
	s.fail("a", RestartCharged)
	s.obeyOne("a")
	s.must(Ready{ID: "a", EpochID: old.EpochID})
	require.Equal(t, releasing, s.r.epoch.phase)
	s.obey()
	s.must(Failing{ID: "a", EpochID: old.EpochID, Decision: Permanent})
	s.must(Success{ID: "a", EpochID: old.EpochID})
	s.must(Ready{ID: "a", EpochID: old.EpochID})
	s.must(Ready{ID: "a", EpochID: s.runs["a"].EpochID})
	require.Equal(t, s.runs["a"].Seq, s.dirs["a"].Seq, "the workers run already")
	require.Equal(t, "a", s.order())
	require.Equal(t, running, s.r.epoch.phase)
}

// Before its workers may start, and after they have succeeded, a node has none that could fail.
func TestOnlyWorkersThatRunCanFail(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 3})
	s.join("a", "b")
	require.Equal(t, releasing, s.r.epoch.phase)
	s.must(Failing{ID: "b", EpochID: s.r.epoch.id, Decision: RestartCharged})
	require.Equal(t, releasing, s.r.epoch.phase)
	s.obey()
	s.succeed("b")
	s.fail("b", RestartCharged)
	require.Equal(t, running, s.r.epoch.phase)
	require.Equal(t, "a:run b:run", s.kinds())
}

// A node whose world is sealed waits for its store with the directive that it had: the cause of a Wait is a refusal.
func TestWaitInASealedWorldHasNoCause(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 1})
	s.join("a", "b")
	s.obey()
	s.fail("a", RestartCharged)
	for _, id := range []string{"a", "b"} {
		s.obeyOne(id)
	}
	require.Equal(t, releasing, s.r.epoch.phase)
	for _, id := range []string{"a", "b"} {
		if m, err := s.r.Member(id); m.Directive.Kind == job.Wait {
			require.NoError(t, err)
			require.Nil(t, m.Directive.Cause)
			s.obey()
			require.Equal(t, job.CauseFailure, s.dirs[id].Cause.Kind)
			return
		}
	}
	require.Fail(t, "nobody waits for the leader")
}

func TestAbandonedRunStartsAfresh(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1, MaxRestarts: 1})
	s.join("a")
	s.obey()
	s.fail("a", RestartCharged)
	s.obey()
	newest := s.dirs["a"].Seq
	s.vanish("a")
	s.pass(silentGrace)
	s.p.MaxRestarts = 2
	s.join("b")
	require.Greater(t, s.dirs["b"].Seq, newest, "a number means one directive")
	s.obey()
	require.Equal(t, 0, s.runs["b"].Place.RestartCount)
}

func TestAnAbandonedRunRemembersWhichNodesHaveLeft(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.join("a")
	s.must(Leave{ID: "a"})
	require.ErrorIs(t, s.step(Join{Node: Node{ID: "a", Name: "a", Rank: -1, Slots: 2}, Params: s.p}), ErrRefused)
}

// The first cause of an end stands; but a loss explains whatever else was seen first.
func TestCauseOfAnEnd(t *testing.T) {
	failure := func(s *sim) { s.fail("a", RestartFree) }
	leave := func(s *sim) { s.must(Leave{ID: "c", Reason: "drained"}) }
	loss := func(id string) func(*sim) {
		return func(s *sim) {
			s.vanish(id)
			s.pass(BrokenGrace)
		}
	}
	for name, c := range map[string]struct {
		events []func(*sim)
		kind   job.CauseKind
		node   string
	}{
		"failure":                       {[]func(*sim){failure}, job.CauseFailure, "a"},
		"a loss explains the failure":   {[]func(*sim){failure, loss("b")}, job.CauseLoss, "b"},
		"the first loss stands":         {[]func(*sim){loss("c"), loss("b")}, job.CauseLoss, "c"},
		"a loss needs no explanation":   {[]func(*sim){loss("b"), leave}, job.CauseLoss, "b"},
		"a departure explains nothing":  {[]func(*sim){failure, leave}, job.CauseFailure, "a"},
		"the first departure stands":    {[]func(*sim){leave, failure}, job.CauseLeave, "c"},
		"a loss explains a departure":   {[]func(*sim){leave, loss("b")}, job.CauseLoss, "b"},
		"failure, departure, then loss": {[]func(*sim){failure, leave, loss("b")}, job.CauseLoss, "b"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, Params{Min: 1, Max: 4})
			s.join("a", "b", "c", "d")
			s.obey()
			for _, event := range c.events {
				event(s)
			}
			require.Equal(t, forming, s.r.epoch.phase)
			require.Equal(t, c.kind, s.r.epoch.cause.Kind)
			require.Equal(t, c.node, s.r.epoch.cause.Node)
		})
	}
}

// A run that is about to fail goes on at once when the news of a departure comes.
func TestDepartureEndsAPendingFailureAtOnce(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 2})
	s.join("a", "b")
	s.obey()
	s.fail("a", RestartCharged)
	s.obeyOne("a")
	s.must(Leave{ID: "b"})
	require.Equal(t, job.Lead, s.dirs["a"].Kind)
}

// The note of a departure says which member of the newest world it was.
func TestNotesOfDepartures(t *testing.T) {
	s := world(t, Params{Min: 2, Max: 2}, "a", "b", "spare")
	s.ordered(OrderBar, "b")
	s.obey()
	require.Equal(t, "a spare", s.order())
	for _, id := range []string{"b", "spare", "a"} {
		s.must(Leave{ID: id, Reason: "drained"})
	}
	ranks := map[string]int{}
	for _, n := range s.notes(job.EventNodeLeave) {
		ranks[n.Node] = n.Rank
		require.Equal(t, s.ended[0].Term, n.Term)
		require.Equal(t, n.Node, n.ID)
	}
	for _, n := range s.notes("join") {
		require.Empty(t, n.ID)
	}
	require.Equal(t, map[string]int{"a": 0, "spare": 1, "b": -1}, ranks, "b was one of an older world")
}

// All workers of an epoch may fail; that is one failure of the run.
func TestFurtherFailuresOfAnEpochAreNotCounted(t *testing.T) {
	s := newSim(t, Params{Min: 3, Max: 3, MaxRestarts: 1})
	s.join("a", "b", "c")
	s.obey()
	for _, id := range []string{"a", "b", "c"} {
		s.fail(id, RestartCharged)
	}
	s.obey()
	require.Equal(t, "a b c", s.order(), "nothing is waited for")
	require.Equal(t, 1, s.runs["a"].Place.RestartCount)
	s.ordered(OrderRestart, "")
	s.fail("a", Permanent)
	s.pass(silentGrace)
	s.obey()
	require.Equal(t, "a b c", s.order(), "workers that die of being stopped prove nothing")
}
