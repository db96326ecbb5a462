package rendezvous

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

func (s *sim) ordered(kind OrderKind, node string) {
	s.t.Helper()
	s.must(Order{Kind: kind, Node: node, Text: "by hand"})
}

// world is a sim whose nodes run, all of them able to gate.
func world(t testing.TB, p Params, ids ...string) *sim {
	s := newSim(t, p)
	s.can = []Ability{CanGate}
	s.join(ids...)
	s.pass(s.p.WithDefaults().LastCall)
	s.obey()
	return s
}

func TestOrderedRestart(t *testing.T) {
	for name, c := range map[string]struct {
		charge   bool
		restarts int
		lost     bool
		spent    int
		end      job.Kind
	}{
		"free":                           {false, 0, false, 0, job.Run},
		"charged":                        {true, 2, false, 1, job.Run},
		"charged without one left":       {true, 0, false, 0, job.Fail},
		"a node has died, nothing spent": {true, 0, true, 0, job.Run},
	} {
		t.Run(name, func(t *testing.T) {
			s := world(t, Params{Min: 1, Max: 2, MaxRestarts: c.restarts}, "a", "b")
			s.must(Order{Kind: OrderRestart, Node: "b", Cause: job.CauseHang, Text: "no step for 300s", Charge: c.charge})
			require.Equal(t, "restart: no step for 300s", s.notes("order")[0].Text)
			cause := &job.Cause{Kind: job.CauseHang, Node: "b", Text: "no step for 300s"}
			require.Equal(t, job.Stop, s.dirs["a"].Kind)
			require.Equal(t, cause, s.dirs["a"].Cause)
			if c.lost {
				s.vanish("b")
			}
			s.obey()
			s.pass(silentGrace)
			s.obey()
			require.Equal(t, c.end, s.dirs["a"].Kind)
			require.Equal(t, c.spent, s.dirs["a"].Restarts)
			if !c.lost {
				require.Equal(t, cause, s.dirs["a"].Cause)
			}
			require.Equal(t, c.end == job.Run, s.r.Evidence().Outcome == "")
			require.Len(t, s.ended, 1)
			require.Equal(t, 1, s.ended[0].Round)
		})
	}
}

// An order that was decided upon for one epoch must not hit the next.
func TestOrderOfAnEpoch(t *testing.T) {
	for _, kind := range []OrderKind{OrderRestart, OrderStop} {
		t.Run(string(kind), func(t *testing.T) {
			s := world(t, Params{Min: 2, Max: 2, MaxRestarts: 5}, "a", "b")
			first := s.r.epoch.id
			s.ordered(OrderRestart, "")
			require.ErrorIs(t, s.step(Order{Kind: kind, Of: first}), ErrNotRunning, "its workers are being stopped")
			s.obey()
			require.NotEqual(t, first, s.r.epoch.id)
			require.ErrorIs(t, s.step(Order{Kind: kind, Of: first}), ErrNotRunning)
			require.Equal(t, "a:run b:run", s.kinds())
			s.must(Order{Kind: kind, Of: s.r.epoch.id})
			require.NotEqual(t, "a:run b:run", s.kinds())
		})
	}
	s := world(t, Params{Min: 1, Max: 1}, "a")
	require.ErrorIs(t, s.step(Order{Kind: OrderPause, Of: s.r.epoch.id}), ErrBadOrder)
}

func TestSeat(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	_, err := s.r.Seat("a")
	require.ErrorIs(t, err, ErrUnknownNode)
	s.join("a", "b", "spare")
	seat := func(id string) Seat {
		t.Helper()
		got, err := s.r.Seat(id)
		require.NoError(t, err)
		return got
	}
	require.Equal(t, Seat{s.r.epoch.id, 1, "b", false}, seat("b"), "the store is not ready")
	s.obey()
	require.Equal(t, Seat{s.r.epoch.id, 0, "a", true}, seat("a"))
	require.Equal(t, Seat{s.r.epoch.id, 1, "b", true}, seat("b"))
	_, err = s.r.Seat("spare")
	require.ErrorIs(t, err, ErrUnknownNode)
	s.must(Success{ID: "a", EpochID: s.r.epoch.id})
	require.True(t, seat("a").Running, "others still work")
	s.ordered(OrderRestart, "")
	require.Equal(t, Seat{s.r.epoch.id, 1, "b", false}, seat("b"))
	s.obey()
	require.Equal(t, Seat{s.r.epoch.id, 1, "b", true}, seat("b"))
	require.Equal(t, 1, seat("b").Epoch)
	s.must(Leave{ID: "b"})
	_, err = s.r.Seat("b")
	require.ErrorIs(t, err, ErrUnknownNode)
}

func TestOrderedRestartBeforeTheStoreIsReady(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.join("a", "b")
	require.Equal(t, releasing, s.r.epoch.phase)
	s.ordered(OrderRestart, "")
	require.Equal(t, "a:stop b:stop", s.kinds())
	s.obey()
	require.Equal(t, "a b", s.order())
}

func TestOrderedStop(t *testing.T) {
	for name, bring := range map[string]func(*sim){
		"forming":   func(s *sim) { s.join("a") },
		"releasing": func(s *sim) { s.join("a", "b") },
		"running":   func(s *sim) { s.join("a", "b"); s.obey() },
		"paused":    func(s *sim) { s.join("a", "b"); s.obey(); s.ordered(OrderPause, "") },
		"gating": func(s *sim) {
			s.p.Gate, s.can = true, []Ability{CanGate}
			s.join("a", "b")
			require.Equal(s.t, job.Check, s.dirs["a"].Kind)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 5})
			bring(s)
			s.must(Order{Kind: OrderStop, Cause: job.CauseDeadline, Text: "longer than 2h"})
			for id, d := range s.dirs {
				require.Equal(t, job.Fail, d.Kind, id)
				require.Equal(t, &job.Cause{Kind: job.CauseDeadline, Text: "longer than 2h"}, d.Cause)
				require.Nil(t, d.Paused)
			}
			require.Equal(t, job.Failed, s.r.Evidence().Outcome)
			require.Equal(t, job.Failed, s.ended[0].Outcome)
			require.Equal(t, job.CauseDeadline, s.ended[0].Cause.Kind)
			require.LessOrEqual(t, s.r.Next().Sub(s.now), silentGrace, "nothing but the last good-byes")
			for _, kind := range []OrderKind{OrderRestart, OrderStop, OrderBar, OrderUnbar, OrderPause, OrderResume} {
				require.ErrorIs(t, s.step(Order{Kind: kind, Node: "a"}), ErrFinished)
			}
			for id := range s.dirs {
				s.must(Leave{ID: id})
			}
			s.now = s.now.Add(time.Hour)
			s.join("next", "one")
			s.obey()
			require.Len(t, s.ended, 1, "once for each")
			require.Equal(t, job.Run, s.dirs["next"].Kind)
		})
	}
}

func TestBadOrders(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1})
	for want, o := range map[string]Order{
		`kind "dance"; need one of`:              {Kind: "dance"},
		`kind ""`:                                {},
		`cause "mood"; need one of ["hang"`:      {Kind: OrderStop, Cause: "mood"},
		`cause "node-loss"`:                      {Kind: OrderStop, Cause: job.CauseLoss},
		`text "\x1b[31m": need UTF-8`:            {Kind: OrderStop, Text: "\x1b[31m"},
		"at most 1024 bytes":                     {Kind: OrderStop, Text: strings.Repeat("x", 1025)},
		`node "a\n": need UTF-8`:                 {Kind: OrderBar, Node: "a\n"},
		"at most 512 bytes":                      {Kind: OrderBar, Node: strings.Repeat("x", 513)},
		"bar which node? Give its name":          {Kind: OrderBar},
		"unbar which node? Give its name":        {Kind: OrderUnbar},
		ErrNotRunning.Error():                    {Kind: OrderRestart},
		ErrNotPaused.Error():                     {Kind: OrderResume},
		`unknown node: no node named "x" is bar`: {Kind: OrderUnbar, Node: "x"},
	} {
		require.ErrorContains(t, s.step(o), want)
	}
	require.ErrorIs(t, s.step(Order{Kind: "dance"}), ErrBadOrder)
	require.ErrorIs(t, s.step(Order{Kind: OrderUnbar, Node: "x"}), ErrUnknownNode)
	s.must(Order{Kind: OrderBar, Node: strings.Repeat("x", MaxName)})
	s.must(Order{Kind: OrderStop, Text: strings.Repeat("x", maxOrderText)})
}

func TestDefaultTextOfAnOrder(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 1}, "a")
	s.must(Order{Kind: OrderRestart})
	require.Equal(t, &job.Cause{Kind: job.CauseOperator, Text: "restart ordered (operator)"}, s.dirs["a"].Cause)
}

func TestBarByName(t *testing.T) {
	p := Params{Min: 2, Max: 2, MaxRestarts: 3}
	t.Run("a member, and a spare takes its rank", func(t *testing.T) {
		s := world(t, p, "a", "b", "spare")
		s.ordered(OrderBar, "b")
		cause := &job.Cause{Kind: job.CauseOperator, Node: "b", Text: "by hand"}
		require.Equal(t, job.Stop, s.dirs["a"].Kind)
		require.Equal(t, cause, s.dirs["a"].Cause)
		s.obey()
		require.Equal(t, "a spare", s.order())
		require.Equal(t, job.Bar, s.dirs["b"].Kind)
		require.Equal(t, cause, s.dirs["b"].Cause)
		require.Equal(t, 2, s.runs["a"].Round, "another world, at no cost")
		require.Equal(t, 0, s.runs["a"].Place.RestartCount)
		require.Equal(t, map[string]job.Cause{"b": *cause}, s.r.Status().Bars)
		s.pass(time.Hour)
		require.Equal(t, "a spare", s.order())
	})
	t.Run("unbarred before its workers have stopped", func(t *testing.T) {
		s := world(t, p, "a", "b")
		s.ordered(OrderBar, "b")
		s.ordered(OrderUnbar, "b")
		s.obey()
		require.Equal(t, "a b", s.order())
		require.Equal(t, [2]int{1, 1}, [2]int{s.runs["a"].Round, s.runs["a"].Epoch}, "the same nodes are one round")
	})
	t.Run("a failure meanwhile is not charged", func(t *testing.T) {
		s := world(t, p, "a", "b", "spare")
		s.fail("a", RestartCharged)
		s.obeyOne("a")
		s.ordered(OrderBar, "b")
		require.Equal(t, job.CauseFailure, s.dirs["b"].Cause.Kind, "it is being stopped already")
		s.obey()
		require.Equal(t, "a spare", s.order())
	})
	t.Run("before the store is ready", func(t *testing.T) {
		s := newSim(t, p)
		s.can = []Ability{CanGate}
		s.join("a", "b", "spare")
		require.Equal(t, releasing, s.r.epoch.phase)
		s.ordered(OrderBar, "a")
		s.obey()
		require.Equal(t, "spare b", s.order())
	})
	t.Run("a spare", func(t *testing.T) {
		s := world(t, p, "a", "b", "spare")
		s.ordered(OrderBar, "spare")
		require.Equal(t, "a:run b:run spare:bar", s.kinds())
		require.Equal(t, []int{2, 1}, []int{s.r.Status().Members, s.r.Status().Waiting})
		s.vanish("b")
		s.pass(BrokenGrace)
		s.obey()
		require.Equal(t, "a:wait spare:bar", s.kinds())
	})
	t.Run("a node that has succeeded", func(t *testing.T) {
		s := world(t, p, "a", "b", "spare")
		s.succeed("a")
		s.ordered(OrderBar, "a")
		require.Equal(t, job.Run, s.dirs["b"].Kind, "it has no workers that could harm")
		s.fail("b", RestartCharged)
		s.obey()
		require.Equal(t, "spare b", s.order())
	})
	t.Run("a name that is not here", func(t *testing.T) {
		s := newSim(t, p)
		s.can = []Ability{CanGate}
		s.ordered(OrderBar, "b")
		s.join("a", "b", "c")
		s.obey()
		require.Equal(t, "a:run b:bar c:run", s.kinds())
	})
	t.Run("a launcher that was replaced", func(t *testing.T) {
		s := world(t, p, "a", "b", "spare")
		s.ordered(OrderBar, "b")
		s.must(Leave{ID: "b"})
		delete(s.dirs, "b")
		delete(s.runs, "b")
		s.obey()
		s.joinNode(Node{ID: "b2", Name: "b", Rank: -1, Slots: 2, Can: s.can})
		require.Equal(t, "a:run b2:bar spare:run", s.kinds())
		s.ordered(OrderUnbar, "b")
		require.Equal(t, "a:run b2:wait spare:run", s.kinds())
		require.Nil(t, s.r.Status().Bars)
	})
	t.Run("a launcher that knows no bars", func(t *testing.T) {
		s := newSim(t, p)
		s.join("a", "b", "spare")
		s.obey()
		s.ordered(OrderBar, "b")
		s.obey()
		require.Equal(t, "a spare", s.order())
		require.Equal(t, job.Wait, s.dirs["b"].Kind)
		require.Equal(t, &job.Cause{Kind: job.CauseOperator, Node: "b", Text: "by hand"}, s.dirs["b"].Cause)
	})
	t.Run("while it is checked, and unbarred again", func(t *testing.T) {
		s := gated(t, p)
		s.join("a", "b")
		s.ordered(OrderBar, "b")
		require.Equal(t, "a:wait b:bar", strings.Replace(s.kinds(), "a:check", "a:wait", 1))
		s.must(Cleared{ID: "b"})
		require.Equal(t, job.Bar, s.dirs["b"].Kind, "a check does not end the bar of the name")
		s.ordered(OrderUnbar, "b")
		require.Equal(t, waiting, s.r.members.nodes["b"].state)
		require.Equal(t, job.Check, s.dirs["b"].Kind, "it is cleared, and helps with the check of the other")
		s.obey()
		require.Equal(t, "a b", s.order())
	})
	t.Run("unbar ends a check's bar, too", func(t *testing.T) {
		s := gated(t, p)
		s.join("a", "b")
		s.must(Barred{ID: "b"})
		s.ordered(OrderBar, "b")
		require.Equal(t, job.CauseOperator, s.dirs["b"].Cause.Kind)
		s.clear("b")
		require.Equal(t, []int{0, 1}, []int{s.r.members.again, s.r.members.barred}, "its name is barred still")
		s.r.members.nodes["b"].cleared = false
		s.ordered(OrderUnbar, "b")
		require.Equal(t, "a:check b:check", s.kinds())
		s.must(Barred{ID: "b"})
		s.ordered(OrderUnbar, "b")
		require.Equal(t, "a:check b:check", s.kinds())
		s.obey()
		require.Equal(t, "a b", s.order())
	})
	t.Run("barred by name while its second opinion is awaited", func(t *testing.T) {
		s := gated(t, p)
		s.join("a", "b", "c")
		s.must(Barred{ID: "c"})
		s.obey()
		s.fail("a", RestartCharged)
		s.ordered(OrderBar, "c")
		require.Equal(t, []int{0, 1}, []int{s.r.members.again, s.r.members.barred})
		s.obey()
		require.Equal(t, "a b", s.order())
		require.Equal(t, job.Bar, s.dirs["c"].Kind)
		seq := s.dirs["c"].Seq
		s.ordered(OrderRestart, "")
		s.obey()
		require.Equal(t, seq, s.dirs["c"].Seq, "whose name is barred is not checked")
		s.vanish("b")
		s.pass(BrokenGrace)
		s.obey()
		require.Equal(t, "a:wait c:bar", s.kinds())
		require.Equal(t, forming, s.r.epoch.phase)
	})
	t.Run("beside a running world, unbarred to be checked", func(t *testing.T) {
		s := gated(t, p)
		s.ordered(OrderBar, "c")
		s.join("a", "b", "c")
		s.obey()
		require.Equal(t, "a:run b:run c:bar", s.kinds())
		s.ordered(OrderUnbar, "c")
		require.Equal(t, "a:run b:run c:check", s.kinds())
	})
}

func TestUnbarOfWhoIsNotBarred(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 1}, "a", "spare")
	require.ErrorIs(t, s.step(Order{Kind: OrderUnbar, Node: "spare"}), ErrUnknownNode)

	s = gated(t, Params{Min: 2, Max: 2})
	s.must(Join{
		Node: Node{ID: "b", Name: "b", Rank: -1, Slots: 2, Can: s.can}, Params: s.p, Barred: &job.Cause{Kind: job.CauseCheck},
	})
	s.join("a")
	require.Equal(t, []int{1, 1}, []int{s.r.members.checking, s.r.members.again})
	s.ordered(OrderUnbar, "b")
	require.Equal(t, []int{2, 0}, []int{s.r.members.checking, s.r.members.again}, "its check goes on as a first one")
}

// Bars are of names: they outlive launchers, and the run itself.
func TestBarOutlivesTheRun(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 1}, "a")
	s.ordered(OrderBar, "b")
	s.vanish("a")
	s.pass(silentGrace)
	s.join("b")
	require.Equal(t, job.Bar, s.dirs["b"].Kind, "nobody was left")
	s.join("a")
	s.obey()
	s.succeed("a")
	for _, id := range []string{"a", "b"} {
		s.must(Leave{ID: id})
		delete(s.dirs, id)
	}
	s.now = s.now.Add(time.Hour)
	s.joinNode(Node{ID: "b2", Name: "b", Rank: -1, Slots: 1, Can: s.can})
	require.Equal(t, "b2:bar", s.kinds(), "the run has been opened anew")
}

func TestBarsAreBounded(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1})
	for i := range maxBars {
		_, err := s.r.Step(s.now, Order{Kind: OrderBar, Node: fmt.Sprint(i)})
		require.NoError(t, err)
	}
	err := s.step(Order{Kind: OrderBar, Node: "one more"})
	require.ErrorIs(t, err, ErrBadOrder)
	require.ErrorContains(t, err, "4096 names are barred already; unbar some")
	s.ordered(OrderBar, "7")
	s.ordered(OrderUnbar, "7")
	s.ordered(OrderBar, "one more")
	require.Len(t, s.r.orders.bars, maxBars)
	s.join("here")
	require.ErrorIs(t, s.step(Order{Kind: OrderDrain, Node: "here"}), ErrBadOrder)
	s.ordered(OrderPause, "")
	s.can = []Ability{CanGate}
	s.must(Join{
		Node: Node{ID: "x", Name: "x", Rank: -1, Slots: 1, Can: s.can}, Params: s.p,
		Barred: &job.Cause{Kind: job.CauseOperator},
	})
	require.Len(t, s.r.orders.bars, maxBars)
}

func TestPause(t *testing.T) {
	p := Params{Min: 2, Max: 3, MaxRestarts: 3, JoinTimeout: time.Minute, LastCall: time.Second}
	cause := &job.Cause{Kind: job.CauseOperator, Text: "by hand"}
	held := func(t *testing.T, s *sim) {
		t.Helper()
		s.obey()
		for range 3 {
			s.pass(time.Hour)
			s.obey()
		}
		require.Empty(t, s.runs)
		for id, d := range s.dirs {
			require.Contains(t, []job.Kind{job.Wait, job.Bar}, d.Kind, id)
			require.Equal(t, cause, d.Paused, id)
			if d.Kind == job.Wait {
				require.Equal(t, cause, d.Cause, id)
			}
		}
		require.Equal(t, cause, s.r.Status().Paused)
		seq := s.r.out.seq
		s.ordered(OrderPause, "")
		require.Equal(t, seq, s.r.out.seq, "it is paused already")
	}
	resumed := func(t *testing.T, s *sim) {
		t.Helper()
		s.must(Order{Kind: OrderResume})
		require.Nil(t, s.r.Status().Paused)
		for id, d := range s.dirs {
			require.Nil(t, d.Paused, id)
		}
		require.ErrorIs(t, s.step(Order{Kind: OrderResume}), ErrNotPaused)
	}
	t.Run("running", func(t *testing.T) {
		s := world(t, p, "a", "b", "c", "spare")
		s.ordered(OrderPause, "")
		require.Equal(t, "a:stop b:stop c:stop spare:wait", s.kinds())
		require.Equal(t, cause, s.dirs["a"].Cause)
		require.Equal(t, cause, s.dirs["a"].Paused)
		held(t, s)
		require.ErrorIs(t, s.step(Order{Kind: OrderRestart}), ErrNotRunning)
		resumed(t, s)
		s.obey()
		require.Equal(t, "a b c", s.order())
		require.Equal(t, [2]int{1, 1}, [2]int{s.runs["a"].Round, s.runs["a"].Epoch}, "the same members, at no cost")
		require.Equal(t, 0, s.runs["a"].Place.RestartCount)
	})
	t.Run("releasing", func(t *testing.T) {
		s := newSim(t, p)
		s.join("a", "b", "c")
		s.ordered(OrderPause, "")
		held(t, s)
		resumed(t, s)
		s.obey()
		require.Equal(t, "a b c", s.order())
	})
	t.Run("forming, in its last call", func(t *testing.T) {
		s := newSim(t, p)
		s.join("a", "b")
		s.ordered(OrderPause, "")
		held(t, s)
		resumed(t, s)
		require.Equal(t, "a:wait b:wait", s.kinds(), "the last call is made again")
		s.pass(time.Second)
		s.obey()
		require.Equal(t, "a b", s.order())
		require.Nil(t, s.runs["a"].Cause, "no world was stopped for it")
	})
	t.Run("forming, with too few", func(t *testing.T) {
		s := newSim(t, p)
		s.join("a")
		s.pass(time.Minute - 1)
		s.ordered(OrderPause, "")
		held(t, s)
		resumed(t, s)
		s.pass(time.Minute - 1)
		require.Equal(t, job.Wait, s.dirs["a"].Kind)
		s.pass(1)
		require.Equal(t, job.Fail, s.dirs["a"].Kind)
	})
	t.Run("gating", func(t *testing.T) {
		s := gated(t, p)
		s.join("a", "b", "c")
		s.clear("a")
		s.must(Barred{ID: "b", Reason: "link"})
		s.ordered(OrderPause, "")
		require.Equal(t, "a:wait b:bar c:wait", s.kinds(), "the checks end")
		held(t, s)
		s.clear("c") // it had just been done
		require.Equal(t, cause, s.dirs["c"].Paused)
		s.join("d")
		require.Equal(t, job.Wait, s.dirs["d"].Kind)
		resumed(t, s)
		require.Equal(t, "a:check b:check c:check d:check", s.kinds())
		require.Equal(t, []int{2, 1, 1}, []int{s.r.members.waiting, s.r.members.checking, s.r.members.again})
		require.Equal(t, s.now.Add(defaultGateTimeout), s.r.sealer.next(s.r.memory.holdAt), "its time begins again")
		s.clear("d")
		s.obey()
		require.Equal(t, "a c d", s.order())
	})
	t.Run("stopping for a failure", func(t *testing.T) {
		s := world(t, p, "a", "b")
		s.fail("a", RestartCharged)
		s.ordered(OrderPause, "")
		require.Equal(t, job.CauseFailure, s.dirs["a"].Cause.Kind)
		held(t, s)
		resumed(t, s)
		s.obey()
		require.Equal(t, 1, s.runs["a"].Place.RestartCount)
	})
	t.Run("failing for good", func(t *testing.T) {
		s := world(t, p, "a", "b")
		s.fail("a", Permanent)
		s.ordered(OrderPause, "")
		s.obey()
		s.pass(attributionWindow)
		require.Equal(t, job.Fail, s.dirs["a"].Kind, "what was decided stands")
		require.Nil(t, s.dirs["a"].Paused)
	})
	t.Run("some had succeeded", func(t *testing.T) {
		s := world(t, p, "a", "b", "c")
		s.succeed("a")
		s.ordered(OrderPause, "")
		held(t, s)
		resumed(t, s)
		s.obey()
		require.Equal(t, "a b c", s.order())
	})
	t.Run("one is lost meanwhile", func(t *testing.T) {
		s := world(t, p, "a", "b", "c")
		s.ordered(OrderPause, "")
		s.obey()
		s.vanish("b")
		held(t, s)
		resumed(t, s)
		s.obey()
		require.Equal(t, "a c", s.order())
	})
	t.Run("all are replaced meanwhile", func(t *testing.T) {
		s := world(t, p, "a", "b")
		s.ordered(OrderPause, "")
		s.vanish("a", "b")
		s.pass(silentGrace)
		require.Zero(t, s.r.Next(), "nobody waits")
		s.join("c", "d", "e")
		held(t, s)
		resumed(t, s)
		s.obey()
		require.Equal(t, "c d e", s.order())
	})
	t.Run("an ended run is not paused", func(t *testing.T) {
		s := world(t, p, "a", "b")
		s.ordered(OrderPause, "")
		s.ordered(OrderStop, "")
		s.must(Leave{ID: "a"})
		s.must(Leave{ID: "b"})
		s.now = s.now.Add(time.Hour)
		s.join("c", "d", "e")
		s.obey()
		require.Equal(t, "c d e", s.order())
	})
	t.Run("bar and unbar", func(t *testing.T) {
		s := world(t, p, "a", "b", "c")
		s.ordered(OrderPause, "")
		s.obey()
		s.ordered(OrderBar, "b")
		require.Equal(t, job.Bar, s.dirs["b"].Kind)
		held(t, s)
		s.ordered(OrderUnbar, "b")
		s.ordered(OrderBar, "c")
		resumed(t, s)
		s.pass(time.Second)
		s.obey()
		require.Equal(t, "a b", s.order())
		require.Equal(t, job.Bar, s.dirs["c"].Kind)
	})
}

// revived is a sim with a new daemon for the nodes of an old one, each of which brings what it knows.
type revived struct {
	*sim
	old *sim
}

func (s *sim) revive() *revived {
	n := newSim(s.t, s.p)
	n.r, n.now, n.can = New(Config{Term: s.r.out.seq + 1000}), s.now, s.can
	return &revived{sim: n, old: s}
}

// comeBack lets nodes of the old daemon introduce themselves as Session does.
func (v *revived) comeBack(ids ...string) {
	v.t.Helper()
	for _, id := range ids {
		d := v.old.dirs[id]
		n := *v.old.r.members.nodes[id]
		n.Uptime = v.now.Sub(n.since)
		j := Join{Node: n.Node, Params: v.p, Restarts: d.Restarts, Spent: d.Spent, Paused: d.Paused}
		if d.Round > 0 {
			j.Seen = d.EpochID
		}
		if j.Barred = d.Barred; d.Kind == job.Bar {
			j.Barred = d.Cause
		}
		_, works := v.old.runs[id]
		if run, ok := v.old.worked[id]; ok {
			j.Resume = &Resume{EpochID: run.EpochID, Place: *run.Place, Hold: run.Hold}
			if !works {
				j.Stopped = run.EpochID
			}
		}
		v.must(j)
		v.must(Attach{ID: id})
		delete(v.runs, id) // told to wait, it ends its workers
		if works && v.dirs[id].Kind == job.Run {
			v.runs[id] = v.dirs[id]
		}
	}
}

// A last call that had begun before the members of a world came back says nothing about the next one.
func TestALastCallDoesNotOutliveARebuiltWorld(t *testing.T) {
	p := Params{Min: 2, Max: 5, MaxRestarts: 3, LastCall: 30 * time.Second, GrowthDelay: time.Hour}
	old := newSim(t, p)
	old.join("a", "b")
	old.pass(p.LastCall)
	old.obey()
	v := old.revive()
	v.join("x")
	v.join("y")
	v.comeBack("a", "b")
	require.Equal(t, running, v.r.epoch.phase)
	v.pass(p.LastCall)
	v.vanish("b")
	v.pass(BrokenGrace)
	v.obey()
	require.Empty(t, v.runs)
	v.pass(p.LastCall - time.Second)
	v.obey()
	require.Empty(t, v.runs)
	v.pass(time.Second)
	v.obey()
	require.Len(t, v.runs, 3)
}

// A pause and a command that a node has brought stay as old as that node's world when everybody leaves.
func TestBroughtOrdersKeepTheirAge(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	brought := func(id string, round int, command string) Join {
		n := Node{ID: id, Name: id, Rank: -1, Slots: 2, Can: able()}
		return Join{Node: n, Params: s.p, Seen: job.EpochID{Term: 1, Round: round},
			Command: &job.Command{Program: []string{command}}}
	}
	first := brought("a", 1, "old")
	first.Paused = &job.Cause{Kind: job.CauseOperator, Text: "by hand"}
	s.must(first)
	s.must(Leave{ID: "a"})
	require.Equal(t, "by hand", s.r.Status().Paused.Text)
	second := brought("b", 2, "new")
	second.Resume = &Resume{EpochID: second.Seen, Place: job.Place{GroupWorldSize: 2}}
	s.must(second)
	require.Nil(t, s.r.Status().Paused)
	require.Equal(t, []string{"new"}, s.r.Status().Command.Program)
}

func TestNoLimitOnWaitingCountsInAPause(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, JoinTimeout: time.Minute})
	s.join("a")
	s.ordered(OrderPause, "")
	s.now = s.now.Add(time.Hour) // without a Tick
	s.must(Order{Kind: OrderResume})
	s.pass(time.Minute - time.Second)
	require.Equal(t, job.Wait, s.dirs["a"].Kind)
	s.pass(time.Second)
	require.Equal(t, job.Fail, s.dirs["a"].Kind)
}

// A pause that an order has ended does not come back with a node that had not heard of that, even in a new history.
func TestAnEndedPauseStaysEnded(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.join("a")
	s.ordered(OrderPause, "")
	s.must(Order{Kind: OrderResume})
	s.must(Leave{ID: "a"})
	s.must(Join{Node: Node{ID: "b", Name: "b", Rank: -1, Slots: 2}, Params: s.p, Paused: &job.Cause{Text: "by hand"}})
	require.Nil(t, s.r.Status().Paused)
}

// A pause that outlives its daemon, which has kept nothing, does not count towards the deadline, from its beginning on.
func TestPauseOfAnEarlierDaemonIsNotCounted(t *testing.T) {
	s := world(t, Params{Min: 2, Max: 2, Budget: Budget{Deadline: 2 * time.Hour}}, "a", "b")
	s.pass(time.Hour)
	s.ordered(OrderPause, "")
	s.obey()
	s.pass(5 * time.Hour)
	for range 2 {
		v := s.revive()
		v.comeBack("a")
		v.pass(time.Minute)
		v.comeBack("b")
		v.obey()
		v.pass(time.Hour)
		s = v.sim
	}
	s.must(Order{Kind: OrderResume})
	s.obey()
	require.Equal(t, "a b", s.order())
	require.WithinDuration(t, s.now.Add(time.Hour), s.r.Status().Budget.Deadline, time.Second)
	require.Zero(t, s.dirs["a"].Spent.PausedAt)
}

// A pause that has ended, unknown to a node that comes back, is not counted either.
func TestEndedPauseOfAnEarlierDaemonIsForgotten(t *testing.T) {
	s := world(t, Params{Min: 2, Max: 2, Budget: Budget{Deadline: 2 * time.Hour}}, "a", "b")
	s.pass(time.Hour)
	s.ordered(OrderPause, "")
	s.obey()
	s.pass(time.Hour)
	paused := s.dirs["a"]
	s.must(Order{Kind: OrderResume})
	s.obey()
	require.Equal(t, "a b", s.order())
	v := s.revive()
	v.comeBack("b")
	worked := v.old.dirs["a"]
	v.old.dirs["a"] = paused
	v.comeBack("a")
	v.old.dirs["a"] = worked
	require.Nil(t, v.r.Status().Paused)
	require.Zero(t, v.r.account.spent.PausedAt)
	v.pass(time.Minute)
	v.ordered(OrderPause, "")
	v.obey()
	require.Equal(t, v.now, v.r.account.spent.PausedAt)
}

func TestPauseSurvivesTheDaemon(t *testing.T) {
	paused := func(t *testing.T, ids ...string) *sim {
		s := world(t, Params{Min: 2, Max: 2, MaxRestarts: 3}, ids...)
		s.ordered(OrderPause, "")
		s.obey()
		return s
	}
	quiet := func(t *testing.T, v *revived) {
		t.Helper()
		v.obey()
		v.pass(time.Hour)
		v.obey()
		require.Empty(t, v.runs)
		require.Equal(t, "by hand", v.r.Status().Paused.Text)
	}
	t.Run("all have stopped", func(t *testing.T) {
		v := paused(t, "a", "b", "spare").revive()
		v.comeBack("spare", "b", "a")
		quiet(t, v)
		require.Equal(t, "by hand", v.dirs["a"].Paused.Text)
		v.must(Order{Kind: OrderResume})
		v.obey()
		require.Equal(t, "a b", v.order())
	})
	t.Run("before the first world", func(t *testing.T) {
		s := newSim(t, Params{Min: 2, Max: 2})
		s.join("a")
		s.ordered(OrderPause, "")
		v := s.revive()
		v.comeBack("a")
		v.join("b")
		quiet(t, v)
		v.must(Order{Kind: OrderResume})
		v.obey()
		require.Equal(t, "a b", v.order())
	})
	t.Run("some still run", func(t *testing.T) {
		s := world(t, Params{Min: 2, Max: 2, MaxRestarts: 3}, "a", "b", "spare")
		s.ordered(OrderPause, "")
		s.runs["b"] = s.worked["b"]
		for _, order := range [][]string{{"spare", "a", "b"}, {"b", "a", "spare"}} {
			v := s.revive()
			v.comeBack(order...)
			quiet(t, v)
			require.ErrorIs(t, v.step(Order{Kind: OrderRestart}), ErrNotRunning)
			v.must(Order{Kind: OrderResume})
			v.obey()
			require.Equal(t, "a b", v.order())
			require.Equal(t, 0, v.runs["a"].Place.RestartCount)
		}
	})
	t.Run("one had not heard of it", func(t *testing.T) {
		s := world(t, Params{Min: 2, Max: 2}, "a", "b")
		s.ordered(OrderPause, "")
		s.obeyOne("a")
		s.dirs["b"], s.runs["b"] = s.worked["b"], s.worked["b"]
		v := s.revive()
		v.comeBack("b")
		require.Nil(t, v.r.Status().Paused)
		v.comeBack("a")
		quiet(t, v)
	})
	t.Run("a newer world shows that it had ended", func(t *testing.T) {
		for _, first := range []string{"spare", "a"} {
			s := world(t, Params{Min: 2, Max: 2}, "a", "b", "spare")
			s.ordered(OrderPause, "")
			s.obey()
			stale := s.dirs["spare"]
			s.must(Order{Kind: OrderResume})
			s.obey()
			s.dirs["spare"] = stale // it had not heard of it when the daemon died
			v := s.revive()
			if first == "spare" {
				v.comeBack("spare", "a", "b")
			} else {
				v.comeBack("a", "spare")
				require.Nil(t, v.r.Status().Paused)
				v.comeBack("b")
			}
			require.Equal(t, "a:run b:run spare:wait", v.kinds())
			require.Nil(t, v.dirs["spare"].Paused)
			require.Nil(t, v.r.Status().Paused)
		}
	})
	t.Run("brought to a world that has gone on it is late", func(t *testing.T) {
		s := world(t, Params{Min: 2, Max: 2, MaxRestarts: 3}, "a", "b", "spare")
		late := s.dirs["spare"]
		late.Paused, late.EpochID = &job.Cause{Kind: job.CauseOperator, Text: "by hand"}, s.r.epoch.id
		s.dirs["spare"] = late
		v := s.revive()
		v.comeBack("a", "b")
		v.fail("a", RestartFree)
		v.comeBack("spare")
		require.Equal(t, "a:stop b:stop spare:wait", v.kinds())
		require.Nil(t, v.r.Status().Paused)
		v.obey()
		require.Equal(t, "a b", v.order())
	})
	t.Run("the newest of those who bring it counts", func(t *testing.T) {
		s := world(t, Params{Min: 2, Max: 2}, "a", "b", "spare")
		stale := s.dirs["spare"]
		stale.Paused, stale.EpochID = &job.Cause{Kind: job.CauseOperator, Text: "by hand"}, s.r.epoch.id
		s.ordered(OrderRestart, "")
		s.obey()
		s.ordered(OrderPause, "")
		s.obey()
		s.dirs["spare"] = stale
		v := s.revive()
		v.comeBack("spare", "a", "b")
		quiet(t, v)
	})
	t.Run("an order of this daemon counts more", func(t *testing.T) {
		s := paused(t, "a", "b", "spare")
		v := s.revive()
		v.comeBack("spare")
		v.must(Order{Kind: OrderResume})
		v.comeBack("a", "b")
		v.obey()
		require.Equal(t, "a b", v.order(), "what they bring is older")
		v.ordered(OrderPause, "")
		quiet(t, v)
	})
	t.Run("ordered again, it is not the one that a newer world has outlived", func(t *testing.T) {
		s := world(t, Params{Min: 2, Max: 2}, "a", "b", "spare")
		stale := s.dirs["spare"]
		stale.Paused, stale.EpochID = &job.Cause{Kind: job.CauseOperator, Text: "by hand"}, s.r.epoch.id
		s.ordered(OrderRestart, "")
		s.obey()
		s.dirs["spare"] = stale
		v := s.revive()
		v.comeBack("spare")
		v.ordered(OrderPause, "")
		v.comeBack("a", "b")
		quiet(t, v)
	})
	t.Run("paused while the world is being rebuilt", func(t *testing.T) {
		v := world(t, Params{Min: 2, Max: 2}, "a", "b", "spare").revive()
		v.comeBack("a", "spare")
		v.ordered(OrderPause, "")
		require.Equal(t, "a:run spare:wait", v.kinds(), "it is not clear yet what runs")
		v.comeBack("b")
		require.Equal(t, "a:stop b:stop spare:wait", v.kinds())
		quiet(t, v)
	})
}

// What a node brings back takes no more room than what a daemon may have told it.
func TestWhatIsBroughtBackIsBounded(t *testing.T) {
	long := &job.Cause{
		Kind: job.CauseKind(strings.Repeat("k", 600)), Node: strings.Repeat("n", 600),
		Text: strings.Repeat("x", maxOrderText-1) + "é",
	}
	want := job.Cause{
		Kind: job.CauseKind(strings.Repeat("k", MaxName)), Node: strings.Repeat("n", MaxName),
		Text: strings.Repeat("x", maxOrderText-1),
	}
	s := newSim(t, Params{Min: 1, Max: 1})
	s.must(Join{Node: Node{ID: "a", Name: "a", Rank: -1, Slots: 1}, Params: s.p, Paused: long, Barred: long})
	require.Equal(t, want, *s.r.Status().Paused)
	require.Equal(t, want, s.r.Status().Bars["a"])
}

// Workers may take long to stop. What is ordered meanwhile, or taken back, is known to the nodes all the same.
func TestOrdersSurviveADaemonThatDiesWhileWorkersStop(t *testing.T) {
	for name, c := range map[string]struct {
		orders       []Order
		paused, bars bool
	}{
		"bar":                  {[]Order{{Kind: OrderBar, Node: "b"}}, false, true},
		"bar in a restart":     {[]Order{{Kind: OrderRestart}, {Kind: OrderBar, Node: "b"}}, false, true},
		"bar and unbar":        {[]Order{{Kind: OrderBar, Node: "b"}, {Kind: OrderUnbar, Node: "b"}}, false, false},
		"pause in a restart":   {[]Order{{Kind: OrderRestart}, {Kind: OrderPause}}, true, false},
		"pause and resume":     {[]Order{{Kind: OrderPause}, {Kind: OrderResume}}, false, false},
		"bar, pause, and both": {[]Order{{Kind: OrderBar, Node: "b"}, {Kind: OrderPause}}, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := world(t, Params{Min: 1, Max: 2}, "a", "b")
			for _, o := range c.orders {
				s.must(o)
				require.Equal(t, "a:stop b:stop", s.kinds())
			}
			v := s.revive()
			v.comeBack("a", "b")
			v.obey()
			require.Equal(t, c.paused, v.r.Status().Paused != nil)
			require.Equal(t, c.bars, v.dirs["b"].Kind == job.Bar)
			require.Equal(t, c.bars, len(v.r.Status().Bars) == 1)
			want := map[bool]string{true: "a", false: "a b"}[c.bars]
			if !c.paused {
				require.Equal(t, want, v.order())
			}
		})
	}
}

// A spare says that there has been a world. Whoever waits for its members is not out of time meanwhile.
func TestTheWaitForAnOlderWorldIsNoJoinTime(t *testing.T) {
	v := world(t, Params{Min: 1, Max: 1, JoinTimeout: 5 * time.Second}, "a", "spare").revive()
	v.comeBack("spare")
	v.pass(resumeWindow - 1)
	require.Equal(t, "spare:wait", v.kinds())
	v.pass(1)
	v.obey()
	require.Equal(t, "spare", v.order())

	v = world(t, Params{Min: 2, Max: 2, JoinTimeout: 5 * time.Second}, "a", "b", "spare").revive()
	v.comeBack("spare")
	v.pass(resumeWindow + 5*time.Second - 1)
	require.Equal(t, "spare:wait", v.kinds())
	v.pass(1)
	require.Equal(t, "spare:fail", v.kinds())
}

// What is ordered while a world is being rebuilt is known to those who have come back.
func TestOrdersSurviveADaemonThatDiesWhileAWorldIsRebuilt(t *testing.T) {
	v := world(t, Params{Min: 1, Max: 2}, "a", "b").revive()
	v.comeBack("b")
	v.ordered(OrderBar, "b")
	v.ordered(OrderPause, "")
	require.Equal(t, "b:run", v.kinds(), "its workers are left alone for now")
	v = v.revive()
	v.comeBack("b")
	require.NotNil(t, v.r.Status().Paused)
	require.Contains(t, v.r.Status().Bars, "b")
}

func TestBarSurvivesTheDaemon(t *testing.T) {
	s := world(t, Params{Min: 2, Max: 2}, "a", "b", "c")
	s.ordered(OrderBar, "b")
	s.obey()
	require.Equal(t, "a c", s.order())
	var ranks []string
	for _, n := range s.r.Nodes() {
		ranks = append(ranks, fmt.Sprint(n.Name, n.GroupRank))
	}
	require.Equal(t, []string{"a0", "c1", "b-1"}, ranks, "no two nodes have the same")
	v := s.revive()
	v.comeBack("b", "a", "c")
	require.Equal(t, "a:run b:bar c:run", v.kinds())
	require.Equal(t, "by hand", v.r.Status().Bars["b"].Text)

	v.ordered(OrderUnbar, "b")
	require.Equal(t, "a:run b:wait c:run", v.kinds())
	v.must(Leave{ID: "b"})
	v.ordered(OrderBar, "another")
	v.must(Join{
		Node: Node{ID: "b2", Name: "b", Rank: -1, Slots: 2, Can: v.can}, Params: v.p,
		Barred: &job.Cause{Kind: job.CauseOperator, Node: "b", Text: "by hand"},
	})
	require.Equal(t, job.Wait, v.dirs["b2"].Kind, "it has not heard that it was unbarred")

	v = s.revive()
	v.ordered(OrderUnbar, v.barred("b"))
	v.comeBack("b")
	require.Empty(t, v.r.Status().Bars, "an operator of this daemon has unbarred it")
}

// barred bars a name so that it can be unbarred.
func (s *sim) barred(name string) string {
	s.ordered(OrderBar, name)
	return name
}

// A node that brings a bar of its name bars those of the name that are here already.
func TestBroughtBarBreaksTheWorld(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 1}, "a", "spare")
	s.must(Join{
		Node: Node{ID: "a2", Name: "a", Rank: -1, Slots: 2, Can: s.can}, Params: s.p,
		Barred: &job.Cause{Kind: job.CauseHang, Node: "a", Text: "twice"},
	})
	require.Equal(t, job.Stop, s.dirs["a"].Kind)
	s.obey()
	require.Equal(t, "a:bar a2:bar spare:run", s.kinds())
}

func TestBroughtChecksBar(t *testing.T) {
	bar := &job.Cause{Kind: job.CauseCheck, Node: "b", Text: "gpu 3"}
	join := func(s *sim, can []Ability) {
		s.must(Join{Node: Node{ID: "b", Name: "b", Rank: -1, Slots: 2, Can: can}, Params: s.p, Barred: bar})
	}
	s := gated(t, Params{Min: 2, Max: 2})
	join(s, s.can)
	require.Equal(t, "b:bar", s.kinds())
	require.Equal(t, bar, s.dirs["b"].Cause)
	require.Empty(t, s.r.Status().Bars, "it is not the name's")
	s.joinNode(Node{ID: "b2", Name: "b", Rank: -1, Slots: 2, Can: s.can})
	require.Equal(t, "b:check b2:check", s.kinds(), "another launcher is checked")
	s.obey()
	require.Equal(t, running, s.r.epoch.phase)

	s = newSim(t, Params{Min: 2, Max: 2})
	join(s, []Ability{CanGate})
	require.Equal(t, "b:wait", s.kinds(), "this run has no gate")

	s = gated(t, Params{Min: 2, Max: 2})
	join(s, nil)
	require.Equal(t, "b:wait", s.kinds())

	s = gated(t, Params{Min: 1, Max: 1})
	s.join("a")
	s.obey()
	join(s, s.can)
	require.Equal(t, "a:run b:check", s.kinds())
	require.Equal(t, 1, s.r.members.again)
}

func TestOrdersWhileAWorldIsRebuilt(t *testing.T) {
	p := Params{Min: 2, Max: 2, MaxRestarts: 1}
	t.Run("restart", func(t *testing.T) {
		v := world(t, p, "a", "b").revive()
		v.comeBack("a")
		v.must(Order{Kind: OrderRestart, Charge: true, Text: "now"})
		require.Equal(t, job.Run, v.dirs["a"].Kind)
		v.comeBack("b")
		require.Equal(t, "a:stop b:stop", v.kinds())
		require.Equal(t, "now", v.dirs["a"].Cause.Text)
		v.obey()
		require.Equal(t, 1, v.runs["b"].Place.RestartCount)
	})
	t.Run("restart, and a member fails for good", func(t *testing.T) {
		v := world(t, p, "a", "b").revive()
		v.comeBack("a")
		v.must(Order{Kind: OrderRestart})
		v.fail("a", Permanent)
		v.comeBack("b")
		v.obey()
		v.pass(attributionWindow)
		require.Equal(t, job.CauseFailure, v.dirs["b"].Cause.Kind)
		require.Equal(t, job.Fail, v.dirs["b"].Kind)
	})
	t.Run("stop", func(t *testing.T) {
		v := world(t, p, "a", "b").revive()
		v.comeBack("a")
		v.ordered(OrderStop, "")
		require.Equal(t, job.Fail, v.dirs["a"].Kind)
		v.must(Leave{ID: "a"})
		v.pass(time.Hour)
		require.Zero(t, v.r.Next())
	})
	t.Run("bar of a member", func(t *testing.T) {
		v := world(t, p, "a", "b", "spare").revive()
		v.comeBack("a", "spare")
		v.ordered(OrderBar, "a")
		require.Equal(t, "a:run spare:wait", v.kinds())
		v.comeBack("b")
		require.Equal(t, "a:stop b:stop spare:wait", v.kinds())
		v.obey()
		require.Equal(t, "spare b", v.order())
	})
	t.Run("bar of a member whose run has succeeded meanwhile", func(t *testing.T) {
		p := Params{Min: 3, Max: 3, Budget: Budget{BackoffMax: -1, Success: SuccessAny, Tolerate: true}}
		v := world(t, p, "a", "b", "c").revive()
		for rank, id := range []string{"a", "b", "c"} {
			place := job.Place{GroupRank: rank, GroupWorldSize: 3, RankBase: 2 * rank, WorldSize: 6}
			e := Join{Node: v.old.r.members.nodes[id].Node, Params: v.p, Seen: v.old.r.epoch.id,
				Resume: &Resume{EpochID: v.old.r.epoch.id, Place: place}}
			switch id {
			case "a":
				e.Resume.Ranks = []int{1}
			case "b":
				e.Resume.Decision, e.Resume.Tolerated = RestartCharged, true
			case "c":
				v.ordered(OrderBar, "c")
			}
			v.must(e)
		}
		require.Equal(t, job.Succeeded, v.r.Evidence().Outcome)
		require.Equal(t, "a:done b:done c:done", v.kinds(), "it stays over")
	})
}

func TestChangedTopologyCountsFromTheNextSeal(t *testing.T) {
	s := newSim(t, Params{Min: 4, Max: 4})
	for _, id := range []string{"a", "b", "c", "d"} {
		s.joinNode(Node{ID: id, Name: id, Rank: -1, Slots: 2, IP: id})
	}
	s.obey()
	s.must(Rewire{Topology: Topology{"a": "x", "b": "y", "c": "x", "d": "y"}})
	require.Equal(t, "4 nodes; it counts from the next seal", s.notes("topology")[0].Text)
	require.Equal(t, "a b c d", s.order())
	s.ordered(OrderRestart, "")
	s.obey()
	require.Equal(t, "a c b d", s.order())
}

func TestStaticRanksIgnoreTheTopology(t *testing.T) {
	s := newSim(t, Params{Min: 3, Max: 3, Static: true})
	s.must(Rewire{Topology: Topology{"a": "x", "b": "y", "c": "x"}})
	for i, id := range []string{"a", "b", "c"} {
		s.joinNode(Node{ID: id, Name: id, Rank: i, Slots: 2, IP: id})
	}
	s.obey()
	require.Equal(t, "a b c", s.order())
}

func TestEvidenceOfEveryEpochIsHandedOutOnce(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 1, MaxRestarts: 1}, "a")
	s.fail("a", RestartCharged)
	require.Empty(t, s.ended, "more may become known until the next seal")
	s.obey()
	require.Len(t, s.ended, 1)
	require.Equal(t, job.EpochID{Term: s.r.epoch.id.Term, Round: 1}, s.ended[0].EpochID)
	require.Equal(t, "a failed", s.ended[0].Failures[0].Text)
	require.Equal(t, job.CauseFailure, s.ended[0].Cause.Kind)
	require.Empty(t, s.ended[0].Outcome)
	s.fail("a", RestartCharged)
	require.Len(t, s.ended, 2)
	require.Equal(t, job.EpochID{Term: s.r.epoch.id.Term, Round: 1, Epoch: 1}, s.ended[1].EpochID)
	require.Equal(t, job.Failed, s.ended[1].Outcome)
	s.pass(time.Hour)
	require.Len(t, s.ended, 2)

	s = world(t, Params{Min: 1, Max: 1}, "a")
	s.vanish("a")
	s.pass(silentGrace)
	require.Len(t, s.ended, 1, "nobody is left")
	require.Equal(t, "a", s.ended[0].Losses[0].Node)
	s.pass(time.Hour)
	require.Len(t, s.ended, 1)

	s = newSim(t, Params{Min: 2, Max: 2, JoinTimeout: time.Second})
	s.join("a")
	s.pass(time.Second)
	require.Equal(t, job.CauseTimeout, s.ended[0].Cause.Kind, "a run that had no epoch")
}

func TestPortsAreToldToTheWorld(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1})
	s.must(Join{Node: Node{ID: "a", Name: "a", Rank: -1, Slots: 2, Ports: []int{4001, 4002},
		Bases: []int{60000, 60016}}, Params: s.p})
	require.Equal(t, []int{4001, 4002}, s.notes("seal")[0].Members[0].Ports)
	require.Equal(t, []int{60000, 60016}, s.notes("seal")[0].Members[0].Bases)
	s.must(Attach{ID: "a"})
	s.obey()
	s.ordered(OrderRestart, "")
	again := Node{ID: "a", Name: "a", Rank: -1, Slots: 2, Ports: []int{5001}}
	s.must(Join{Node: again, Params: s.p, Stopped: s.r.epoch.id})
	require.Equal(t, []int{5001}, s.r.World()[0].Ports)
	require.Empty(t, s.r.World()[0].Bases)
	for want, n := range map[string]Node{
		"257 ports; at most 256":        {Ports: make([]int, 257)},
		"port 0; need 1 to 65535":       {Ports: []int{80, 0}},
		"port 65536":                    {Ports: []int{65536}},
		"17 first ports; at most 16":    {Bases: make([]int, 17)},
		"port 65537":                    {Bases: []int{60000, 65537}},
		"17 abilities; at most 16 are":  {Can: make([]Ability, 17)},
		"17 addresses; at most 16 are ": {Addrs: make([]string, 17)},
	} {
		n.ID, n.Name, n.Slots, n.Rank = "x", "x", 1, -1
		err := s.step(Join{Node: n, Params: s.p})
		require.ErrorIs(t, err, ErrRefused)
		require.ErrorContains(t, err, want)
	}
	full := Node{
		ID: "x", Name: "x", Rank: -1, Slots: 1, Addrs: make([]string, MaxAddrs), Can: make([]Ability, maxAbilities),
	}
	for range MaxPorts {
		full.Ports = append(full.Ports, 65535)
	}
	full.Ports[0] = 1
	s.must(Join{Node: full, Params: s.p})
}
