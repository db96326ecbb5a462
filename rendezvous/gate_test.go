package rendezvous

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

// checkOutcome is what a node in a sim says when it is told to Check; by default its check passes.
type checkOutcome int

const (
	healthy checkOutcome = iota
	broken
	mute
	alone // nobody to pair it with
)

// answer lets a node answer its newest Check. It reports whether it said something.
func (s *sim) answer(id string) bool {
	s.t.Helper()
	if s.answered[id] == s.dirs[id].Seq || s.health[id] == mute {
		return false
	}
	s.answered[id] = s.dirs[id].Seq
	switch s.health[id] {
	case broken:
		s.must(Barred{ID: id, Reason: "gpu 3 is gone"})
	case alone:
		s.must(Cleared{ID: id, Until: s.now})
	default:
		s.must(Cleared{ID: id})
	}
	return true
}

// holdActions holds the rules of the actions of one step.
func (s *sim) holdActions(acts []Action) {
	var told []string
	for _, a := range acts {
		if a.Note != nil {
			delete(s.awaited, a.Note.ID) // it has gone
		}
	}
	gate := s.holdGate(acts)
	newest := map[string]Directive{}
	var ids []string
	for _, a := range acts {
		if d := a.Directive; d != nil {
			ids, newest[a.Node] = append(ids, a.Node), *d
			if n := s.r.members.nodes[a.Node]; n != nil && !n.can(CanGate) {
				require.NotContains(s.t, []job.Kind{job.Check, job.Bar}, d.Kind, "node %s does not know it", a.Node)
			}
		}
		if a.Ended != nil {
			s.ended = append(s.ended, *a.Ended)
		}
		if a.Note != nil {
			s.log = append(s.log, *a.Note)
			s.holdSeal(*a.Note)
		}
	}
	slices.Sort(ids)
	for _, id := range slices.Compact(ids) {
		if n := s.r.members.nodes[id]; newest[id].Kind == job.Check && n != nil && n.state != leaving {
			told = append(told, id)
		}
	}
	slices.Sort(gate)
	require.Equal(s.t, told, gate, "the shell hears of exactly those who have been told to check")
}

// holdGate holds who may be told to Check: nobody with a pass that counts, but as a helper.
func (s *sim) holdGate(acts []Action) (gate []string) {
	for _, a := range acts {
		n := s.r.members.nodes[a.Node]
		if d := a.Directive; d != nil && d.Kind == job.Check && n != nil && n.state != leaving {
			s.awaited[a.Node] = true // a later directive of this step may release it
		}
		gate = append(append(gate, a.Gate...), a.Helpers...)
		if len(a.Released) > 0 {
			s.freed = a.Released
		}
		for _, id := range a.Released {
			require.True(s.t, s.awaited[id], "node %s was not told to check", id)
			require.NotEqual(s.t, job.Check, s.r.members.nodes[id].dir.Kind, id)
			delete(s.awaited, id)
		}
		for _, id := range slices.Concat(a.Gate, a.Helpers) {
			s.awaited[id] = true
		}
		for _, id := range a.Gate {
			n := s.r.members.nodes[id]
			s.checked[id] = append(s.checked[id], n.dir.Seq)
			require.True(s.t, s.r.checks.mustCheck(s.now, n) || n.bar != nil, "node %s is checked for nothing", id)
			require.True(s.t, n.state == checking || n.optional && n.unpaired, "node %s: %s", id, n.state)
		}
		for _, id := range a.Helpers {
			n := s.r.members.nodes[id]
			require.False(s.t, s.r.checks.mustCheck(s.now, n), "helper %s has no pass", id)
			require.True(s.t, n.state == waiting && n.optional && n.can(CanGate), "helper %s: %s", id, n.state)
		}
		require.LessOrEqual(s.t, len(a.Helpers), 4*(s.r.members.checking+s.r.members.again)+4)
	}
	return gate
}

// holdSeal: in the world of a run with a gate everyone is cleared or cannot gate, unless the gate has just opened
// without all answers; and nobody in it is barred.
func (s *sim) holdSeal(n Note) {
	s.opened = s.opened && n.Event != "gate" || n.Event == "gate-opened"
	if n.Event != "seal" || n.Text != "" { // by an earlier daemon
		return
	}
	require.Nil(s.t, s.r.orders.paused)
	for _, m := range s.r.epoch.world {
		if s.r.params.Gate && !s.opened {
			require.True(s.t, m.cleared || !m.can(CanGate), "node %s has not been cleared", m.ID)
		}
	}
	require.Len(s.t, n.Members, len(s.r.epoch.world))
	s.opened = false
}

// gated is a sim whose run has a gate and whose nodes know it.
func gated(t testing.TB, p Params) *sim {
	p.Gate = true
	s := newSim(t, p)
	s.can = []Ability{CanGate}
	return s
}

// kinds lists what the nodes have been told: "a:check b:wait".
func (s *sim) kinds() string {
	var out []string
	for _, id := range sortedKeys(s.dirs) {
		out = append(out, fmt.Sprintf("%s:%s", id, s.dirs[id].Kind))
	}
	return strings.Join(out, " ")
}

func (s *sim) clear(ids ...string) {
	s.t.Helper()
	for _, id := range ids {
		s.must(Cleared{ID: id})
	}
}

func (s *sim) notes(event job.Event) (ns []Note) {
	for _, n := range s.log {
		if n.Event == event {
			ns = append(ns, n)
		}
	}
	return ns
}

func TestGateOpensWhenAllAreCleared(t *testing.T) {
	s := gated(t, Params{Min: 3, Max: 3})
	s.join("a", "b")
	require.Equal(t, "a:wait b:wait", s.kinds(), "there is no world yet that could be sealed")
	s.join("c")
	require.Equal(t, "a:check b:check c:check", s.kinds())
	require.Equal(t, "gating", s.r.Status().Phase)
	require.Equal(t, 3, s.r.Status().Waiting)
	require.Equal(t, 0, s.r.Status().Members)
	s.clear("a", "c")
	require.Equal(t, "a:check b:check c:check", s.kinds(), "a cleared node is told to run soon, and nothing before")
	s.clear("b")
	require.Equal(t, "a:lead b:check c:check", s.kinds())
	s.obey()
	require.Equal(t, "a b c", s.order())

	s.p.MaxRestarts = 0
	s.fail("a", RestartFree)
	s.obey()
	require.Equal(t, "a b c", s.order(), "a clearance holds; nobody is checked for an epoch")
	require.Equal(t, 1, s.runs["a"].Epoch)
}

func TestWithoutAGateNobodyIsChecked(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.can = []Ability{CanGate}
	s.join("a", "b")
	s.must(Barred{ID: "b", Reason: "nobody has asked"})
	s.must(Cleared{ID: "a"})
	s.obey()
	require.Equal(t, "a b", s.order())
}

func TestNodesThatCannotGateCountAsCleared(t *testing.T) {
	s := gated(t, Params{Min: 3, Max: 3})
	s.join("a", "b")
	s.can = nil
	s.join("old")
	require.Equal(t, "a:check b:check old:wait", s.kinds())
	s.must(Barred{ID: "old", Reason: "who says so?"})
	s.clear("a", "b")
	s.obey()
	require.Equal(t, "a b old", s.order())
}

func TestOneBarredSpareReplacesIt(t *testing.T) {
	s := gated(t, Params{Min: 3, Max: 3})
	s.health["b"] = broken
	s.join("a", "b", "c", "spare")
	require.Equal(t, "a:check b:check c:check spare:check", s.kinds(),
		"who comes while the gate is closed is checked, too")
	s.must(Barred{ID: "b", Reason: "gpu 3 is gone"})
	require.Equal(t, job.Bar, s.dirs["b"].Kind)
	require.Equal(t, &job.Cause{Kind: job.CauseCheck, Node: "b", Text: "gpu 3 is gone"}, s.dirs["b"].Cause)
	require.Len(t, s.notes("barred"), 1)
	seq := s.r.out.seq
	s.must(Barred{ID: "b", Reason: "gpu 4, too"})
	require.Equal(t, seq, s.r.out.seq, "it is barred already")
	s.clear("a", "c", "spare")
	s.obey()
	require.Equal(t, "a c spare", s.order())
	require.Equal(t, job.Bar, s.dirs["b"].Kind)
	for _, n := range s.r.Nodes() {
		if n.Name == "b" {
			require.Equal(t, "barred", n.State)
			require.Equal(t, job.CauseCheck, n.Barred.Kind)
		}
	}
}

// The smaller world is sealed as soon as no answer can make it larger; nobody is stopped for a node that is barred.
func TestElasticWorldGoesWithoutTheBarred(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 4})
	s.health["b"] = broken
	s.join("a", "b", "c", "d")
	s.clear("a", "c")
	require.Equal(t, gating, s.r.epoch.phase, "b and d may make it larger")
	s.obey()
	require.Equal(t, "a c d", s.order())
	s.clear("b") // somebody has mended it
	require.Equal(t, job.Wait, s.dirs["b"].Kind)
	s.pass(defaultGrowthDelay)
	s.obey()
	require.Len(t, s.runs, 4)
}

// A check that proves nothing is no reason to hold others up, and none to throw the node out.
func TestUndecidedNodeWaitsBesideTheWorld(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 4, MaxRestarts: 1})
	s.join("a", "b", "c", "d")
	s.must(Barred{ID: "c", Reason: "its time was over", Again: true})
	require.Equal(t, job.Wait, s.dirs["c"].Kind, "its launcher stays")
	require.Equal(t, job.CauseCheck, s.dirs["c"].Cause.Kind)
	require.Len(t, s.notes("undecided"), 1)
	require.Empty(t, s.notes("barred"), "which would mark it")
	s.clear("a", "b", "d")
	s.obey()
	require.Equal(t, "a b d", s.order())
	s.pass(defaultGrowthDelay)
	require.Equal(t, running, s.r.epoch.phase, "no worker is stopped for it")
	s.fail("b", RestartCharged)
	s.obey() // its check passes this time
	require.Equal(t, "a b d c", s.order(), "the next gate has checked it again")
}

// Where there is no world without it, it is checked again, with helpers.
func TestUndecidedNodeThatIsNeededIsCheckedAgain(t *testing.T) {
	undecided := Barred{ID: "c", Reason: "1 of its 1 tests has failed", Again: true}
	for _, passes := range []int{1, maxRechecks, maxRechecks + 1} {
		s := gated(t, Params{Min: 3, Max: 3, JoinTimeout: time.Minute})
		s.join("a", "b", "c")
		s.clear("a", "b")
		for range min(passes, maxRechecks) {
			s.must(undecided)
			require.Equal(t, gating, s.r.epoch.phase)
			require.Equal(t, "a:check b:check c:check", s.kinds())
		}
		if passes <= maxRechecks {
			s.clear("c")
			s.obey()
			require.Equal(t, "a b c", s.order())
			continue
		}
		s.must(undecided)
		require.Equal(t, job.Bar, s.dirs["c"].Kind)
		require.Len(t, s.notes("too-few"), 1)
		require.Empty(t, s.notes("barred"))
		s.clear("a", "b")
		s.leave("c")
		s.join("d")
		s.clear("d")
		s.obey()
		require.Equal(t, "a b d", s.order())
	}
}

// A dead node comes again and again: it passes alone, and fails as soon as workers were stopped to check it with
// others. That happens once.
func TestNoWorkersAreStoppedTwiceForADeadNode(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 4})
	s.join("a", "b")
	s.pass(defaultLastCall)
	s.obey()
	s.health["x1"], s.health["x2"] = alone, alone
	come := func(id string) {
		s.joinNode(Node{ID: id, Name: "x", Rank: -1, Slots: 2, Can: s.can})
		s.obey()
		require.Equal(t, job.Wait, s.dirs[id].Kind)
		s.pass(defaultGrowthDelay)
	}
	come("x1")
	require.Equal(t, "a:stop b:stop x1:wait", s.kinds())
	s.health["x1"] = broken
	s.obey()
	require.Equal(t, "a b", s.order())
	s.leave("x1")
	come("x2")
	require.Equal(t, running, s.r.epoch.phase)
	s.fail("a", RestartFree) // the next gate checks it all the same
	s.health["x2"] = healthy
	s.obey()
	require.Equal(t, "a b x2", s.order())
}

// A node that is barred is no partner of one that has passed alone.
func TestPassedAloneBesideABarredNode(t *testing.T) {
	s := gated(t, Params{Min: 1, Max: 2})
	s.join("a", "b")
	s.must(Barred{ID: "b", Reason: "gpu 3 is gone"})
	s.must(Cleared{ID: "a", Until: s.now})
	require.Equal(t, "a:lead b:bar", s.kinds())

	s = gated(t, Params{Min: 1, Max: 2})
	s.join("a", "b")
	s.must(Barred{ID: "b", Reason: "1 of its 1 tests has failed", Again: true})
	s.must(Cleared{ID: "a", Until: s.now})
	require.Equal(t, "a:check b:wait", s.kinds(), "one of which nothing is proved is")
}

// A node that is barred does not keep another one out.
func TestGrowthBesideADeadNode(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 4})
	s.join("a", "b")
	s.pass(defaultLastCall)
	s.obey()
	s.health["x"] = alone
	s.join("x")
	s.obey()
	s.pass(defaultGrowthDelay)
	s.health["x"] = broken
	s.obey()
	require.Equal(t, "a:run b:run x:bar", s.kinds())
	s.join("y")
	s.obey()
	s.pass(defaultGrowthDelay)
	s.obey()
	require.Equal(t, "a b y", s.order())
}

// What a node finds of itself can be repaired without others: it may grow into a world that runs.
func TestRepairedNodeGrowsIntoTheWorld(t *testing.T) {
	for _, c := range []struct {
		bar  Barred
		want string
	}{
		{Barred{Aspect: "devices"}, "a:stop b:stop x2:wait"},
		{Barred{Aspect: "health"}, "a:stop b:stop x2:wait"},
		{Barred{Aspect: "network"}, "a:run b:run x2:wait"},
		{Barred{Aspect: "pytorch"}, "a:run b:run x2:wait"},
		{Barred{}, "a:run b:run x2:wait"},
		{Barred{Aspect: "devices", Again: true}, "a:run b:run x2:wait"},
	} {
		s := gated(t, Params{Min: 2, Max: 4})
		s.join("a", "b")
		s.joinNode(Node{ID: "x1", Name: "x", Rank: -1, Slots: 2, Can: s.can})
		s.pass(defaultLastCall)
		c.bar.ID = "x1"
		s.must(c.bar)
		s.clear("a", "b")
		s.obey()
		s.leave("x1")
		s.health["x2"] = alone
		s.joinNode(Node{ID: "x2", Name: "x", Rank: -1, Slots: 2, Can: s.can})
		s.obey()
		s.pass(defaultGrowthDelay)
		require.Equal(t, c.want, s.kinds(), "%+v", c.bar)
	}
}

// What is only checked waits for no other nodes, and checks none again.
func TestCheckOnlyEndsWithItsChecks(t *testing.T) {
	for _, again := range []bool{false, true} {
		s := gated(t, Params{Min: 2, Max: 3, CheckOnly: true})
		s.join("a", "b", "c")
		s.must(Barred{ID: "c", Reason: "it reaches nothing", Again: again})
		require.Equal(t, job.Bar, s.dirs["c"].Kind)
		require.Len(t, s.notes("undecided"), map[bool]int{true: 1}[again])
		s.clear("a", "b")
		s.obey()
		require.Equal(t, "a b", s.order())

		s = gated(t, Params{Min: 2, Max: 3, CheckOnly: true})
		s.join("a", "b", "c")
		for _, id := range []string{"a", "b", "c"} {
			require.NotEqual(t, finished, s.r.epoch.phase)
			s.must(Barred{ID: id, Reason: "it reaches nothing", Again: again})
		}
		require.Equal(t, finished, s.r.epoch.phase)
		text := s.r.epoch.cause.Text
		require.Contains(t, text, "too few nodes have passed their checks: 0 nodes joined, need 2; a is barred: it")
	}
}

// A pass that runs out while other nodes are checked counts for this gate.
func TestPassThatRunsOutAtTheGate(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 2})
	s.join("a", "b")
	s.must(Cleared{ID: "a", Until: s.now.Add(time.Second)})
	s.pass(time.Minute)
	s.clear("b")
	require.Equal(t, releasing, s.r.epoch.phase)
}

// The answers that are missing may still be those of nodes that are enough.
func TestCheckOnlyWaitsForAnswers(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 3, CheckOnly: true, GateTimeout: time.Hour})
	s.join("a", "b", "c")
	s.must(Barred{ID: "a", Reason: "it reaches nothing"})
	s.pass(time.Minute)
	s.clear("b")
	s.pass(time.Minute)
	s.clear("c")
	s.obey()
	require.Equal(t, "b c", s.order())
}

// Two nodes of which nothing is proved are asked again together: one that answers first waits for the other.
func TestUndecidedNodesAreCheckedAgainTogether(t *testing.T) {
	s := gated(t, Params{Min: 3, Max: 4})
	s.join("a", "b", "c", "d")
	s.clear("a")
	s.must(Barred{ID: "d", Reason: "gpu 3 is gone"})
	for range maxRechecks {
		for _, id := range []string{"b", "c"} {
			s.must(Barred{ID: id, Again: true})
			s.clear("a")
			require.Equal(t, id == "b", s.state("b") == barred)
		}
		require.Equal(t, []nodeState{checking, checking}, []nodeState{s.state("b"), s.state("c")})
		require.Equal(t, barred, s.state("d"), "of it something is proved")
	}
	s.clear("b", "c")
	s.obey()
	require.Equal(t, "a b c", s.order())
}

// A node that came too late to be tested with the others is tested with them before it gets workers.
func TestLateNodeIsCheckedWithOthers(t *testing.T) {
	for _, dead := range []bool{false, true} {
		s := gated(t, Params{Min: 2, Max: 3})
		s.join("a", "b", "c")
		s.clear("a", "b")
		s.must(Cleared{ID: "c", Until: s.now})
		require.Equal(t, "a:check b:check c:check", s.kinds())
		if dead {
			s.must(Barred{ID: "c", Reason: "2 tests have failed"})
		} else {
			s.must(Cleared{ID: "c", Until: s.now}) // it is too late again
			require.Equal(t, releasing, s.r.epoch.phase, "it is asked once")
		}
		s.obey()
		require.Equal(t, map[bool]string{true: "a b", false: "a b c"}[dead], s.order())
	}
}

func TestUndecidedNodeOfAStaticRun(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 2, Static: true})
	for i, id := range []string{"a", "b"} {
		s.joinNode(Node{ID: id, Name: id, Rank: i, Slots: 2, Can: s.can})
	}
	s.clear("a")
	for range maxRechecks + 1 {
		require.NotEqual(t, finished, s.r.epoch.phase)
		s.must(Barred{ID: "b", Reason: "nothing is proved", Again: true})
	}
	s.pass(staticPatience)
	require.Equal(t, finished, s.r.epoch.phase)
	require.Contains(t, s.r.epoch.cause.Text, "nothing is proved")
}

func TestUnitsAtTheGate(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 4, Unit: 2})
	s.join("a", "b", "c", "d")
	s.health["b"] = broken
	s.clear("c", "d")
	require.Equal(t, gating, s.r.epoch.phase)
	s.must(Barred{ID: "b"})
	require.Equal(t, releasing, s.r.epoch.phase, "a cannot make two units any more")
	s.obey()
	require.Equal(t, "c d", s.order())
	require.Equal(t, "a:wait b:bar c:run d:run", s.kinds(), "a goes on with its check, as a spare")
}

func TestTooFewPass(t *testing.T) {
	s := gated(t, Params{Min: 3, Max: 3, JoinTimeout: time.Minute, GateTimeout: time.Hour})
	s.health["c"] = broken
	s.pass(time.Second)
	s.join("a", "b", "c")
	s.pass(30 * time.Minute) // what the checks take does not count
	s.obey()
	require.Equal(t, "a:wait b:wait c:bar", s.kinds())
	require.Equal(t, forming, s.r.epoch.phase)
	s.pass(time.Minute - 1)
	require.Equal(t, job.Wait, s.dirs["a"].Kind)
	s.pass(1)
	require.Equal(t,
		&job.Cause{Kind: job.CauseCheck, Node: "c",
			Text: "no world within 1m0s: 2 nodes joined, need 3; c is barred: gpu 3 is gone"},
		s.dirs["a"].Cause)
	require.Equal(t, job.Fail, s.dirs["c"].Kind)
	require.Equal(t, job.CauseCheck, s.ended[0].Cause.Kind)
}

func TestShortageThatBarsDoNotExplain(t *testing.T) {
	for name, c := range map[string]struct {
		join   int
		broken int
		barred int
		kind   job.CauseKind
		text   string
	}{
		"a node is missing beside the barred": {2, 1, 0, job.CauseTimeout, "1 nodes joined, need 3; n000 is barred"},
		"an operator's bar":                   {3, 0, 1, job.CauseTimeout, "2 nodes joined, need 3; n002 is barred: faulty"},
		"both bars": {3, 1, 1, job.CauseCheck,
			"1 nodes joined, need 3; n000 is barred: gpu 3 is gone; n002 is barred: faulty"},
		"many": {9, 8, 0, job.CauseCheck, "n003 is barred: gpu 3 is gone and 4 more"},
	} {
		t.Run(name, func(t *testing.T) {
			s := gated(t, Params{Min: 3, Max: 10, JoinTimeout: time.Minute, LastCall: time.Second})
			ids := nodes(c.join)
			for _, id := range ids[:c.broken] {
				s.health[id] = broken
			}
			s.join(ids...)
			for _, id := range ids[:c.broken] {
				if c.join < 3 {
					s.must(Barred{ID: id, Reason: "gpu 3 is gone"})
				}
			}
			s.pass(time.Second)
			s.obey()
			for _, id := range ids[len(ids)-c.barred:] {
				delete(s.runs, id)
				s.must(Order{Kind: OrderBar, Node: id, Text: "faulty"})
			}
			s.obey()
			s.pass(time.Minute)
			require.Equal(t, job.Fail, s.dirs[ids[0]].Kind)
			require.Equal(t, c.kind, s.dirs[ids[0]].Cause.Kind)
			require.Contains(t, s.dirs[ids[0]].Cause.Text, c.text)
		})
	}
}

func TestUnansweredGateOpens(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 3, GateTimeout: time.Minute, MaxRestarts: 5})
	s.health["b"] = mute
	s.join("a", "b", "c")
	s.obey()
	s.pass(time.Minute - 1)
	require.Equal(t, "a:check b:check c:check", s.kinds())
	s.pass(1)
	require.Equal(t, "1 of 3 nodes have not answered within 1m0s; they count as cleared", s.notes("gate-opened")[0].Text)
	s.obey()
	require.Equal(t, "a b c", s.order(), "b counts as cleared")
	s.must(Barred{ID: "b", Reason: "at last"})
	require.Equal(t, job.Run, s.dirs["b"].Kind, "nobody is stopped for a late answer")
	require.Equal(t, "at last; it is checked again before the next world", s.notes("late-check")[0].Text)

	s.fail("a", RestartCharged)
	s.obey()
	require.Equal(t, "a:check b:check c:check", s.kinds(), "it is checked before the next epoch, and the others help")
	require.Equal(t, []int{2, 1}, []int{s.r.members.waiting, s.r.members.checking})
	s.pass(time.Minute)
	s.obey()
	require.Equal(t, "a b c", s.order())
	s.fail("a", RestartCharged)
	s.health["b"] = healthy
	s.obey()
	require.Equal(t, "a b c", s.order())
	s.fail("a", RestartCharged)
	s.obeyOne("a")
	s.obeyOne("b")
	require.Equal(t, "a:wait b:wait c:stop", s.kinds())
}

// Who is cleared goes before who has not answered, whatever the ranks were.
func TestOpenedGatePrefersTheCleared(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 2, GateTimeout: time.Minute})
	s.health["a"], s.health["b"] = mute, mute
	s.join("a", "b", "c")
	s.obey()
	s.pass(time.Minute)
	s.obey()
	require.Equal(t, "a c", s.order())
	require.Equal(t, job.Check, s.dirs["b"].Kind, "its check goes on")
	s.pass(time.Hour)
	require.Equal(t, job.Check, s.dirs["b"].Kind)
}

func TestNodeDepartsWhileGating(t *testing.T) {
	for name, depart := range map[string]func(*sim){
		"leaves": func(s *sim) { s.must(Leave{ID: "b"}); delete(s.dirs, "b") },
		"dies":   func(s *sim) { s.vanish("b"); s.pass(BrokenGrace) },
		"is silent": func(s *sim) {
			s.must(Detach{ID: "b"})
			s.pass(silentGrace)
			delete(s.dirs, "b")
		},
	} {
		t.Run("elastic, "+name, func(t *testing.T) {
			s := gated(t, Params{Min: 2, Max: 3})
			s.join("a", "b", "c")
			s.clear("a", "c")
			depart(s)
			s.obey()
			require.Equal(t, "a c", s.order(), "nothing else is waited for")
		})
		t.Run("fixed, "+name, func(t *testing.T) {
			s := gated(t, Params{Min: 3, Max: 3})
			s.join("a", "b", "c")
			s.clear("a")
			depart(s)
			require.Equal(t, "a:wait c:check", s.kinds())
			require.Equal(t, forming, s.r.epoch.phase)
			s.clear("c")
			require.Equal(t, "a:wait c:wait", s.kinds())
			s.join("d")
			require.Equal(t, "a:check c:check d:check", s.kinds())
			s.obey()
			require.Equal(t, "a c d", s.order())
		})
	}
}

// The check of a node whose connection breaks for a moment goes on.
func TestShortBreakDoesNotEndACheck(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 2})
	s.join("a", "b")
	s.must(Detach{ID: "b", Broken: true})
	s.pass(BrokenGrace - 1)
	s.must(Attach{ID: "b"})
	seq := s.dirs["b"].Seq
	s.pass(time.Minute)
	require.Equal(t, seq, s.dirs["b"].Seq)
	s.obey()
	require.Equal(t, "a b", s.order())
}

func TestRepeatedJoinWhileGatingChangesNothing(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 2})
	s.join("a", "b")
	seq := s.dirs["b"].Seq
	s.must(Join{Node: Node{ID: "b", Name: "b", Rank: -1, Slots: 2, Can: s.can}, Params: s.p, Stopped: s.r.epoch.id})
	require.Equal(t, seq, s.dirs["b"].Seq)
	s.health["b"] = broken
	s.obey()
	s.must(Join{Node: Node{ID: "b", Name: "b", Rank: -1, Slots: 2, Can: s.can}, Params: s.p, Stopped: s.r.epoch.id})
	require.Equal(t, job.Bar, s.dirs["b"].Kind)
	require.Equal(t, 1, s.r.members.barred)
}

func TestReplacementWhileGating(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 2})
	s.joinNode(Node{ID: "a", Name: "a", Rank: 0, Slots: 2, Can: s.can, Generation: 1})
	s.joinNode(Node{ID: "b", Name: "b", Rank: 1, Slots: 2, Can: s.can, Generation: 1})
	s.clear("b")
	s.joinNode(Node{ID: "a2", Name: "a2", Rank: 0, Slots: 2, Can: s.can, Generation: 2})
	delete(s.dirs, "a")
	require.Equal(t, "a2:check b:check", s.kinds())
	s.obey()
	require.Equal(t, "a2 b", s.order())
}

func TestSpareIsCheckedBesideARunningWorld(t *testing.T) {
	s := gated(t, Params{Min: 1, Max: 3, LastCall: time.Second})
	s.join("a")
	s.pass(time.Second)
	s.obey()
	require.Equal(t, "a", s.order())
	s.health["bad"] = broken
	s.join("bad", "b")
	require.Equal(t, "a:run b:check bad:check", s.kinds())
	s.pass(time.Minute)
	require.Equal(t, "a", s.order(), "growth counts the cleared only")
	s.must(Barred{ID: "bad", Reason: "slow link"})
	s.clear("b")
	require.Equal(t, job.Wait, s.dirs["b"].Kind)
	s.pass(defaultGrowthDelay)
	s.obey()
	require.Equal(t, "a b", s.order())
	require.Equal(t, job.Bar, s.dirs["bad"].Kind, "it was given another chance and failed again")
	s.vanish("b")
	s.health["bad"] = healthy
	s.pass(BrokenGrace)
	s.obey()
	s.pass(defaultGrowthDelay)
	s.obey()
	require.Equal(t, "a bad", s.order(), "the next world forms: it was checked again")
}

// One that has failed its check is checked again, but waited for only where there is no world without it.
func TestSecondOpinion(t *testing.T) {
	start := func(t *testing.T, minimum int) *sim {
		s := gated(t, Params{Min: minimum, Max: 3, GateTimeout: time.Minute, JoinTimeout: time.Hour, MaxRestarts: 9})
		s.health["b"] = broken
		s.join("a", "b", "c")
		if minimum == 3 {
			s.join("d")
		}
		s.obey()
		require.Contains(t, []string{"a c", "a c d"}, s.order())
		s.health["b"] = mute
		return s
	}
	t.Run("not needed", func(t *testing.T) {
		s := start(t, 2)
		s.fail("a", RestartCharged)
		s.obey()
		require.Equal(t, "a c", s.order())
		require.Equal(t, 1, s.runs["a"].Epoch)
		require.Equal(t, job.Check, s.dirs["b"].Kind)
		seq := s.dirs["b"].Seq
		s.pass(time.Hour)
		s.fail("a", RestartCharged)
		s.obey()
		require.Equal(t, "a c", s.order())
		require.Equal(t, seq, s.dirs["b"].Seq, "its check goes on, whatever becomes of worlds")
		s.clear("b")
		s.obey()
		require.Equal(t, "a c b", s.order(), "it has passed, and the world grows")
	})
	t.Run("needed and passed", func(t *testing.T) {
		s := start(t, 3)
		s.vanish("d")
		s.pass(BrokenGrace)
		s.obey()
		require.Equal(t, "checking 1 of 3 nodes; 2 others help", s.noted(job.EventGate))
		require.Equal(t, "a:check b:check c:check", strings.ReplaceAll(s.kinds(), "wait", "check"))
		require.Equal(t, gating, s.r.epoch.phase)
		s.clear("b")
		require.Equal(t, "its check has passed", s.notes("cleared")[0].Text)
		s.obey()
		require.Equal(t, "a c b", s.order())
	})
	t.Run("needed and failed", func(t *testing.T) {
		s := start(t, 3)
		s.vanish("d")
		s.pass(BrokenGrace)
		s.obey()
		s.must(Barred{ID: "b", Reason: "still"})
		require.Equal(t, "a:wait b:bar c:wait", s.kinds())
		require.Equal(t, forming, s.r.epoch.phase)
		s.pass(time.Hour)
		require.Equal(t, job.CauseCheck, s.dirs["a"].Cause.Kind)
	})
	t.Run("needed and silent", func(t *testing.T) {
		s := start(t, 3)
		s.vanish("d")
		s.pass(BrokenGrace)
		s.obey()
		s.pass(time.Minute - 1)
		require.Equal(t, gating, s.r.epoch.phase)
		s.pass(1)
		require.Equal(t, "a:wait b:bar c:wait", s.kinds(), "without an answer the bar stands")
		require.Equal(t, forming, s.r.epoch.phase)
		s.join("e")
		s.obey()
		require.Equal(t, "a c e", s.order())
	})
	t.Run("it departs", func(t *testing.T) {
		s := start(t, 3)
		s.vanish("d")
		s.pass(BrokenGrace)
		s.obey()
		s.must(Leave{ID: "b"})
		require.Zero(t, s.r.members.again)
		require.Equal(t, forming, s.r.epoch.phase)
	})
}

// The clock of a pass stands still while its node is in a world, until all have stopped their workers.
func TestPassRunsOut(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 2, MaxRestarts: 9})
	s.join("a", "b", "spare")
	until := s.now.Add(time.Minute)
	for _, id := range []string{"a", "b", "spare"} {
		s.must(Cleared{ID: id, Until: until})
	}
	s.obey()
	for range 3 {
		s.pass(time.Hour)
		s.fail("a", RestartCharged)
		s.obeyOne("a")
		s.pass(time.Hour) // b takes its time to stop
		s.obeyOne("b")
		require.Equal(t, releasing, s.r.epoch.phase)
		s.obey()
	}
	require.Equal(t, 3, s.runs["a"].Epoch, "nobody of the world was checked")
	require.Len(t, s.checked["spare"], 2, "its clock ran on, and it was checked when a world formed")

	s.ordered(OrderPause, "")
	s.obey()
	s.pass(time.Minute - 1)
	s.ordered(OrderResume, "")
	s.obey()
	require.Equal(t, "a b", s.order())
	require.Len(t, s.checked["a"], 1, "it counted until the last moment")
	s.ordered(OrderPause, "")
	s.obey()
	s.pass(1)
	s.ordered(OrderResume, "")
	require.Equal(t, "a:check b:check spare:check", s.kinds(), "all time in the gate and in a pause counts")
	require.Equal(t, []int{1, 2}, []int{s.r.members.waiting, s.r.members.checking}, "the spare only helps")
	s.health["b"] = broken
	s.obey()
	require.Equal(t, "a spare", s.order())
}

// A world is not broken for a spare whose clearance has run out: it is checked first.
func TestGrowthChecksAgain(t *testing.T) {
	s := gated(t, Params{Min: 1, Max: 3, Unit: 1, LastCall: time.Second, GrowthDelay: time.Minute})
	s.join("a")
	s.pass(time.Second)
	s.obey()
	s.join("b")
	s.must(Cleared{ID: "b", Until: s.now.Add(time.Second)})
	s.pass(time.Minute)
	require.Equal(t, "a:run b:check", s.kinds())
	s.must(Barred{ID: "b", Reason: "ecc"})
	s.pass(time.Hour)
	require.Equal(t, "a:run b:bar", s.kinds())
	s.clear("b")
	s.pass(time.Minute)
	s.obey()
	require.Equal(t, "a b", s.order())
}

func TestLastCallComesBeforeTheGate(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 4})
	s.join("a", "b", "c")
	s.pass(defaultLastCall - 1)
	require.Equal(t, "a:wait b:wait c:wait", s.kinds())
	s.pass(1)
	require.Equal(t, "a:check b:check c:check", s.kinds())
	s.obey()
	require.Equal(t, "a b c", s.order(), "and is not made again after it")
}

// A failure for good that is reported late ends the run from the gate, too.
func TestPermanentFailureWhileGating(t *testing.T) {
	for _, loss := range []bool{false, true} {
		s := gated(t, Params{Min: 2, Max: 2, MaxRestarts: 5})
		s.join("a", "b")
		s.obey()
		for _, id := range []string{"a", "b"} {
			s.must(Doubt{ID: id, Reason: "carrier"})
		}
		s.fail("a", RestartCharged)
		first := s.r.epoch.id
		s.obeyOne("a")
		s.obeyOne("b")
		require.Equal(t, gating, s.r.epoch.phase)
		s.must(Failing{ID: "b", EpochID: first, Decision: Permanent})
		require.Equal(t, forming, s.r.epoch.phase)
		s.clear("a", "b")
		require.Equal(t, "a:wait b:wait", s.kinds(), "the run is about to fail: nothing is sealed")
		if loss {
			s.r.epoch.elastic = true // a member had died, as is known now
		}
		s.pass(attributionWindow)
		s.obey()
		require.Equal(t, loss, s.dirs["a"].Kind == job.Run)
		require.Equal(t, !loss, s.dirs["a"].Kind == job.Fail)
	}
}

func TestUnknownNodesAndFinishedRunsAtTheGate(t *testing.T) {
	s := gated(t, Params{Min: 1, Max: 1})
	require.ErrorIs(t, s.step(Cleared{ID: "x"}), ErrUnknownNode)
	require.ErrorIs(t, s.step(Barred{ID: "x"}), ErrUnknownNode)
	s.join("a", "b")
	s.must(Order{Kind: OrderStop, Text: "enough"})
	seq := s.dirs["b"].Seq
	s.must(Cleared{ID: "b"})
	s.must(Barred{ID: "a"})
	require.Equal(t, seq, s.dirs["b"].Seq)
	require.Equal(t, "a:fail b:fail", s.kinds())
}

func TestLongReasonIsCut(t *testing.T) {
	s := gated(t, Params{Min: 1, Max: 1})
	s.join("a")
	s.must(Barred{ID: "a", Reason: strings.Repeat("é", 2*maxReason)})
	require.Equal(t, strings.Repeat("é", maxReason/2), s.dirs["a"].Cause.Text)
	s.clear("a")
	s.must(Order{Kind: OrderRestart})
	s.obey()
	require.Equal(t, "a", s.order())
}

// A daemon that was started again knows no clearance; the checks begin again.
func TestDaemonDiesWhileGating(t *testing.T) {
	old := gated(t, Params{Min: 2, Max: 2})
	old.join("a", "b", "spare")
	old.obey()
	run := old.runs
	for _, id := range []string{"a", "b", "spare"} {
		old.must(Doubt{ID: id})
	}
	old.fail("a", RestartCharged)
	epoch := old.r.epoch.id

	s := gated(t, old.p)
	s.r = New(Config{Term: epoch.Term + 1000})
	again := func(id string, barred *job.Cause) {
		j := Join{Node: Node{ID: id, Name: id, Rank: -1, Slots: 2, Can: s.can}, Params: s.p, Seen: epoch, Barred: barred}
		if d, ok := run[id]; ok {
			j.Stopped, j.Resume = epoch, &Resume{EpochID: epoch, Place: *d.Place}
		}
		s.must(j)
		s.must(Attach{ID: id})
	}
	again("spare", &job.Cause{Kind: job.CauseCheck, Node: "spare", Text: "gpu 3 is gone"})
	require.Equal(t, "spare:bar", s.kinds(), "a node's own bar survives the daemon")
	again("a", nil)
	again("b", nil)
	require.Equal(t, "a:check b:check spare:check", s.kinds(), "and its second opinion is asked for")
	s.clear("a", "b")
	s.obey()
	require.Equal(t, "a b", s.order())
}

// Members of a running world that come while the gate of a new one is closed are given their world back.
func TestOldWorldComesBackWhileGating(t *testing.T) {
	old := gated(t, Params{Min: 1, Max: 2, LastCall: time.Second})
	old.join("a", "b")
	old.obey()
	require.Equal(t, "a b", old.order())

	s := gated(t, old.p)
	s.join("stranger")
	s.pass(time.Second)
	require.Equal(t, gating, s.r.epoch.phase)
	for _, id := range []string{"a", "b"} {
		d := old.runs[id]
		s.must(Join{
			Node: Node{ID: id, Name: id, Rank: -1, Slots: 2, Can: s.can}, Params: s.p, Seen: d.EpochID,
			Resume: &Resume{EpochID: d.EpochID, Place: *d.Place},
		})
		s.must(Attach{ID: id})
	}
	require.Equal(t, running, s.r.epoch.phase)
	require.Equal(t, "a:run b:run stranger:check", s.kinds())
}

// A spare that comes back before the members is checked when their world is complete.
func TestSpareOfARebuiltWorldIsChecked(t *testing.T) {
	old := gated(t, Params{Min: 1, Max: 1})
	old.join("a")
	old.obey()
	s := gated(t, old.p)
	s.must(Join{Node: Node{ID: "spare", Name: "spare", Rank: -1, Slots: 2, Can: s.can}, Params: s.p, Seen: old.r.epoch.id})
	require.Equal(t, "spare:wait", s.kinds())
	d := old.runs["a"]
	s.must(Join{
		Node: Node{ID: "a", Name: "a", Rank: -1, Slots: 2, Can: s.can}, Params: s.p, Seen: d.EpochID,
		Resume: &Resume{EpochID: d.EpochID, Place: *d.Place},
	})
	require.Equal(t, "a:run spare:check", s.kinds())
}

func TestGateCostsNothingPerNode(t *testing.T) {
	const n = 10_000
	s := gated(t, Params{Min: n, Max: n})
	for i := range n {
		id := fmt.Sprint(i)
		_, err := s.r.Step(s.now, Join{Node: Node{ID: id, Name: id, Rank: -1, Slots: 1, Can: s.can}, Params: s.p})
		require.NoError(t, err)
	}
	require.Equal(t, n, s.r.members.checking)
	visits := 0
	for i := range n {
		acts, err := s.r.Step(s.now, Cleared{ID: fmt.Sprint(i)})
		require.NoError(t, err)
		visits += len(acts)
	}
	require.Equal(t, releasing, s.r.epoch.phase)
	require.Less(t, visits, 10, "who is cleared is told to run next, and nothing before")
}

func TestClearedWhileBarredAtTheGate(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 3})
	s.join("a", "b", "c")
	s.must(Barred{ID: "b"})
	s.clear("b")
	require.Equal(t, "a:check b:wait c:check", s.kinds(), "its newest directive must not be the bar")
	m := s.r.members
	require.Equal(t, []int{1, 2, 0, 0}, []int{m.waiting, m.checking, m.again, m.barred})
	s.clear("a", "c")
	s.obey()
	require.Equal(t, "a b c", s.order())
}
