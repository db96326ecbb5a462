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

// A loss is dated by the last sign of life, and by its news where the node was there until then.
func TestWhenANodeWentAway(t *testing.T) {
	for name, c := range map[string]struct {
		away func(*sim)
		ago  time.Duration
	}{
		"its connection broke": {func(s *sim) { s.vanish("b"); s.pass(BrokenGrace) }, BrokenGrace},
		"silent":               {func(s *sim) { s.must(Detach{ID: "b"}); s.pass(silentGrace) }, silentGrace},
		"replaced while it was connected": {func(s *sim) {
			s.pass(time.Hour)
			s.joinNode(Node{ID: "b2", Name: "b", Rank: 1, Generation: 2, Slots: 2})
		}, 0},
		"left without a request": {func(s *sim) {
			s.must(Detach{ID: "b"})
			s.pass(time.Second)
			s.must(Leave{ID: "b"})
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, Params{Min: 1, Max: 2})
			s.joinNode(Node{ID: "a", Name: "a", Rank: 0, Generation: 1, Slots: 2})
			s.joinNode(Node{ID: "b", Name: "b", Rank: 1, Generation: 1, Slots: 2})
			s.obey()
			c.away(s)
			losses := s.r.Evidence().Losses
			require.Len(t, losses, 1)
			require.Equal(t, "b", losses[0].Node)
			require.Equal(t, c.ago, s.now.Sub(losses[0].At))
		})
	}
}

// A launcher that was killed is a loss as soon as somebody says so. It costs no restart, and its host is not in doubt.
func TestKilledLauncherIsLostAtOnce(t *testing.T) {
	for name, before := range map[string]func(*sim){
		"while it was connected":   func(*sim) {},
		"after its connection":     func(s *sim) { s.must(Detach{ID: "b", Broken: true}) },
		"after the others' worker": func(s *sim) { s.fail("a", RestartCharged) },
	} {
		t.Run(name, func(t *testing.T) {
			s := world(t, Params{Min: 1, Max: 2, MaxRestarts: 3}, "a", "b")
			before(s)
			s.must(Leave{ID: "b", Reason: "its launcher was killed", Killed: true})
			e := s.r.Evidence()
			require.Equal(t, &job.Cause{Kind: job.CauseLoss, Node: "b", Text: "node 1 (b) is gone: its launcher was killed"},
				e.Cause)
			require.Len(t, e.Losses, 1)
			require.False(t, e.Losses[0].Silent)
			delete(s.dirs, "b")
			s.obey()
			require.Equal(t, "running", s.r.Status().Phase)
			require.Equal(t, 0, s.r.Status().Restarts)
			require.ErrorIs(t, s.step(Leave{ID: "b", Killed: true}), ErrUnknownNode)
			require.ErrorIs(t, s.step(Join{Node: Node{ID: "b", Name: "b", Rank: -1, Slots: 2},
				Params: Params{Min: 1, Max: 2, MaxRestarts: 3}}), ErrRefused, "a request that was under way")
		})
	}
}

// A host that gives no sign of life is suspect as soon as its connection shows it, and counts from its last sign: it is
// lost at once if the world is broken anyway, and else after the run's time.
func TestSilentHost(t *testing.T) {
	const rest = 20*time.Second - SuspectAfter
	for name, c := range map[string]struct {
		before, after func(*sim) // b is noticed
		lostAfter     time.Duration
	}{
		"while the others work": {nil, func(*sim) {}, rest},
		"after a worker of another node has failed": {
			func(s *sim) { s.fail("a", RestartCharged); s.obeyOne("a") }, func(*sim) {}, 0},
		"before a worker of another node fails": {nil, func(s *sim) { s.fail("a", RestartCharged); s.obeyOne("a") }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := world(t, Params{Min: 1, Max: 2, MaxRestarts: 1, NodeTimeout: 20 * time.Second}, "a", "b")
			delete(s.dirs, "b")
			delete(s.runs, "b")
			s.gone["b"] = true
			if c.before != nil {
				c.before(s)
			}
			s.pass(time.Minute)
			last := s.now.Add(-SuspectAfter)
			s.must(Detach{ID: "b", Broken: true, Silent: true})
			require.Contains(t, eventsOf(s), "suspect")
			c.after(s)
			if c.lostAfter > 0 {
				s.pass(c.lostAfter - 1)
				require.NotContains(t, eventsOf(s), "node-loss")
				s.pass(1)
				require.Len(t, s.r.Evidence().Losses, 1)
				require.True(t, s.r.Evidence().Losses[0].Silent)
				require.Equal(t, last, s.r.Evidence().Losses[0].At)
				require.Equal(t, "silent for 20s", s.noted(job.EventNodeLoss))
			}
			require.Contains(t, eventsOf(s), "node-loss")
			s.obey()
			require.Equal(t, 0, s.r.Status().Restarts)
			require.Equal(t, "a", s.order())
		})
	}
}

// The kernel may notice when no request is open: its last answer was never received.
func TestSilenceBetweenRequests(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 2}, "a", "b")
	s.must(Silence{ID: "b"})
	s.must(Silence{ID: "nobody"})
	require.NotContains(t, eventsOf(s), "suspect", "it has another request open")
	s.gone["b"] = true
	delete(s.dirs, "b")
	delete(s.runs, "b")
	s.fail("a", RestartFree)
	s.obeyOne("a")
	s.must(Detach{ID: "b"})
	s.pass(SuspectAfter + time.Second)
	require.NotContains(t, eventsOf(s), "node-loss")
	s.must(Silence{ID: "b"})
	require.Contains(t, eventsOf(s), "node-loss")
	s.obey()
	require.Equal(t, "a", s.order())
}

func TestSilentHostComesBack(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 2}, "a", "b")
	s.must(Detach{ID: "b", Broken: true, Silent: true})
	s.pass(silentGrace - SuspectAfter - 1)
	s.must(Attach{ID: "b"})
	s.must(Silence{ID: "b"})
	s.pass(time.Hour)
	require.Equal(t, "a b", s.order())
	require.Equal(t, 1, s.runs["b"].Round)
}

// A silent host that answers no new connection either is lost soon, unless the run has a time of its own, more than
// half of the nodes are silent, or it is back.
func TestUnreachableHost(t *testing.T) {
	const rest = UnreachableAfter - SuspectAfter
	back := func(s *sim) { s.must(Attach{ID: "b"}) }
	for name, c := range map[string]struct {
		timeout       time.Duration
		nodes, silent []string
		before, after func(*sim)
		lostAfter     time.Duration // since it was noticed; 0: never
	}{
		"one of two":                   {0, nodes(1), nil, nil, nil, rest},
		"two of four":                  {0, nodes(3), nodes(1), nil, nil, rest},
		"two of three":                 {0, nodes(2), nodes(1), nil, nil, silentGrace - SuspectAfter},
		"all":                          {0, nodes(1), nodes(1), nil, nil, silentGrace - SuspectAfter},
		"the run's own time is longer": {20 * time.Second, nodes(1), nil, nil, nil, 20*time.Second - SuspectAfter},
		"back before that is known":    {0, nodes(1), nil, back, nil, 0},
		"back":                         {0, nodes(1), nil, nil, back, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := world(t, Params{Min: 1, Max: 1 + len(c.nodes), NodeTimeout: c.timeout}, append(c.nodes, "b")...)
			for _, id := range append(c.silent, "b") {
				s.must(Detach{ID: id, Broken: true, Silent: true})
			}
			noticed := s.now
			s.pass(rest - 1)
			if c.before != nil {
				c.before(s)
			}
			for _, id := range append(c.silent, "b", "nobody") {
				s.must(Unreachable{ID: id})
			}
			if c.after != nil {
				c.after(s)
			}
			require.Empty(t, s.r.Evidence().Losses)
			if c.lostAfter == 0 {
				s.pass(time.Minute)
				require.Empty(t, s.r.Evidence().Losses)
				return
			}
			s.pass(noticed.Add(c.lostAfter - 1).Sub(s.now))
			require.NotContains(t, eventsOf(s), "node-loss")
			s.pass(1)
			at := slices.Index(eventsOf(s), "node-loss")
			require.Positive(t, at)
			require.Equal(t, fmt.Sprintf("silent for %s", c.lostAfter+SuspectAfter), s.log[at].Text)
		})
	}
}

func eventsOf(s *sim) (names []string) {
	for _, n := range s.log {
		names = append(names, string(n.Event))
	}
	return names
}

// Who has stopped its workers as told and goes away then did not make them fail.
func TestOnlyWhoOwesAStopMayHaveDied(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 2}, "a", "b")
	s.fail("a", Permanent)
	s.obey()
	s.ordered(OrderBar, "b")
	s.pass(attributionWindow / 2)
	s.must(Detach{ID: "b", Broken: true})
	s.pass(attributionWindow / 2)
	require.Equal(t, job.Failed, s.r.Evidence().Outcome)
	require.Contains(t, s.r.Evidence().Cause.Text, "a failed")
}

// Who hangs up between two requests is waited for, longer than one whose request has broken, unless it is back.
func TestHungUp(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 2, MaxRestarts: 3}, "a", "b")
	s.must(HungUp{ID: "nobody"})
	s.must(HungUp{ID: "b"}) // its request is open
	s.pass(silentGrace)
	s.must(Detach{ID: "b"})
	s.must(HungUp{ID: "b"})
	s.must(Attach{ID: "b"})
	s.pass(silentGrace)
	require.Empty(t, s.r.Evidence().Losses)
	s.must(Detach{ID: "b"})
	s.pass(time.Second)
	s.must(HungUp{ID: "b"})
	at := s.now
	s.pass(hungUpGrace - time.Millisecond)
	s.must(HungUp{ID: "b"})
	require.Empty(t, s.r.Evidence().Losses)
	s.pass(time.Millisecond)
	require.Len(t, s.r.Evidence().Losses, 1)
	require.Equal(t, at, s.r.Evidence().Losses[0].At)
}

// A launcher that ends its workers has one connection and no request: its end is as good as that of a request.
func TestHungUpWhileItStops(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 2, MaxRestarts: 3}, "a", "b")
	s.fail("a", RestartCharged)
	require.Equal(t, job.Stop, s.dirs["b"].Kind)
	s.must(Detach{ID: "b"})
	s.pass(time.Second)
	s.must(HungUp{ID: "b"})
	s.pass(brokenGraceFailing / 2)
	s.must(Attach{ID: "b"})
	s.pass(time.Minute)
	require.Empty(t, s.r.Evidence().Losses, "it has dialed again")
	s.must(Detach{ID: "b"})
	s.must(HungUp{ID: "b"})
	s.pass(brokenGraceFailing - 1)
	require.Empty(t, s.r.Evidence().Losses)
	s.pass(1)
	require.Len(t, s.r.Evidence().Losses, 1)
}

// A newcomer without workers that hangs up is waited for, too: it may have had two connections.
func TestNewcomerThatHangsUp(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.must(Join{Node: Node{ID: "a", Name: "a", Rank: -1, Slots: 1}, Params: s.p})
	s.must(HungUp{ID: "a"})
	s.pass(hungUpGrace - time.Millisecond)
	require.Equal(t, 1, s.r.Size())
	s.pass(time.Millisecond)
	require.Zero(t, s.r.Size())
}

// The farewell of a launcher that was killed may be faster than its join.
func TestFarewellBeforeTheJoin(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.join("b")
	err := s.step(Leave{ID: "a", Killed: true})
	require.ErrorIs(t, err, ErrUnknownNode)
	err = s.step(Leave{ID: "c"})
	require.ErrorIs(t, err, ErrUnknownNode)
	for id, want := range map[string]error{"a": ErrRefused, "c": nil} {
		n := Node{ID: id, Name: id, Rank: -1, Slots: 1}
		err = s.step(Join{Node: n, Params: s.p})
		require.ErrorIs(t, err, want)
	}
}

// A launcher whose port is closed is lost at once, if its connection has broken as well; nobody else is.
func TestClosedPort(t *testing.T) {
	for name, c := range map[string]struct {
		before func(*sim)
		lost   bool
	}{
		"its connection has broken": {func(s *sim) { s.must(Detach{ID: "b", Broken: true}) }, true},
		"after the others' worker": {func(s *sim) {
			s.fail("a", RestartCharged)
			s.must(Detach{ID: "b", Broken: true})
		}, true},
		"it is connected": {func(*sim) {}, false},
		"it is back": {func(s *sim) {
			s.must(Detach{ID: "b", Broken: true})
			s.must(Attach{ID: "b"})
		}, false},
		"its request has ended": {func(s *sim) { s.must(Detach{ID: "b"}) }, false},
		"its host is silent":    {func(s *sim) { s.must(Detach{ID: "b", Broken: true, Silent: true}) }, false},
		"another of its requests is on": {func(s *sim) {
			s.must(Attach{ID: "b"})
			s.must(Detach{ID: "b", Broken: true})
		}, false},
		"most nodes are away": {func(s *sim) {
			for _, id := range []string{"b", "c", "d"} {
				s.must(Detach{ID: id, Broken: true})
			}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := world(t, Params{Min: 1, Max: 4, MaxRestarts: 3}, "a", "b", "c", "d")
			c.before(s)
			s.must(Refused{ID: "b"})
			s.must(Refused{ID: "nobody"})
			if !c.lost {
				require.Empty(t, s.r.Evidence().Losses)
				return
			}
			e := s.r.Evidence()
			require.Len(t, e.Losses, 1)
			require.Equal(t, "its connection broke, and its launcher's port is closed", e.Losses[0].Reason)
			require.True(t, e.Losses[0].Silent, "it has said nothing")
			delete(s.dirs, "b")
			s.obey()
			require.Equal(t, 0, s.r.Status().Restarts)
		})
	}
}

// A node that is away while a failure is judged, and comes back, delays the run's end no longer than that.
func TestWhoComesBackHasNotDied(t *testing.T) {
	s := world(t, Params{Min: 2, Max: 2}, "a", "b")
	s.must(Detach{ID: "b"})
	s.must(HungUp{ID: "b"})
	s.fail("b", Permanent)
	s.pass(attributionWindow)
	require.Equal(t, job.Stop, s.dirs["a"].Kind, "it may have died")
	s.pass(time.Second)
	s.must(Attach{ID: "b"})
	require.Equal(t, job.Fail, s.dirs["a"].Kind)

	s = world(t, Params{Min: 2, Max: 2}, "a", "b")
	s.must(Detach{ID: "b"})
	s.must(HungUp{ID: "b"})
	s.fail("b", Permanent)
	s.must(Attach{ID: "b"})
	require.Equal(t, job.Stop, s.dirs["a"].Kind, "others may have died")
	s.pass(attributionWindow)
	require.Equal(t, job.Fail, s.dirs["a"].Kind)
}

func TestLifeOfANode(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1})
	for _, life := range []Life{{Port: -1}, {Port: 65536}, {Port: 1, Key: strings.Repeat("x", MaxName+1)}} {
		_, err := s.r.Step(s.now, Join{Node: Node{ID: "a", Name: "a", Rank: -1, Slots: 1, Life: life}, Params: s.p})
		require.ErrorContains(t, err, "lives at port")
	}
	s.must(Join{Node: Node{ID: "a", Name: "a", Rank: -1, Slots: 1, Life: Life{4711, "key"}}, Params: s.p})
	require.Equal(t, Life{4711, "key"}, s.member("a").Life)
	require.Zero(t, s.member("b").Life)
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
	require.Equal(t, "silent for 15s", s.noted(job.EventNodeLoss))
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
