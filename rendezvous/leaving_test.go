package rendezvous

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

func TestTheOthersGoOnWithoutANodeThatWillLeave(t *testing.T) {
	s := held(t, Params{Min: 2, Max: 3, MaxRestarts: 0}, "a", "b", "c")
	s.must(Leaving{ID: "b", Reason: "spot notice", Grace: 28 * time.Second})
	for _, id := range []string{"a", "b", "c"} {
		require.Equal(t, job.Stop, s.dirs[id].Kind, "all stop in one step")
		require.Equal(t, &job.Cause{Kind: job.CauseLeave, Node: "b", Text: "node 1 (b) is leaving: spot notice"},
			s.dirs[id].Cause)
	}
	require.Equal(t, "spot notice (within 28s)", s.notes("leaving")[0].Text)
	s.gone["b"] = true // it is busy with its workers
	delete(s.dirs, "b")
	delete(s.runs, "b")
	s.obey()
	require.Equal(t, "a c", s.order(), "nobody waits for it")
	require.Equal(t, 0, s.runs["a"].Restarts)
	s.must(Leaving{ID: "b"}) // once more
	s.must(Leave{ID: "b", Reason: "spot notice"})
	s.pass(time.Minute)
	require.Equal(t, "a c", s.order())
	require.Empty(t, s.notes("node-loss"))
	require.Len(t, s.notes("node-leave"), 1)
}

func TestASpareTakesThePlaceOfANodeThatWillLeave(t *testing.T) {
	s := held(t, Params{Min: 2, Max: 2}, "a", "b", "spare")
	s.must(Leaving{ID: "a"})
	delete(s.dirs, "a")
	delete(s.runs, "a")
	s.obey()
	require.Equal(t, "spare b", s.order())
}

func TestTooFewWaitForAReplacement(t *testing.T) {
	s := held(t, Params{Min: 2, Max: 2, MaxRestarts: 0}, "a", "b")
	s.must(Leaving{ID: "a"})
	delete(s.dirs, "a")
	delete(s.runs, "a")
	s.obey()
	require.Equal(t, job.Wait, s.dirs["b"].Kind)
	require.Empty(t, s.r.Evidence().Outcome)
	s.join("c")
	s.pass(defaultLastCall)
	s.obey()
	require.Equal(t, "c b", s.order())
}

func TestANodeThatWillLeaveMayDie(t *testing.T) {
	s := held(t, Params{Min: 1, Max: 2}, "a", "b")
	s.must(Leaving{ID: "a"})
	s.vanish("a")
	s.obey()
	s.pass(silentGrace)
	require.Empty(t, s.notes("node-loss"))
	require.Equal(t, "b", s.order())
}

func TestLeavingChangesNothing(t *testing.T) {
	s := held(t, Params{Min: 2, Max: 2}, "a", "b", "spare")
	require.ErrorIs(t, s.step(Leaving{ID: "x"}), ErrUnknownNode)
	s.must(Leaving{ID: "spare"})
	require.Equal(t, "a b", s.order())
	s.succeed("a")
	s.must(Leaving{ID: "a"})
	s.succeed("b")
	require.Equal(t, job.Succeeded, s.r.Evidence().Outcome)
	s.must(Leaving{ID: "b"})
}

func TestAFailureOfWorkersWhoseNodeLeavesIsFree(t *testing.T) {
	s := held(t, Params{Min: 1, Max: 2, MaxRestarts: 0}, "a", "b")
	run := s.runs["b"]
	s.must(Leaving{ID: "a"})
	s.must(Failing{ID: "b", EpochID: run.EpochID, Decision: RestartCharged})
	delete(s.dirs, "a")
	s.obey()
	s.pass(attributionWindow)
	require.Equal(t, job.Run, s.dirs["b"].Kind)
	require.Equal(t, 0, s.dirs["b"].Restarts)
}

func TestDrain(t *testing.T) {
	s := held(t, Params{Min: 1, Max: 2}, "a", "b", "spare")
	require.ErrorIs(t, s.step(Order{Kind: OrderDrain, Node: "x"}), ErrUnknownNode)
	s.must(Order{Kind: OrderDrain, Node: "spare", Text: "old"})
	require.Equal(t, "old", s.dirs["spare"].Leave.Text)
	require.Equal(t, job.Bar, s.dirs["spare"].Kind)
	require.Equal(t, "a b", s.order())

	s.must(Order{Kind: OrderDrain, Node: "a", Text: "mend"})
	require.Equal(t, job.Stop, s.dirs["a"].Kind)
	require.Equal(t, "mend", s.dirs["a"].Leave.Text)
	require.Nil(t, s.dirs["b"].Leave)
	s.must(Leave{ID: "a"})
	delete(s.dirs, "a")
	delete(s.runs, "a")
	s.obey()
	require.Equal(t, "b", s.order())
	s.joinNode(Node{ID: "a2", Name: "a", Rank: -1, Slots: 2, Can: able()})
	require.Equal(t, job.Bar, s.dirs["a2"].Kind, "its name gets no workers")
	require.Nil(t, s.dirs["a2"].Leave)
	s.must(Order{Kind: OrderUnbar, Node: "a"})
	s.pass(defaultGrowthDelay)
	s.obey()
	require.Len(t, s.runs, 2)
}

// A node leaves on condition that enough others are left.
func TestDrainUnlessTooFewAreLeft(t *testing.T) {
	for name, c := range map[string]struct {
		p      Params
		nodes  []string
		least  int
		change func(*sim)
		want   string // who goes on; "" if the node stays
	}{
		"a spare takes its place":            {Params{Min: 2, Max: 2}, []string{"a", "b", "spare"}, 2, nil, "a spare"},
		"no spare":                           {Params{Min: 2, Max: 2}, []string{"a", "b"}, 2, nil, ""},
		"fewer go on":                        {Params{Min: 1, Max: 3}, []string{"a", "b", "c"}, 2, nil, "a c"},
		"fewer are not worth it":             {Params{Min: 1, Max: 3}, []string{"a", "b", "c"}, 3, nil, ""},
		"MIN forbids it":                     {Params{Min: 3, Max: 4}, []string{"a", "b", "c"}, 2, nil, ""},
		"half of the nodes would be idle":    {Params{Min: 2, Max: 4, Unit: 2}, []string{"a", "b", "c", "d"}, 3, nil, ""},
		"the spare of that name leaves, too": {Params{Min: 2, Max: 2}, []string{"a", "b", "b2"}, 2, nil, ""},
		"the spare is barred": {Params{Min: 2, Max: 2}, []string{"a", "b", "x"}, 2,
			func(s *sim) { s.ordered(OrderBar, "x") }, ""},
		"the connection of the spare is lost": {Params{Min: 2, Max: 2}, []string{"a", "b", "x"}, 2,
			func(s *sim) { s.must(Detach{ID: "x"}); s.must(HungUp{ID: "x"}) }, ""},
		"a condition of no use": {Params{Min: 2, Max: 2}, []string{"a", "b", "spare"}, 1, nil, "a spare"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, c.p)
			s.can = able()
			for _, id := range c.nodes {
				s.joinNode(Node{ID: id, Name: strings.TrimSuffix(id, "2"), Rank: -1, Slots: 2, Can: s.can})
			}
			s.pass(s.p.WithDefaults().LastCall)
			s.obey()
			if c.change != nil {
				c.change(s)
			}
			o := Order{Kind: OrderDrain, Node: "b", Cause: job.CauseSlow, Text: "slow", Of: s.r.epoch.id, Least: c.least}
			before := s.order()
			err := s.step(o)
			if c.want == "" {
				require.ErrorIs(t, err, ErrBadOrder)
				require.ErrorContains(t, err, `without node "b"`)
				require.Equal(t, before, s.order())
				require.NotContains(t, s.r.Status().Bars, "b")
				return
			}
			require.NoError(t, err)
			require.ErrorIs(t, s.step(o), ErrNotRunning, "it was for that epoch")
			s.obey()
			require.Equal(t, c.want, s.order())
			require.Equal(t, job.Cause{Kind: job.CauseSlow, Node: "b", Text: "slow"}, s.r.Status().Bars["b"])
			require.Zero(t, s.r.Status().Restarts)
		})
	}
}

func TestWhoCannotBeToldToLeaveIsBarred(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 2}, "a", "b")
	s.must(Order{Kind: OrderDrain, Node: "a"})
	s.obey()
	require.Equal(t, job.Bar, s.dirs["a"].Kind)
	require.Nil(t, s.dirs["a"].Leave)
	require.Equal(t, "b", s.order())
}

func TestANodeLeavesAWorldThatIsBeingRebuilt(t *testing.T) {
	old := held(t, Params{Min: 1, Max: 3}, "a", "b", "c")
	s := newSim(t, old.p)
	for _, id := range []string{"a", "b"} {
		run := old.runs[id]
		s.must(Join{Node: Node{ID: id, Name: id, Rank: -1, Slots: 2, Can: able()}, Params: s.p, Seen: run.EpochID,
			Resume: &Resume{EpochID: run.EpochID, Place: *run.Place}})
		s.must(Attach{ID: id})
		s.runs[id] = s.dirs[id]
	}
	s.must(Leaving{ID: "a"})
	delete(s.dirs, "a")
	delete(s.runs, "a")
	s.pass(resumeWindow)
	s.obey()
	require.Equal(t, "b", s.order())
}
