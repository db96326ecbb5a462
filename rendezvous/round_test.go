package rendezvous

import (
	"fmt"
	"maps"
	"math/rand"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/job"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// sim drives a Round as the shell and well-behaved launchers do.
type sim struct {
	t    testing.TB
	r    *Round
	now  time.Time
	p    Params
	dirs map[string]Directive
	runs map[string]Directive // nodes whose workers run
	gone map[string]bool      // vanished: nobody there to obey

	can      []Ability               // of the nodes that join
	health   map[string]checkOutcome // what the checks of nodes say, by ID
	answered map[string]uint64       // the newest Check that a node has answered
	freed    []string                // those that were released last
	awaited  map[string]bool         // who was told to Check, has not answered, and was not released
	checked  map[string][]uint64     // the Checks that each node was told as a subject
	log      []Note
	opened   bool                 // the newest gate has opened without all answers
	worked   map[string]Directive // the newest epoch that had workers here
	ended    []EpochEvidence
}

func newSim(t testing.TB, p Params) *sim {
	s := &sim{
		t: t, r: New(Config{Term: uint64(rand.Int63())}), now: time.Unix(1000, 0).UTC(), p: p, dirs: map[string]Directive{},
		runs: map[string]Directive{}, gone: map[string]bool{}, health: map[string]checkOutcome{},
		answered: map[string]uint64{}, checked: map[string][]uint64{}, awaited: map[string]bool{},
		worked: map[string]Directive{},
	}
	if p.Budget == (Budget{}) {
		s.p.Budget.BackoffMax = -1 // time does not go by between failures
	}
	return s
}

func (s *sim) step(ev Event) error {
	acts, err := s.r.Step(s.now, ev)
	switch e := ev.(type) {
	case Cleared:
		delete(s.awaited, e.ID)
	case Barred:
		delete(s.awaited, e.ID)
	}
	s.take(acts)
	return err
}

// take does what actions ask of the shell.
func (s *sim) take(acts []Action) {
	s.holdActions(acts)
	for _, a := range acts {
		if a.Directive != nil && !s.gone[a.Node] {
			s.dirs[a.Node] = *a.Directive
		}
	}
}

func (s *sim) member(id string) Member {
	m, _ := s.r.Member(id)
	return m
}

func (s *sim) must(ev Event) { s.t.Helper(); require.NoError(s.t, s.step(ev)) }

// join introduces nodes by name; the name is the ID, too.
func (s *sim) join(ids ...string) {
	s.t.Helper()
	for _, id := range ids {
		s.joinNode(Node{ID: id, Name: id, Rank: -1, Slots: 2, Can: s.can})
	}
}

func (s *sim) joinNode(n Node) {
	s.t.Helper()
	s.must(Join{Node: n, Params: s.p})
	s.must(Attach{ID: n.ID})
}

// obey lets every node do what it was told until nothing changes.
func (s *sim) obey() {
	s.t.Helper()
	for changed := true; changed; {
		changed = false
		for _, id := range sortedKeys(s.dirs) {
			changed = s.obeyOne(id) || changed
		}
	}
}

func (s *sim) obeyOne(id string) bool {
	s.t.Helper()
	d := s.dirs[id]
	if d.Leave != nil {
		delete(s.runs, id)
		delete(s.dirs, id)
		s.must(Leave{ID: id})
		return true
	}
	switch d.Kind {
	case job.Lead:
		s.must(Ready{ID: id, EpochID: d.EpochID, Addr: id, Port: 1})
	case job.Run:
		_, works := s.runs[id]
		if s.runs[id].Seq == d.Seq || !works && s.worked[id].EpochID == d.EpochID {
			return false // nobody starts an epoch twice
		}
		s.runs[id], s.worked[id] = d, d
	case job.Stop:
		delete(s.runs, id)
		n := Node{ID: id, Name: id, Rank: s.r.members.nodes[id].Rank, Slots: 2}
		s.must(Join{Node: n, Params: s.p, Stopped: d.EpochID})
	case job.Check:
		delete(s.runs, id)
		return s.answer(id)
	case job.Wait, job.Bar:
		delete(s.runs, id)
		return false
	case job.Done, job.Fail:
		delete(s.runs, id)
		return false
	default:
		return false
	}
	return true
}

func sortedKeys[V any](m map[string]V) []string {
	ks := make([]string, 0, len(m))
	for k := range m {
		ks = append(ks, k)
	}
	slices.Sort(ks)
	return ks
}

// pass lets time go by, with a Tick whenever the Round asks for one.
func (s *sim) pass(d time.Duration) {
	s.t.Helper()
	end := s.now.Add(d)
	for n := 0; ; n++ {
		require.Less(s.t, n, 1000, "the round asks for ticks without end")
		next := s.r.Next()
		if next.IsZero() || next.After(end) {
			break
		}
		if next.After(s.now) {
			s.now = next
		}
		s.must(Tick{})
	}
	s.now = end
	s.must(Tick{})
}

func (s *sim) vanish(ids ...string) { // kill -9 of launcher and workers
	for _, id := range ids {
		delete(s.runs, id)
		delete(s.dirs, id)
		s.gone[id] = true
		s.must(Detach{ID: id, Broken: true})
	}
}

func (s *sim) fail(id string, d Decision) {
	run := s.runs[id]
	s.must(Failing{
		ID: id, EpochID: run.EpochID, Decision: d,
		Failures: []job.Failure{{Rank: run.Place.RankBase, GroupRank: run.Place.GroupRank, Text: id + " failed", At: s.now}},
	})
}

func (s *sim) succeed(ids ...string) {
	for _, id := range ids {
		s.must(Success{ID: id, EpochID: s.runs[id].EpochID})
	}
}

// order lists the running nodes by group rank.
func (s *sim) order() string {
	names := make([]string, len(s.runs))
	for id, d := range s.runs {
		names[d.Place.GroupRank] = id
	}
	return strings.Join(names, " ")
}

func nodes(n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("n%03d", i)
	}
	return ids
}

func TestSealing(t *testing.T) {
	for _, c := range []struct {
		name   string
		p      Params
		join   int
		after  time.Duration
		size   int
		spares int
	}{
		{"max seals at once", Params{Min: 1, Max: 4}, 4, 0, 4, 0},
		{"min waits for the last call", Params{Min: 2, Max: 4}, 3, defaultLastCall - 1, 0, 3},
		{"min seals after the last call", Params{Min: 2, Max: 4}, 3, defaultLastCall, 3, 0},
		{"below min never seals", Params{Min: 2, Max: 4}, 1, DefaultJoinTimeout - 1, 0, 1},
		{"six joiners never exceed max four", Params{Min: 2, Max: 4}, 6, 0, 4, 2},
		{"unit floors", Params{Min: 2, Max: 8, Unit: 4}, 6, defaultLastCall, 4, 2},
		{"unit never goes below min", Params{Min: 3, Max: 4, Unit: 2}, 3, defaultLastCall, 0, 3},
		{"unit above the joiners waits", Params{Min: 1, Max: 4, Unit: 4}, 3, defaultLastCall, 0, 3},
		{"one node", Params{Min: 1, Max: 1}, 1, 0, 1, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSim(t, c.p)
			s.join(nodes(c.join)...)
			s.pass(c.after)
			s.obey()
			require.Len(t, s.runs, c.size)
			require.Equal(t, c.spares, s.r.members.waiting)
		})
	}
}

func TestPlaces(t *testing.T) {
	s := newSim(t, Params{Min: 3, Max: 3})
	s.joinNode(Node{ID: "a", Name: "a", Rank: -1, Slots: 1, Role: "trainer"})
	s.joinNode(Node{ID: "b", Name: "b", Rank: -1, Slots: 2, Role: "ps"})
	s.joinNode(Node{ID: "c", Name: "c", Rank: -1, Slots: 3, Role: "trainer"})
	s.obey()
	require.Equal(t, &job.Place{
		GroupRank: 2, GroupWorldSize: 3, RankBase: 3, WorldSize: 6, RoleRankBase: 1, RoleWorldSize: 4,
		MasterAddr: "a", MasterPort: 1,
	}, s.runs["c"].Place)
	require.Equal(t, &job.Place{
		GroupRank: 1, GroupWorldSize: 3, RankBase: 1, WorldSize: 6, RoleRankBase: 0, RoleWorldSize: 2,
		MasterAddr: "a", MasterPort: 1,
	}, s.runs["b"].Place)
}

func TestWorkersServeTheirStoreWhereAnAgentKnowsNoOther(t *testing.T) {
	for _, agent := range []string{"", AgentDLRover} {
		s := newSim(t, Params{Min: 2, Max: 2})
		s.join("a")
		s.joinNode(Node{ID: "b", Name: "b", Rank: -1, Slots: 2, Agent: agent})
		lead := s.dirs["a"]
		require.Equal(t, job.Lead, lead.Kind)
		require.Equal(t, agent != "", lead.Place.WorkerStore)
		s.must(Ready{ID: "a", EpochID: lead.EpochID, Addr: "a", Port: 1})
		require.Equal(t, agent != "", s.dirs["b"].Place.WorkerStore)
	}
}

func TestNobodyRunsBeforeTheLeaderIsReady(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.join("a", "b")
	require.Equal(t, job.Lead, s.dirs["a"].Kind)
	require.Equal(t, job.Wait, s.dirs["b"].Kind)
	s.obey()
	require.Equal(t, "a b", s.order())
}

func TestJoinTimeoutFailsWithTheNumbers(t *testing.T) {
	s := newSim(t, Params{Min: 3, Max: 4, JoinTimeout: time.Minute})
	s.join("a", "b")
	s.pass(time.Minute)
	require.Equal(t, job.Fail, s.dirs["a"].Kind)
	require.Contains(t, s.dirs["b"].Cause.Text, "2 nodes joined")
	require.Contains(t, s.dirs["b"].Cause.Text, "need 3")
}

func TestSlowStopIsNoJoinTimeout(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 1, JoinTimeout: 5 * time.Second})
	s.join("a", "b")
	s.obey()
	s.fail("a", RestartCharged)
	s.obeyOne("a")
	s.pass(30 * time.Second) // b's workers use their grace period
	s.obey()
	require.Equal(t, "a b", s.order())
}

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

func TestLossIsQuickWhenTheSurvivorsFailToo(t *testing.T) {
	for _, order := range []string{"loss first", "failure first"} {
		t.Run(order, func(t *testing.T) {
			s := newSim(t, Params{Min: 1, Max: 2, MaxRestarts: 0})
			s.join("a", "b")
			s.obey()
			if order == "loss first" {
				s.vanish("b")
				s.now = s.now.Add(50 * time.Millisecond)
				s.fail("a", RestartCharged)
			} else {
				s.fail("a", RestartCharged)
				s.now = s.now.Add(50 * time.Millisecond)
				s.vanish("b")
			}
			s.obey()
			s.pass(brokenGraceFailing)
			s.obey()
			require.Equal(t, "a", s.order(), "a node loss explains the failure, although no restart is left")
			require.Equal(t, 0, s.runs["a"].Place.RestartCount)
		})
	}
}

func TestShortBreakOfAConnectionIsForgiven(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 2})
	s.join("a", "b")
	s.obey()
	s.must(Detach{ID: "b", Broken: true})
	s.pass(BrokenGrace - 1)
	s.must(Attach{ID: "b"})
	s.pass(time.Hour)
	require.Equal(t, "a b", s.order())
	require.Equal(t, 1, s.runs["b"].Round)
}

func TestSilentNodeIsLost(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 2})
	s.join("a", "b")
	s.obey()
	s.must(Detach{ID: "b"})
	s.pass(silentGrace - 1)
	require.Equal(t, job.Run, s.dirs["a"].Kind)
	s.pass(1)
	require.Equal(t, job.Stop, s.dirs["a"].Kind)
}

func TestMostNodesSuspectDoubtsTheDaemonsOwnNetwork(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 6})
	s.join(nodes(6)...)
	s.obey()
	for _, id := range nodes(4) {
		s.must(Detach{ID: id, Broken: true})
	}
	s.pass(silentGrace - 1)
	require.Equal(t, job.Run, s.dirs["n005"].Kind)
	for _, id := range nodes(4) {
		s.must(Attach{ID: id})
	}
	s.pass(time.Minute)
	require.Len(t, s.runs, 6)
}

func TestSpareReplacesALostNodeInItsRank(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 3})
	s.join("a", "b", "c", "spare")
	s.obey()
	require.Equal(t, "a b c", s.order())
	s.vanish("b")
	s.pass(BrokenGrace)
	s.obey()
	require.Equal(t, "a spare c", s.order())
}

func TestGrowth(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 4})
	s.join("a")
	s.pass(defaultLastCall)
	s.obey()
	require.Equal(t, "a", s.order())
	s.join("b")
	require.Equal(t, job.Run, s.dirs["a"].Kind, "newcomers are collected for a moment")
	s.pass(defaultGrowthDelay)
	s.obey()
	require.Equal(t, "a b", s.order())
	s.join("c", "d")
	require.Equal(t, job.Stop, s.dirs["a"].Kind, "a full world restarts at once")
	s.obey()
	require.Equal(t, "a b c d", s.order())
	require.Equal(t, 0, s.runs["a"].Place.RestartCount)
}

func TestGrowthWaitsForAWholeUnit(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 6, Unit: 2})
	s.join("a", "b", "c")
	s.pass(defaultLastCall)
	s.obey()
	require.Equal(t, "a b", s.order())
	s.pass(time.Minute)
	require.Equal(t, job.Run, s.dirs["a"].Kind)
	s.join("d")
	s.pass(defaultGrowthDelay)
	s.obey()
	require.Equal(t, "a b c d", s.order())
}

// A late joiner used to wipe a world that had formed but that not all had fetched.
func TestLateJoinerLeavesASealedWorldAlone(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.join("a", "b")
	s.join("late")
	s.obey()
	require.Equal(t, "a b", s.order())
	require.Equal(t, job.Wait, s.dirs["late"].Kind)
}

// A replacement with the rank of a dead node that was still listed used to be ignored.
func TestReplacementTakesThePlaceOfASuspect(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.joinNode(Node{ID: "a", Name: "a", Rank: 0, Slots: 2})
	s.joinNode(Node{ID: "b", Name: "b", Rank: 1, Slots: 2})
	s.obey()
	s.vanish("a")
	s.joinNode(Node{ID: "a2", Name: "a2", Rank: 0, Slots: 2})
	s.obey()
	require.Equal(t, "a2 b", s.order())
	require.NotContains(t, s.r.members.nodes, "a")
}

// The older pod may still be connected, if only its network to the others is dead.
func TestLaterGenerationTakesThePlace(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.joinNode(Node{ID: "a", Name: "a", Rank: 0, Slots: 2, Generation: 5})
	s.joinNode(Node{ID: "b", Name: "b", Rank: 1, Slots: 2, Generation: 6})
	s.obey()
	s.joinNode(Node{ID: "older", Name: "older", Rank: 0, Slots: 2, Generation: 4})
	require.Equal(t, job.Run, s.dirs["a"].Kind)
	delete(s.dirs, "a")
	delete(s.runs, "a")
	s.joinNode(Node{ID: "a2", Name: "a2", Rank: 0, Slots: 2, Generation: 7})
	delete(s.dirs, "a")
	s.must(Leave{ID: "older"})
	s.obey()
	require.Equal(t, "a2 b", s.order())
}

func TestWishedRanksDecide(t *testing.T) {
	s := newSim(t, Params{Min: 3, Max: 3})
	for i, id := range []string{"c", "a", "b"} {
		s.joinNode(Node{ID: id, Name: id, Rank: (i + 2) % 3, Slots: 2})
	}
	s.obey()
	require.Equal(t, "a b c", s.order())
}

func TestTopologyKeepsASwitchTogether(t *testing.T) {
	var lines strings.Builder
	for i := range 10 {
		fmt.Fprintf(&lines, "asw%d psw0 192.168.0.%d\n", []int{0, 1, 2, 3, 0, 1, 2, 3, 0, 1}[i], i)
	}
	topo, err := ParseTopology(strings.NewReader(lines.String()))
	require.NoError(t, err)
	s := newSim(t, Params{Min: 10, Max: 10})
	s.r = New(Config{Topology: topo})
	for i := range 10 {
		s.joinNode(Node{ID: fmt.Sprint(i), Name: fmt.Sprint(i), Rank: i, IP: fmt.Sprintf("192.168.0.%d", i), Slots: 1})
	}
	s.obey()
	require.Equal(t, "0 4 8 1 5 9 2 6 3 7", s.order())
}

func TestParseTopologyErrors(t *testing.T) {
	for in, want := range map[string]string{
		"a b\n":               "line 1",
		"a p 1\nb p 1\n":      "already under switch a",
		"# x\n\na p 1 more\n": "line 3",
	} {
		_, err := ParseTopology(strings.NewReader(in))
		require.ErrorContains(t, err, want)
	}
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

func TestJoinThatArrivesAfterTheGoodbye(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 2})
	s.join("a", "b")
	s.must(Leave{ID: "b"})
	require.ErrorIs(t, s.step(Join{Node: Node{ID: "b", Name: "b", Rank: -1, Slots: 2}, Params: s.p}), ErrRefused)
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
	s.obey()
	s.must(Failing{ID: "a", EpochID: old.EpochID, Decision: Permanent})
	s.must(Success{ID: "a", EpochID: old.EpochID})
	s.must(Ready{ID: "a", EpochID: old.EpochID})
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

func TestNamed(t *testing.T) {
	s := newSim(t, Params{Min: 5, Max: 5})
	s.join("c")
	for _, id := range []string{"2", "1", "3"} {
		s.joinNode(Node{ID: id, Name: "n", Rank: -1, Slots: 2})
	}
	var ids []string
	for _, n := range s.r.members.named("n") {
		ids = append(ids, n.ID)
	}
	require.Equal(t, []string{"1", "2", "3"}, ids)
	require.Empty(t, s.r.members.named("x"))
}

func TestFinishedRun(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1})
	s.join("a")
	s.obey()
	s.now = s.now.Add(time.Minute)
	s.succeed("a")
	late := Node{ID: "late", Name: "late", Rank: -1, Slots: 1, Uptime: time.Second}
	s.now = s.now.Add(500 * time.Millisecond)
	s.must(Join{Node: late, Params: s.p})
	require.Equal(t, job.Done, s.dirs["late"].Kind, "a launcher that is older than the end belongs to the ended run")
	seq := s.dirs["late"].Seq
	s.must(Join{Node: late, Params: s.p, Stopped: s.r.epoch.id})
	require.Equal(t, job.Done, s.dirs["late"].Kind)
	require.Greater(t, s.dirs["late"].Seq, seq, "it asks again because it has not heard")
	require.Equal(t, finished, s.r.epoch.phase)
	next := Node{ID: "next", Name: "next", Rank: -1, Slots: 1}
	require.ErrorIs(t, s.step(Join{Node: next, Params: s.p}), ErrFinishing)
	s.must(Leave{ID: "a"})
	s.must(Leave{ID: "late"})
	s.must(Join{Node: next, Params: s.p})
	require.Equal(t, job.Lead, s.dirs["next"].Kind, "the run starts anew")
}

func TestRefusals(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 2, Static: false})
	s.join("a", strings.Repeat("y", MaxName))
	long := strings.Repeat("y", MaxName+1)
	for name, c := range map[string]struct {
		e    Join
		want string
	}{
		"other nnodes": {Join{Node: Node{ID: "x", Slots: 1}, Params: Params{Min: 2, Max: 2}},
			"--nnodes=2:2, but the run was opened with --nnodes=1:2"},
		"other unit":       {Join{Node: Node{ID: "x", Slots: 1}, Params: Params{Min: 1, Max: 2, Unit: 2}}, "--node-unit=2"},
		"other backend":    {Join{Node: Node{ID: "x", Slots: 1}, Params: Params{Min: 2, Max: 2, Static: true}}, "--nnodes"},
		"no slots":         {Join{Node: Node{ID: "x", Slots: -1}, Params: s.p}, "slot"},
		"unit without fit": {Join{Node: Node{ID: "x", Slots: 1}, Params: Params{Min: 1, Max: 3, Unit: 4}}, "node unit 4"},
		"min above max":    {Join{Node: Node{ID: "x", Slots: 1}, Params: Params{Min: 3, Max: 2}}, "0 < MIN <= MAX"},
		"long name":        {Join{Node: Node{ID: "x", Name: long, Slots: 1}, Params: s.p}, "at most 512 bytes"},
		"long address":     {Join{Node: Node{ID: "x", Addrs: []string{"::1", long}, Slots: 1}, Params: s.p}, "address \"yyy"},
		"other checks": {Join{Node: Node{ID: "x", Slots: 1, Can: []Ability{CanGate}},
			Params: Params{Min: 1, Max: 2, Gate: true, Check: "full, ttl=10m"}},
			"checks of nodes (full, ttl=10m), but the run was opened with no checks of nodes; " +
				"use the same --network-check, --precheck, --switchbox-check, --health-check and --check options on every node"},
		"long IP": {Join{Node: Node{ID: "x", IP: long, Slots: 1}, Params: s.p}, "513 bytes; at most 512"},
	} {
		t.Run(name, func(t *testing.T) {
			err := s.step(c.e)
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, c.want)
		})
	}
}

// TestTheFirstNodesWordCounts has nodes that differ in what a run has one value of.
func TestTheFirstNodesWordCounts(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 1, LastCall: time.Minute})
	s.join("a")
	other := Params{Min: 2, Max: 2, MaxRestarts: 5, JoinTimeout: time.Minute, Always: true}
	s.must(Join{Node: Node{ID: "b", Name: "b", Rank: -1, Slots: 2}, Params: other})
	s.must(Attach{ID: "b"})
	s.obey()
	require.Equal(t, job.Run, s.dirs["b"].Kind)
	require.Equal(t, s.p.WithDefaults(), *s.dirs["b"].Params)
	require.Nil(t, s.dirs["a"].Params, "it has brought them")
	other.Budget = s.p.Budget
	own, theirs := other.Differences(*s.dirs["b"].Params)
	require.Equal(t, "--max-restarts=5 --restart-policy=Always: true join_timeout=60 last_call_timeout=30", own)
	require.Equal(t, "--max-restarts=1 --restart-policy=Always: false join_timeout=600 last_call_timeout=60", theirs)
	for range 2 {
		s.fail("b", RestartCharged)
		s.obey()
		s.pass(time.Second)
		s.obey()
	}
	require.Equal(t, job.Fail, s.dirs["a"].Kind, "one restart was the first node's word")

	// The node comes back with another value, and then opens the next run of the name.
	late := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 1})
	late.join("a", "b")
	late.obey()
	late.vanish("a")
	late.pass(time.Minute)
	late.must(Join{Node: Node{ID: "a2", Name: "a", Rank: -1, Slots: 2}, Params: Params{Min: 2, Max: 2, MaxRestarts: 9}})
	late.obey()
	require.Equal(t, job.Run, late.dirs["a2"].Kind)
	require.Equal(t, 1, late.dirs["a2"].Params.MaxRestarts)
}

// TestThoseWhoWaitHearOfARefusal, each of one node and reason once.
func TestThoseWhoWaitHearOfARefusal(t *testing.T) {
	s := newSim(t, Params{Min: 3, Max: 3})
	s.join("a", "b")
	before := s.dirs["a"].Seq
	for range 3 {
		require.ErrorIs(t, s.step(Join{Node: Node{ID: "x", Name: "x", Slots: 1}, Params: Params{Min: 2, Max: 2}}), ErrRefused)
	}
	for _, id := range []string{"a", "b"} {
		d := s.dirs[id]
		require.Equal(t, job.Wait, d.Kind)
		require.Equal(t, &job.Cause{
			Kind: job.CauseRefusal, Node: "x",
			Text: `node "x" was refused: --nnodes=2:2, but the run was opened with --nnodes=3:3; use the same option on ` +
				"every node",
		}, d.Cause)
	}
	require.Equal(t, before+3, max(s.dirs["a"].Seq, s.dirs["b"].Seq), "the arrival of b, and once for each")
	require.ErrorIs(t, s.step(Join{Node: Node{ID: "x", Name: "x", Slots: -1}, Params: s.p}), ErrRefused)
	require.Contains(t, s.dirs["a"].Cause.Text, "slot", "another reason")
	s.join("c")
	s.obey()
	require.Equal(t, job.Run, s.dirs["a"].Kind)
	seq := s.dirs["a"].Seq
	require.Error(t, s.step(Join{Node: Node{ID: "y", Name: "y", Slots: 1}, Params: Params{Min: 2, Max: 2}}))
	require.Equal(t, seq, s.dirs["a"].Seq, "nobody waits")
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

func TestStaticRanks(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, Static: true})
	s.joinNode(Node{ID: "one", Name: "one", Rank: 1, Slots: 2})
	err := s.step(Join{Node: Node{ID: "x", Name: "x", Rank: 1, Slots: 2}, Params: s.p})
	require.ErrorIs(t, err, ErrTaken, "it may be dead, so the answer is not final")
	require.ErrorContains(t, err, "by one")
	require.ErrorContains(t, s.step(Join{Node: Node{ID: "x", Name: "x", Rank: 2, Slots: 2}, Params: s.p}), "from 0 to 1")
	s.joinNode(Node{ID: "zero", Name: "zero", Rank: 0, Slots: 2})
	s.obey()
	require.Equal(t, "zero one", s.order())
}

func TestAbandonedRunStartsAfresh(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1, MaxRestarts: 1})
	s.join("a")
	s.obey()
	s.fail("a", RestartCharged)
	s.obey()
	s.vanish("a")
	s.pass(silentGrace)
	s.p.MaxRestarts = 2
	s.join("b")
	s.obey()
	require.Equal(t, 0, s.runs["b"].Place.RestartCount)
}

func TestDaemonWithoutMemoryRebuildsTheWorld(t *testing.T) {
	old := newSim(t, Params{Min: 1, Max: 3, MaxRestarts: 3})
	old.join("a", "b", "c")
	old.obey()
	old.fail("a", RestartCharged)
	old.obey()
	done := map[string]bool{}
	again := func(s *sim, id string) {
		run := old.runs[id]
		s.must(Join{
			Node: Node{ID: id, Name: id, Rank: -1, Slots: 2}, Params: s.p, Seen: run.EpochID,
			Resume: &Resume{EpochID: run.EpochID, Place: *run.Place, Done: done[id]},
		})
		s.must(Attach{ID: id})
		s.runs[id] = s.dirs[id]
	}
	t.Run("complete", func(t *testing.T) {
		s := newSim(t, old.p)
		again(s, "b")
		again(s, "a")
		s.pass(time.Second)
		again(s, "c")
		s.obey()
		require.Equal(t, "a b c", s.order())
		require.Equal(t, old.runs["c"].Place, s.dirs["c"].Place)
		require.Equal(t, [2]int{1, 1}, [2]int{s.dirs["a"].Round, s.dirs["a"].Epoch})
		s.fail("c", RestartCharged)
		s.obey()
		require.Equal(t, 2, s.runs["a"].Place.RestartCount, "the restart budget is remembered")
	})
	t.Run("one missing", func(t *testing.T) {
		s := newSim(t, old.p)
		again(s, "c")
		again(s, "a")
		s.pass(resumeWindow)
		s.obey()
		require.Equal(t, "a c", s.order())
		require.Equal(t, 2, s.runs["a"].Round)
	})
	t.Run("one had succeeded meanwhile", func(t *testing.T) {
		defer clear(done)
		done["b"] = true
		s := newSim(t, old.p)
		for _, id := range []string{"a", "b", "c"} {
			again(s, id)
		}
		s.succeed("a", "c")
		require.Equal(t, job.Done, s.dirs["b"].Kind)
	})
	t.Run("all had succeeded meanwhile", func(t *testing.T) {
		defer clear(done)
		s := newSim(t, old.p)
		for _, id := range []string{"a", "b", "c"} {
			done[id] = true
			again(s, id)
		}
		require.Equal(t, job.Done, s.dirs["a"].Kind)
	})
	t.Run("success while others are awaited", func(t *testing.T) {
		s := newSim(t, old.p)
		again(s, "a")
		s.succeed("a")
		again(s, "b")
		again(s, "c")
		s.succeed("b", "c")
		require.Equal(t, job.Done, s.dirs["a"].Kind)
	})
	t.Run("failure while others are awaited", func(t *testing.T) {
		s := newSim(t, old.p)
		again(s, "a")
		s.fail("a", Permanent)
		again(s, "b")
		again(s, "c")
		s.pass(attributionWindow)
		require.Equal(t, job.Fail, s.dirs["c"].Kind)
	})
	t.Run("failure before", func(t *testing.T) {
		s := newSim(t, old.p)
		run := old.runs["a"]
		s.must(Join{
			Node: Node{ID: "a", Name: "a", Rank: -1, Slots: 2}, Params: s.p,
			Resume: &Resume{
				EpochID: run.EpochID, Place: *run.Place, Decision: RestartCharged, Failures: []job.Failure{{Text: "a failed"}},
			},
		})
		again(s, "b")
		again(s, "c")
		s.obey()
		require.Equal(t, 2, s.runs["c"].Place.RestartCount, "it is charged")
	})
	t.Run("in the middle of a restart", func(t *testing.T) {
		s := newSim(t, old.p)
		run := old.runs["a"]
		s.must(Join{
			Node: Node{ID: "a", Name: "a", Rank: -1, Slots: 2}, Params: s.p, Stopped: run.EpochID, Seen: run.EpochID,
			Resume: &Resume{
				EpochID: run.EpochID, Place: *run.Place, Decision: RestartCharged, Failures: []job.Failure{{Text: "a failed"}},
			},
		})
		s.must(Attach{ID: "a"})
		again(s, "b")
		require.Equal(t, job.Run, s.dirs["a"].Kind)
		again(s, "c")
		require.Equal(t, job.Wait, s.dirs["a"].Kind, "it has stopped already")
		require.Equal(t, job.Stop, s.dirs["b"].Kind)
		s.obey()
		require.Equal(t, 2, s.runs["a"].Place.RestartCount)
		require.Equal(t, "a b c", s.order())
	})
	t.Run("all were stopping", func(t *testing.T) {
		for _, late := range []int{1, 3} { // how many have come back when the first has stopped
			s := newSim(t, old.p)
			ids := []string{"a", "b", "c"}
			for i, id := range ids {
				again(s, id)
				if i+1 == late {
					s.must(Join{Node: Node{ID: "a", Name: "a", Rank: -1, Slots: 2}, Params: s.p, Stopped: old.runs["a"].EpochID})
				}
			}
			require.Equal(t, job.Stop, s.dirs["b"].Kind)
			require.Equal(t, job.Wait, s.dirs["a"].Kind)
			s.obey()
			require.Equal(t, "a b c", s.order())
			require.Equal(t, 1, s.runs["b"].Place.RestartCount, "what the old daemon had decided is not charged twice")
		}
	})
	t.Run("the next epoch has a name of its own", func(t *testing.T) {
		s := newSim(t, old.p)
		for _, id := range []string{"a", "b", "c"} {
			again(s, id)
		}
		before := old.runs["a"].EpochID
		s.must(Failing{ID: "a", EpochID: before, Decision: RestartCharged})
		s.obey()
		after := s.runs["a"].EpochID
		require.NotEqual(t, before.Term, after.Term, "the daemon that died may have announced the next epoch of its own term")
		require.True(t, after.Newer(before))
		s.must(Failing{ID: "a", EpochID: after, Decision: RestartCharged})
		s.obey()
		require.Equal(t, after.Term, s.runs["a"].Term)
	})
	t.Run("a former member comes before the newer world", func(t *testing.T) {
		s := newSim(t, old.p)
		run := old.runs["a"]
		former := job.EpochID{Term: run.Term, Round: run.Round}
		place := job.Place{GroupRank: 1, GroupWorldSize: 2, WorldSize: 4}
		s.must(Join{
			Node: Node{ID: "x", Name: "x", Rank: -1, Slots: 2}, Params: s.p, Stopped: former, Seen: former,
			Resume: &Resume{EpochID: former, Place: place},
		})
		s.must(Attach{ID: "x"})
		for _, id := range []string{"a", "b", "c"} {
			again(s, id)
		}
		require.Equal(t, "a b c", s.order())
		require.Equal(t, job.Wait, s.dirs["x"].Kind)
	})
	t.Run("a report of the old history does not touch a new one", func(t *testing.T) {
		s := newSim(t, Params{Min: 1, Max: 1})
		s.join("a")
		s.obey()
		s.must(Success{ID: "a", EpochID: job.EpochID{Term: 7, Round: 1}})
		require.Equal(t, job.Run, s.dirs["a"].Kind)
	})
	t.Run("a spare does not take the world's place", func(t *testing.T) {
		s := newSim(t, Params{Min: 1, Max: 1})
		s.must(Join{
			Node: Node{ID: "spare", Name: "spare", Rank: -1, Slots: 2}, Params: s.p,
			Seen: job.EpochID{Term: 1, Round: 1}, Restarts: 2,
		})
		s.must(Attach{ID: "spare"})
		require.Equal(t, job.Wait, s.dirs["spare"].Kind)
		s.pass(resumeWindow)
		s.obey()
		require.Equal(t, 2, s.runs["spare"].Place.RestartCount, "nobody came back; what was spent is remembered")
	})
	t.Run("a late comer's history counts", func(t *testing.T) {
		s := newSim(t, Params{Min: 1, Max: 2, MaxRestarts: 5})
		s.join("x")
		s.pass(defaultLastCall)
		s.obey()
		s.must(Join{
			Node: Node{ID: "a", Name: "a", Rank: -1, Slots: 2}, Params: s.p, Seen: job.EpochID{Term: 1, Round: 4}, Restarts: 3,
		})
		s.must(Attach{ID: "a"})
		s.obey()
		require.Equal(t, 3, s.runs["a"].Place.RestartCount)
	})
	t.Run("a member that leaves is not waited for", func(t *testing.T) {
		s := newSim(t, old.p)
		again(s, "a")
		again(s, "b")
		s.must(Leave{ID: "b"})
		delete(s.dirs, "b")
		delete(s.runs, "b")
		s.pass(BrokenGrace)
		s.obey()
		require.Equal(t, "a", s.order())
	})
	t.Run("a foreign world is not adopted", func(t *testing.T) {
		s := newSim(t, old.p)
		s.join("x", "y", "z")
		s.obey()
		again(s, "a")
		require.Equal(t, job.Wait, s.dirs["a"].Kind)
	})
}

func TestEvidenceIsBounded(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1})
	s.join("a")
	s.obey()
	fs := make([]job.Failure, 10_000)
	for i := range fs {
		fs[i].Rank = i
	}
	s.must(Failing{ID: "a", EpochID: s.runs["a"].EpochID, Decision: Permanent, Failures: fs})
	require.Len(t, s.r.epoch.kept.failures, maxKept)
	require.Len(t, s.r.Evidence().Failures, maxTold)
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

// A node that has only just joined, or is silent for a moment, holds its rank.
func TestSilentNodeKeepsItsRank(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, Static: true})
	zero := func(id string) Join { return Join{Node: Node{ID: id, Name: id, Rank: 0, Slots: 2}, Params: s.p} }
	s.must(zero("a"))
	require.ErrorIs(t, s.step(zero("b")), ErrTaken)
	s.must(Attach{ID: "a"})
	s.must(Detach{ID: "a"})
	require.ErrorIs(t, s.step(zero("b")), ErrTaken)
}

// A hold that is over is not named again by Next, nor is a last call that ends within it.
func TestNextNeverNamesThePast(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 4, LastCall: time.Minute})
	s.must(Join{Node: Node{ID: "a", Name: "a", Rank: -1, Slots: 2}, Params: s.p, Seen: job.EpochID{Term: 1, Round: 1}})
	s.must(Attach{ID: "a"})
	s.pass(resumeWindow)
	require.Equal(t, s.now.Add(DefaultJoinTimeout), s.r.Next(), "the hold is no join time")
	s.must(Join{Node: Node{ID: "b", Name: "b", Rank: -1, Slots: 2}, Params: s.p, Seen: job.EpochID{Term: 1, Round: 1}})
	s.must(Attach{ID: "b"})
	require.Zero(t, s.r.memory.holdAt, "held once")

	s = newSim(t, Params{Min: 1, Max: 4, LastCall: time.Minute})
	s.join("a")
	s.pass(time.Minute - time.Second)
	s.must(Join{Node: Node{ID: "b", Name: "b", Rank: -1, Slots: 2}, Params: s.p, Seen: job.EpochID{Term: 1, Round: 1}})
	s.must(Attach{ID: "b"})
	s.pass(time.Second)
	require.Equal(t, s.now.Add(resumeWindow-time.Second), s.r.Next())
	s.pass(resumeWindow)
	s.obey()
	require.Equal(t, "a b", s.order())
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

// Where nobody says how many nodes come, a first world waits only as long as they keep coming.
func TestLastCallEndsWhenNobodyComes(t *testing.T) {
	quiet := Params{Min: 2, Max: 8, Quiet: 2 * time.Second}
	promised, more, many := quiet, quiet, quiet
	promised.Promised, more.Promised, many.Max = 4, 99, 99
	every := func(d time.Duration, n int) (ds []time.Duration) {
		for range n {
			ds = append(ds, d)
		}
		return ds
	}
	for name, c := range map[string]struct {
		p     Params
		gaps  []time.Duration // between the arrivals of nodes
		after time.Duration   // the last one the world is sealed
		size  int
	}{
		"two":                        {quiet, every(0, 1), 2 * time.Second, 2},
		"milliseconds apart":         {quiet, every(time.Millisecond, 5), 2 * time.Second, 6},
		"seconds apart":              {quiet, every(1900*time.Millisecond, 4), 2 * time.Second, 5},
		"the second is late":         {quiet, []time.Duration{time.Minute, time.Second}, 2 * time.Second, 3},
		"all":                        {quiet, every(time.Second, 7), 0, 8},
		"they keep coming":           {many, every(1500*time.Millisecond, 21), 0, 21},
		"promised, and there":        {promised, every(5*time.Second, 3), 2 * time.Second, 4},
		"promised, and more come":    {promised, append(every(5*time.Second, 3), time.Second), 2 * time.Second, 5},
		"promised, and one missing":  {promised, every(5*time.Second, 2), 25 * time.Second, 3},
		"more are promised than fit": {more, every(time.Second, 3), 28 * time.Second, 4},
		"no quiet":                   {Params{Min: 2, Max: 8, Promised: 2}, every(time.Second, 2), 29 * time.Second, 3},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, c.p)
			s.join("n00")
			for i, gap := range c.gaps {
				s.pass(gap)
				s.join(fmt.Sprintf("n%02d", i+1))
			}
			if c.after > 0 {
				s.pass(c.after - time.Millisecond)
				require.Zero(t, s.r.epoch.workers)
				next := s.r.Next()
				require.Equal(t, s.now.Add(time.Millisecond), next, "the Round wants to be asked then")
				s.pass(time.Millisecond)
			}
			s.obey()
			require.Len(t, s.runs, c.size)
		})
	}
}

// So it does when a world that has been too small is mended.
func TestShortLastCallAfterAShortage(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 4, Quiet: 2 * time.Second})
	s.join("a", "b")
	s.pass(2 * time.Second)
	s.obey()
	s.vanish("b")
	s.pass(BrokenGrace)
	s.obey()
	s.pass(time.Minute)
	s.join("c")
	s.pass(2*time.Second - 1)
	require.Equal(t, job.Wait, s.dirs["a"].Kind)
	s.pass(1)
	s.obey()
	require.Equal(t, "a c", s.order())
}

// A world that has been too small makes a last call for those who come to mend it.
func TestLastCallAfterAShortage(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 4})
	s.join("a", "b")
	s.pass(defaultLastCall)
	s.obey()
	s.vanish("b")
	s.pass(BrokenGrace)
	s.obey()
	s.join("c")
	require.Equal(t, job.Wait, s.dirs["a"].Kind)
	s.pass(defaultLastCall - 1)
	s.join("d")
	s.pass(1)
	s.obey()
	require.Equal(t, "a c d", s.order())
}

func TestStatusOfNodes(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	require.True(t, s.r.Size() == 0)
	s.join("b", "a", "spare")
	require.False(t, s.r.Size() == 0)
	require.Equal(t, 3, s.r.Size())
	s.obey()
	s.must(Detach{ID: "a", Broken: true})
	s.must(Detach{ID: "spare"})
	at := time.Unix(1000, 0).UTC()
	require.Equal(t, []NodeStatus{
		{Name: "b", State: "member", GroupRank: 0, Slots: 2, Connected: true, Since: at},
		{Name: "a", State: "member", GroupRank: 1, Slots: 2, Suspect: true, Since: at},
		{Name: "spare", State: "waiting", GroupRank: -1, Slots: 2, Since: at},
	}, s.r.Nodes())
	st := s.r.Status()
	require.Equal(t, []int{2, 1, 4}, []int{st.Members, st.Waiting, st.WorldSize})
	_, err := s.r.Member("x")
	require.ErrorIs(t, err, ErrUnknownNode)
}

// Restarts of a node are those of its own workers; a newcomer has none.
func TestNodesCountTheirRestarts(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 3, MaxRestarts: 3, GrowthDelay: 1})
	s.join("a", "b")
	s.pass(time.Minute)
	s.obey()
	s.fail("a", RestartCharged)
	s.obey()
	s.join("c")
	s.pass(time.Minute)
	s.obey()
	restarts := map[string]int{}
	for _, n := range s.r.Nodes() {
		restarts[n.Name] = n.Restarts
	}
	require.Equal(t, map[string]int{"a": 2, "b": 2, "c": 0}, restarts)
}

// The join timeout begins when the last workers have stopped.
func TestJoinTimeoutAfterASlowStop(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 1, JoinTimeout: 5 * time.Second})
	s.join("a", "b")
	s.obey()
	s.fail("a", RestartCharged)
	s.obeyOne("a")
	s.pass(30 * time.Second)
	s.must(Leave{ID: "b"})
	s.pass(5*time.Second - 1)
	require.Equal(t, job.Wait, s.dirs["a"].Kind)
	s.pass(1)
	require.Equal(t, job.Fail, s.dirs["a"].Kind)
}

// A member that leaves while its world is being rebuilt is missed, whoever comes later.
func TestMemberLeavesARebuiltWorld(t *testing.T) {
	v := world(t, Params{Min: 2, Max: 3}, "a", "b", "c").revive()
	v.comeBack("a", "b")
	v.must(Leave{ID: "b"})
	require.Empty(t, v.r.epoch.kept.losses, "nothing is sealed that it could break")
	delete(v.dirs, "b")
	delete(v.runs, "b")
	v.comeBack("c")
	require.Equal(t, forming, v.r.epoch.phase)
	v.pass(BrokenGrace)
	v.obey()
	require.Equal(t, "a c", v.order())
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
	s.pass(silentGrace)
	s.obey()
	require.Equal(t, "a b c", s.order())
	require.Equal(t, 1, s.runs["a"].Place.RestartCount)
	s.ordered(OrderRestart, "")
	s.fail("a", Permanent)
	s.pass(silentGrace)
	s.obey()
	require.Equal(t, "a b c", s.order(), "workers that die of being stopped prove nothing")
}

// Wishes count more than the ranks of the world before.
func TestWishedRanksDecideAgain(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 3})
	s.joinNode(Node{ID: "b", Name: "b", Rank: 1, Slots: 2})
	s.joinNode(Node{ID: "c", Name: "c", Rank: 2, Slots: 2})
	s.pass(defaultLastCall)
	s.obey()
	require.Equal(t, "b c", s.order())
	s.joinNode(Node{ID: "a", Name: "a", Rank: 0, Slots: 2})
	s.obey()
	require.Equal(t, "a b c", s.order())
}

// They decide only when everybody has one: a newcomer without a wish displaces nobody.
func TestANewcomerWithoutAWishIsTheLast(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 3})
	s.joinNode(Node{ID: "a", Name: "a", Rank: 1, Slots: 2})
	s.joinNode(Node{ID: "b", Name: "b", Rank: 0, Slots: 2})
	s.pass(defaultLastCall)
	s.obey()
	require.Equal(t, "b a", s.order())
	s.join("c")
	s.obey()
	require.Equal(t, "b a c", s.order())
}

// Places that cannot be of the world that is being rebuilt are not given back.
func TestRebuiltWorldRefusesWhatDoesNotFit(t *testing.T) {
	old := world(t, Params{Min: 1, Max: 3}, "a", "b", "c")
	for name, change := range map[string]func(*Resume){
		"another size":  func(e *Resume) { e.Place.GroupWorldSize = 5 },
		"a taken place": func(e *Resume) { e.Place.GroupRank = 0 },
		"another epoch": func(e *Resume) { e.Epoch++ },
		"no place":      func(e *Resume) { e.Place = job.Place{} },
		"no such place": func(e *Resume) { e.Place.GroupRank = 3 },
	} {
		t.Run(name, func(t *testing.T) {
			v := old.revive()
			v.comeBack("a")
			e := &Resume{EpochID: old.r.epoch.id, Place: *old.runs["b"].Place}
			change(e)
			v.must(Join{Node: Node{ID: "b", Name: "b", Rank: -1, Slots: 2}, Params: v.p, Seen: old.r.epoch.id, Resume: e})
			require.Equal(t, "a:run b:wait", v.kinds())
		})
	}
}

func TestEvidenceOfAnEnd(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 3, MaxRestarts: 5})
	s.join("a", "b", "c")
	s.obey()
	s.vanish("b")
	away := s.now
	s.pass(BrokenGrace)
	s.now = s.now.Add(time.Millisecond)
	s.must(Leave{ID: "c"})
	left := s.now
	s.fail("a", RestartCharged)
	s.fail("a", RestartCharged)
	ev := s.r.Evidence()
	require.Len(t, ev.Failures, 1, "one for a worker")
	require.Equal(t, []time.Time{away, left}, []time.Time{ev.Losses[0].At, ev.Losses[1].At}, "not when patience ran out")
}

func TestPlausiblePlaces(t *testing.T) {
	require.True(t, plausible(job.Place{GroupWorldSize: 1}))
	require.True(t, plausible(job.Place{GroupWorldSize: MaxNodes, GroupRank: MaxNodes - 1}))
	for _, p := range []job.Place{{}, {GroupWorldSize: MaxNodes + 1}, {GroupWorldSize: 2, GroupRank: 2},
		{GroupWorldSize: 2, GroupRank: -1}} {
		require.False(t, plausible(p), "%+v", p)
	}
}

// TestRandomHistories runs random clusters and holds the rules that no history may break.
func TestRandomHistories(t *testing.T) {
	for seed := range int64(300) {
		history(t, rand.New(rand.NewSource(seed)), 200)
	}
}

func FuzzHistory(f *testing.F) {
	f.Add(int64(1), 50)
	f.Fuzz(func(t *testing.T, seed int64, steps int) {
		history(t, rand.New(rand.NewSource(seed)), min(max(steps, 0), 400))
	})
}

func history(t testing.TB, rnd *rand.Rand, steps int) {
	p := Params{
		Min: 1 + rnd.Intn(3), Unit: 1 + rnd.Intn(2), MaxRestarts: rnd.Intn(4),
		Gate: rnd.Intn(2) == 0, GateTimeout: 20 * time.Second,
	}
	p.Max = p.Min + rnd.Intn(5)
	p.Static = p.Max == p.Min
	if p.Validate() != nil {
		return
	}
	s := newSim(t, p)
	s.r.cfg.Suspicious = func(e job.Evidence) string {
		if len(e.Losses) > 1 || len(e.Failures) == 2 {
			return "two at once"
		}
		return ""
	}
	s.r.cfg.Suspect = func(machine string) bool { return machine[len(machine)-1]%3 == 0 }
	for i := range steps {
		s.random(rnd, i)
		s.check()
	}
	s.calmDown()
}

// calmDown stops all faults: the run must reach an end, or a running world, or lack
// the nodes for one. Nobody may wait for nothing.
func (s *sim) calmDown() {
	clear(s.health)
	_ = s.step(Order{Kind: OrderResume})
	for _, name := range sortedKeys(s.r.orders.bars) {
		_ = s.step(Order{Kind: OrderUnbar, Node: name})
	}
	for range 3 {
		s.obey()
		s.pass(defaultLastCall + silentGrace)
		s.obey()
	}
	s.check()
	r := s.r
	switch r.epoch.phase {
	case finished:
	case forming:
		require.Zero(s.t, r.members.stopping, "someone is waited for")
		require.Less(s.t, s.p.floor(r.members.possible()), s.p.Min, "there are nodes for a world")
	case running:
		for _, n := range r.epoch.world {
			if n.state == member {
				require.Contains(s.t, s.runs, n.ID, "everyone in the world runs")
			}
		}
	default:
		require.Fail(s.t, "stuck", "phase %s", r.epoch.phase)
	}
}

func FuzzParseTopology(f *testing.F) {
	f.Add("asw0 psw0 10.0.0.1\n# comment\n\nasw1 psw0 10.0.0.2\n")
	f.Add("a b\n")
	f.Fuzz(func(t *testing.T, text string) {
		topo, err := ParseTopology(strings.NewReader(text))
		if err != nil {
			return
		}
		for ip, asw := range topo {
			require.NotEmpty(t, asw)
			require.Contains(t, text, ip)
		}
	})
}

func (s *sim) random(rnd *rand.Rand, i int) {
	ids := sortedKeys(s.dirs)
	pick := func() string { return ids[rnd.Intn(len(ids))] }
	switch k := rnd.Intn(15); {
	case k < 3 && len(ids) < 12:
		s.randomJoin(rnd, i)
	case k == 12:
		s.randomOrder(rnd)
	case k == 13 && len(ids) > 0:
		s.randomAnswer(rnd, pick())
	case k == 14 && rnd.Intn(10) == 0:
		s.newDaemon(rnd)
	case k < 7 && len(ids) > 0:
		if id := pick(); s.r.members.nodes[id] != nil {
			s.obeyOne(id)
		}
	case k == 7 && len(s.runs) > 0:
		s.fail(sortedKeys(s.runs)[rnd.Intn(len(s.runs))],
			[]Decision{RestartCharged, RestartFree, Permanent}[min(rnd.Intn(8), 2)])
	case k == 8 && len(ids) > 0:
		if id := pick(); s.r.members.nodes[id] != nil {
			s.vanish(id)
		}
	case k == 9 && len(ids) > 0:
		if id := pick(); s.r.members.nodes[id] != nil {
			s.must(Leave{ID: id})
			delete(s.dirs, id)
			delete(s.runs, id)
		}
	case k == 10 && len(s.runs) > 0:
		if id := sortedKeys(s.runs)[rnd.Intn(len(s.runs))]; s.r.members.nodes[id] != nil {
			s.succeed(id)
		}
	default:
		s.pass(time.Duration(rnd.Int63n(int64(5 * time.Second))))
	}
	for id := range s.dirs { // what is lost does not listen any more
		if s.r.members.nodes[id] == nil {
			delete(s.dirs, id)
			delete(s.runs, id)
		}
	}
}

// randomJoin brings a node with one of a few names, so that names are replaced, and repeated.
func (s *sim) randomJoin(rnd *rand.Rand, i int) {
	n := Node{ID: fmt.Sprintf("n%d", i), Name: fmt.Sprint("name", rnd.Intn(20)), Rank: rnd.Intn(4) - 1, Slots: 2}
	if rnd.Intn(8) == 0 {
		n.Slots = 0
	}
	if rnd.Intn(4) > 0 {
		n.Can = []Ability{CanGate}
	}
	s.health[n.ID] = checkOutcome(max(rnd.Intn(8)-3, 0))
	if s.step(Join{Node: n, Params: s.p}) == nil {
		s.must(Attach{ID: n.ID})
	}
}

func (s *sim) randomOrder(rnd *rand.Rand) {
	kinds := []OrderKind{OrderRestart, OrderBar, OrderUnbar, OrderUnbar, OrderPause, OrderResume, OrderResume}
	o := Order{Kind: kinds[rnd.Intn(len(kinds))], Charge: rnd.Intn(2) == 0}
	if rnd.Intn(50) == 0 {
		o.Kind = OrderStop
	}
	if o.Kind == OrderBar || o.Kind == OrderUnbar {
		o.Node = fmt.Sprint("name", rnd.Intn(20))
	}
	_ = s.step(o) // some are refused
}

// randomAnswer answers a check that was perhaps never asked for.
func (s *sim) randomAnswer(rnd *rand.Rand, id string) {
	switch {
	case s.r.members.nodes[id] == nil:
	case rnd.Intn(3) == 0:
		s.must(Barred{ID: id, Reason: "at random", Again: rnd.Intn(2) == 0})
	case rnd.Intn(3) == 0:
		s.must(Doubt{ID: id, Reason: "at random"})
	case rnd.Intn(3) == 0:
		s.must(Cleared{ID: id, Until: s.now})
	default:
		s.must(Cleared{ID: id, Until: s.now.Add(time.Duration(rnd.Int63n(int64(20 * time.Second))))})
	}
}

// newDaemon starts the daemon again; most nodes come back, in any order.
func (s *sim) newDaemon(rnd *rand.Rand) {
	v := &revived{sim: s, old: &sim{r: s.r, dirs: s.dirs, runs: maps.Clone(s.runs), worked: s.worked}}
	clear(s.awaited)
	cfg := Config{Term: s.r.out.seq + 1000, Suspicious: s.r.cfg.Suspicious, Suspect: s.r.cfg.Suspect}
	s.r, s.dirs = New(cfg), map[string]Directive{}
	ids := sortedKeys(v.old.dirs)
	rnd.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	for _, id := range ids {
		if k := v.old.dirs[id].Kind; v.old.r.members.nodes[id] == nil || k == job.Done || k == job.Fail || rnd.Intn(10) == 0 {
			delete(s.runs, id)
			continue
		}
		v.comeBack(id)
		s.check()
	}
}

// check holds the rules between two events.
func (s *sim) check() {
	r := s.r
	counts := map[nodeState]int{}
	seconds := 0
	for _, n := range r.members.nodes {
		counts[n.state]++
		if n.state == checking && n.bar != nil || n.state == barred && n.again {
			seconds++
		}
		s.checkNode(n)
	}
	if r.epoch.phase != finished {
		require.Equal(s.t, counts[pending], r.members.stopping)
		require.Equal(s.t, counts[waiting], r.members.waiting)
		require.Equal(s.t, seconds, r.members.again)
		require.Equal(s.t, counts[checking]+counts[barred], r.members.checking+r.members.again+r.members.barred)
	}
	s.checkPasses()
	if r.epoch.phase == gating {
		require.Zero(s.t, r.members.stopping)
		require.NotZero(s.t, r.members.checking+r.members.again, "somebody's answer is awaited")
	}
	if r.orders.paused != nil {
		require.Equal(s.t, forming, r.epoch.phase)
	}
	if r.epoch.phase == running || r.epoch.phase == releasing {
		size := len(r.epoch.world)
		require.True(s.t, size >= s.p.Min && size <= s.p.Max && size%s.p.Unit == 0, "world of %d under %+v", size, s.p)
		working := 0
		for i, n := range r.epoch.world {
			require.Equal(s.t, i, n.rank)
			working += min(n.Slots, 1)
		}
		require.Equal(s.t, working, r.epoch.working)
	}
	for id, d := range s.runs { // no worker of an older epoch runs beside a released one
		if n := r.members.nodes[id]; n != nil && r.epoch.phase == running && n.state == member {
			require.Equal(s.t, r.epoch.id, d.EpochID, "node %s", id)
		}
	}
}

// checkPasses holds what is kept about checks, and that it is acted upon in time.
func (s *sim) checkPasses() {
	r := s.r
	for _, n := range r.members.nodes {
		require.False(s.t, n.optional && (n.state != waiting || n.dir.Kind != job.Check),
			"%s has an optional check: %s", n.ID, n.state)
		require.Equal(s.t, s.awaited[n.ID], s.member(n.ID).Asked, "who checks node %s knows when it shall not", n.ID)
		require.False(s.t, n.unpaired && !n.cleared, "node %s has passed alone, and has not", n.ID)
	}
	free := r.orders.paused == nil && r.memory.rebuild == nil && r.account.failPendingAt.IsZero()
	if !r.gate.failAt.IsZero() && r.epoch.phase != finished && free {
		waits := r.params.Static && r.shortage.failed() && r.members.checking > 0 && s.now.Before(r.gate.failAt)
		require.True(s.t, waits, "the run should have ended")
	}
	if r.epoch.phase == running || r.epoch.phase == releasing {
		require.Nil(s.t, r.shortage.lacking)
		require.False(s.t, r.epoch.sealedAt.IsZero(), "the clocks of the members' passes run")
	}
}

func (s *sim) checkNode(n *node) {
	r := s.r
	if r.memory.rebuild != nil || r.epoch.phase == finished {
		return
	}
	out := r.orders.bars[n.Name] != nil || n.bar != nil
	switch {
	case out && (n.state == member || n.state == waiting):
		require.Fail(s.t, "a barred node has workers, or may get some", "%s: %s", n.ID, n.state)
	case !out && n.state == barred:
		require.Fail(s.t, "a node is barred by nobody", n.ID)
	case r.orders.paused != nil && (n.dir.Kind == job.Run || n.dir.Kind == job.Lead || n.dir.Kind == job.Check):
		require.Fail(s.t, "the run is paused", "%s: %s", n.ID, n.dir.Kind)
	case !s.p.Gate && n.state == checking:
		require.Fail(s.t, "the run has no gate", n.ID)
	}
}
