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

// helpers are the nodes that were told to help, by the newest Action that names some.
func helpers(acts []Action) (ids []string) {
	for _, a := range acts {
		if len(a.Helpers) > 0 {
			ids = a.Helpers
		}
	}
	return ids
}

// Cleared nodes help to check a newcomer, a few for each, and nobody waits for them.
func TestHelpers(t *testing.T) {
	start := func(t *testing.T, members, newcomers int) (*sim, []Action) {
		s := gated(t, Params{Min: members, Max: members + newcomers, LastCall: time.Second, MaxRestarts: 9})
		s.join(nodes(members)...)
		s.pass(time.Second)
		s.obey()
		require.Len(t, s.runs, members)
		for i := range newcomers {
			s.join(fmt.Sprint("x", i))
		}
		for id := range s.dirs {
			if strings.HasPrefix(id, "x") {
				s.must(Cleared{ID: id, Until: s.now})
			}
		}
		s.pass(defaultGrowthDelay)
		ids := nodes(members)
		for _, id := range ids[:members-1] {
			s.obeyOne(id)
		}
		last := ids[members-1]
		acts, err := s.r.Step(s.now, Join{
			Node: Node{ID: last, Name: last, Rank: -1, Slots: 2, Can: s.can}, Params: s.p, Stopped: s.r.epoch.id,
		})
		require.NoError(t, err)
		s.take(acts)
		clear(s.runs)
		return s, acts
	}
	t.Run("few", func(t *testing.T) {
		s, acts := start(t, 3, 1)
		require.Equal(t, nodes(3), helpers(acts))
		require.Equal(t, "n000:check n001:check n002:check x0:check", s.kinds())
		require.Equal(t, "checking 1 of 4 nodes; 3 others help", s.notes("gate")[1].Text)
		require.True(t, s.member("n000").Asked && s.member("x0").Asked)
		s.must(Cleared{ID: "n000", Until: s.now}) // it was not needed
		require.False(t, s.member("n000").Asked)
		require.False(t, s.r.members.nodes["n000"].optional, "it is not awaited")
		require.Equal(t, gating, s.r.epoch.phase)
		require.Equal(t, job.Check, s.dirs["n000"].Kind, "it is told to run next")
		s.must(Cleared{ID: "x0"})
		require.Equal(t, releasing, s.r.epoch.phase, "nobody waits for the other helpers")
		s.must(Cleared{ID: "n001", Until: s.now})
		require.NotEqual(t, job.Wait, s.dirs["n001"].Kind, "it is in the world")
		s.obey()
		require.Len(t, s.runs, 4)
		s.fail("n000", RestartCharged)
		s.obey()
		require.Equal(t, 1, s.runs["n001"].Epoch, "who has helped keeps its pass")
	})
	t.Run("many", func(t *testing.T) {
		_, acts := start(t, 30, 2)
		require.Equal(t, nodes(30)[:12], helpers(acts), "four for each of two, and four")
	})
	t.Run("a helper fails", func(t *testing.T) {
		s, _ := start(t, 3, 1)
		s.must(Barred{ID: "n001", Reason: "ecc"})
		require.Equal(t, job.Bar, s.dirs["n001"].Kind)
		s.clear("x0")
		s.obey()
		require.Equal(t, "n000 x0 n002", s.order())
	})
	t.Run("a helper departs", func(t *testing.T) {
		s, _ := start(t, 3, 1)
		s.vanish("n001")
		s.clear("x0")
		s.obey()
		require.Equal(t, "n000 x0 n002", s.order())
	})
	t.Run("a refusal does not disturb", func(t *testing.T) {
		s, _ := start(t, 3, 1)
		require.Error(t, s.step(Join{Node: Node{ID: "y", Name: "y", Slots: 1}, Params: Params{Min: 1, Max: 1}}))
		require.Equal(t, job.Check, s.dirs["n001"].Kind)
	})
	t.Run("old launchers are none", func(t *testing.T) {
		s := gated(t, Params{Min: 3, Max: 3})
		s.can = nil
		s.join("old")
		s.can = []Ability{CanGate}
		s.join("a", "b")
		s.clear("a")
		s.vanish("b")
		s.pass(BrokenGrace)
		s.join("c")
		require.Equal(t, "a:check c:check old:wait", s.kinds())
	})
	t.Run("who comes while others are checked has partners", func(t *testing.T) {
		s, _ := start(t, 3, 1)
		seq := s.dirs["n000"].Seq
		s.join("late")
		require.Equal(t, seq, s.dirs["n000"].Seq)
		require.Equal(t, job.Check, s.dirs["late"].Kind)
	})
}

// A newcomer that nobody could be paired with waits as if it were cleared, and is checked again where there are others.
func TestPassedAlone(t *testing.T) {
	s := gated(t, Params{Min: 1, Max: 4, LastCall: time.Second, MaxRestarts: 9, GrowthDelay: time.Minute})
	s.join("a")
	s.pass(time.Second)
	s.must(Cleared{ID: "a", Until: s.now})
	s.obey()
	for range 2 {
		s.fail("a", RestartCharged)
		s.obey()
		require.Equal(t, "a", s.order())
	}
	require.Len(t, s.checked["a"], 1, "there is still nobody else")
	s.must(Order{Kind: OrderBar, Node: "out"})
	s.join("out")
	s.fail("a", RestartCharged)
	s.obey()
	require.Equal(t, "a", s.order())
	require.Len(t, s.checked["a"], 1, "who gets no workers is no company")
	s.leave("out")

	s.join("b")
	s.must(Cleared{ID: "b", Until: s.now})
	require.Equal(t, "a:run b:wait", s.kinds())
	s.join("c")
	require.Equal(t, "a:run b:check c:check", s.kinds(), "spares are checked among themselves")
	require.Equal(t, []int{1, 1}, []int{s.r.members.waiting, s.r.members.checking}, "and count as before")
	s.must(Cleared{ID: "b", Until: s.now})
	require.Equal(t, "a:run b:wait c:check", s.kinds())
	s.must(Cleared{ID: "c", Until: s.now.Add(time.Hour)})
	s.join("d")
	require.Equal(t, "a:run b:check c:check d:check", s.kinds())
	require.True(t, s.r.members.nodes["b"].optional && s.r.members.nodes["c"].optional)
	s.must(Barred{ID: "d", Reason: "slow"})
	s.must(Cleared{ID: "b", Until: s.now})
	s.must(Cleared{ID: "c", Until: s.now})
	require.Equal(t, "a:run b:wait c:wait d:bar", s.kinds())

	checked := len(s.checked["b"])
	s.pass(time.Minute)
	require.Equal(t, "a:stop b:wait c:wait d:bar", s.kinds(), "the world is stopped for those who have passed alone")
	s.obeyOne("a")
	require.Equal(t, "a:check b:check c:check d:check", s.kinds())
	require.Len(t, s.checked["a"], 2, "it has never been paired")
	require.Len(t, s.checked["b"], checked+1)
	m := s.r.members
	require.Equal(t, []int{1, 2, 1}, []int{m.waiting, m.checking, m.again}, "c has a pass and helps")
	s.health["d"] = broken
	s.obey()
	require.Equal(t, "a b c", s.order())
}

// A spare whose pass has run out is checked again, with those who wait beside it, before a world is stopped.
func TestGrowthFindsPartners(t *testing.T) {
	s := gated(t, Params{Min: 1, Max: 4, LastCall: time.Second, GrowthDelay: time.Minute})
	s.join("a")
	s.pass(time.Second)
	s.obey()
	s.join("b", "c")
	s.must(Cleared{ID: "b", Until: s.now.Add(time.Second)})
	s.must(Cleared{ID: "c"})
	s.pass(time.Minute)
	require.Equal(t, "a:run b:check c:check", s.kinds())
	require.Equal(t, []int{1, 1}, []int{s.r.members.waiting, s.r.members.checking}, "c helps")
	s.clear("b")
	require.Equal(t, "a:run b:wait c:check", s.kinds())
	s.pass(time.Minute)
	s.obey()
	require.Equal(t, "a b c", s.order())
}

// Who could not get into the world that was just sealed is checked with the others that wait.
func TestSpareFindsPartnersAfterTheSeal(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 2, MaxRestarts: 9})
	s.join("a", "b", "spare")
	s.obey()
	s.fail("a", RestartCharged)
	s.join("late")
	s.obeyOne("a")
	s.obeyOne("b")
	require.Equal(t, releasing, s.r.epoch.phase, "nobody waits for who comes late")
	require.Equal(t, "late:check spare:check", s.kinds()[strings.Index(s.kinds(), "late"):])
	require.True(t, s.r.members.nodes["spare"].optional)
	s.obey()
	require.Equal(t, "a:run b:run late:wait spare:wait", s.kinds())
}

// The clock of a pass runs for who waits, and stands still for a member of a world; an answer does not cut it
// short.
func TestWhenAPassRunsOut(t *testing.T) {
	s := gated(t, Params{Min: 1, Max: 1, LastCall: time.Second, MaxRestarts: 9})
	s.join("a")
	s.must(Cleared{ID: "a", Until: s.now.Add(time.Hour)})
	s.obey()
	sealed := s.r.epoch.sealedAt
	require.Equal(t, sealed.Add(time.Hour), s.r.members.nodes["a"].until)
	s.join("spare")
	s.pass(time.Minute)
	s.must(Cleared{ID: "spare", Until: s.now.Add(time.Hour)})
	require.Equal(t, s.now.Add(time.Hour), s.r.members.nodes["spare"].until)
	for _, hours := range []time.Duration{2, 1} {
		s.must(Cleared{ID: "a", Until: s.now.Add(hours * time.Hour)})
		require.Equal(t, sealed.Add(2*time.Hour), s.r.members.nodes["a"].until)
	}
	s.must(Cleared{ID: "a"})
	require.Zero(t, s.r.members.nodes["a"].until, "it never runs out")
	s.must(Cleared{ID: "a", Until: s.now.Add(time.Hour)})
	require.Zero(t, s.r.members.nodes["a"].until)
}

func TestDoubt(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 2, MaxRestarts: 9})
	require.ErrorIs(t, s.step(Doubt{ID: "x"}), ErrUnknownNode)
	s.join("a", "b")
	s.must(Doubt{ID: "a", Reason: "it has no pass"})
	s.obey()
	s.join("spare")
	s.obey()
	s.must(Doubt{ID: "a", Reason: "mlx5_0: " + strings.Repeat("x", maxReason)})
	s.must(Doubt{ID: "a", Reason: "again"})
	require.Len(t, s.notes("recheck"), 1)
	require.Len(t, s.notes("recheck")[0].Text, maxReason)
	require.Equal(t, "a", s.notes("recheck")[0].Node)
	require.Equal(t, "a:run b:run spare:wait", s.kinds(), "nobody is stopped for it")
	s.fail("b", RestartCharged)
	s.obeyOne("a")
	s.obeyOne("b")
	require.Equal(t, releasing, s.r.epoch.phase, "the world does not wait for it: there is a spare")
	require.Equal(t, job.Check, s.dirs["a"].Kind)
	s.obey()
	require.Equal(t, "spare b", s.order())

	s.must(Doubt{ID: "a", Reason: "carrier"})
	require.Equal(t, job.Check, s.dirs["a"].Kind, "a spare is checked again at once")
	s.clear("a")
	s.must(Order{Kind: OrderStop})
	seq := s.r.out.seq
	s.must(Doubt{ID: "a", Reason: "too late"})
	require.Equal(t, seq, s.r.out.seq)
	require.True(t, s.r.members.nodes["a"].cleared)
}

// Nobody is told of a node that goes away in the step in which it was to be checked, nor that it is released.
func TestAskedAndLostInOneStep(t *testing.T) {
	s := gated(t, Params{Min: 1, Max: 1})
	s.join("a", "b")
	s.obey()
	s.must(Detach{ID: "b"})
	s.now = s.now.Add(silentGrace)
	acts, err := s.r.Step(s.now, Doubt{ID: "b"})
	require.NoError(t, err)
	for _, a := range acts {
		require.Empty(t, slices.Concat(a.Gate, a.Helpers, a.Released))
	}
	s.join("c")
	s.must(Detach{ID: "c"})
	s.now = s.now.Add(silentGrace)
	acts, err = s.r.Step(s.now, Order{Kind: OrderBar, Node: "c"})
	require.NoError(t, err)
	for _, a := range acts {
		require.Empty(t, a.Released)
	}
}

// Who is told something else while it is being checked is released, and not who has answered.
func TestReleased(t *testing.T) {
	s := gated(t, Params{Min: 3, Max: 3})
	s.join("a", "b", "c")
	s.clear("a")
	released := func(ev Event) (ids []string) {
		acts, err := s.r.Step(s.now, ev)
		require.NoError(t, err)
		s.take(acts)
		for _, a := range acts {
			ids = append(ids, a.Released...)
		}
		return ids
	}
	require.Equal(t, []string{"b"}, released(Order{Kind: OrderBar, Node: "b"}))
	require.False(t, s.member("b").Asked)
	require.Equal(t, []string{"c"}, released(Order{Kind: OrderPause}))
	require.Empty(t, released(Order{Kind: OrderUnbar, Node: "b"}))
	require.Empty(t, released(Order{Kind: OrderResume}))
	require.True(t, s.member("b").Asked && s.member("c").Asked && s.member("a").Asked, "a helps")
	s.clear("b", "c")
	lead := s.r.epoch.id
	require.Empty(t, released(Tick{}))
	require.Equal(t, []string{"a"}, s.freed, "the world is sealed without the helper")
	require.Equal(t, job.Lead, s.dirs["a"].Kind)
	require.Equal(t, lead, s.dirs["a"].EpochID)
}

// An end of an epoch that checks may explain has all nodes checked before the next world, and what is known is complete
// when that is decided.
func TestSuspiciousEnd(t *testing.T) {
	for name, c := range map[string]struct {
		gate      bool
		verdict   string
		rechecked bool
	}{
		"suspicious": {true, "node b was lost: " + strings.Repeat("x", maxReason), true},
		"ordinary":   {true, "", false},
		"no gate":    {false, "suspicious", false},
	} {
		t.Run(name, func(t *testing.T) {
			s := gated(t, Params{Min: 2, Max: 3, MaxRestarts: 9, LastCall: time.Second})
			s.p.Gate = c.gate
			var asked []job.Evidence
			s.r.cfg.Suspicious = func(e job.Evidence) string { asked = append(asked, e); return c.verdict }
			s.join("a", "b", "c")
			s.obey()
			require.Empty(t, asked, "no epoch has ended")
			s.join("spare")
			s.obey()
			s.fail("a", RestartCharged)
			s.obeyOne("a")
			s.vanish("b")
			s.pass(brokenGraceFailing)
			require.Empty(t, asked, "c has not stopped yet")
			s.must(Join{Node: Node{ID: "c", Name: "c", Slots: 2}, Params: s.p, Stopped: s.r.epoch.id,
				Failures: []job.Failure{{Rank: 4, GroupRank: 2, Text: "connection reset"}}})
			if !c.gate {
				require.Empty(t, asked)
				return
			}
			require.Len(t, asked, 1)
			require.Len(t, asked[0].Failures, 2)
			require.Equal(t, "b", asked[0].Losses[0].Node)
			require.True(t, asked[0].Losses[0].Silent)
			require.Equal(t, c.rechecked, len(s.notes("recheck")) == 1)
			if c.rechecked {
				require.Equal(t, "a:check c:check spare:check", s.kinds())
				require.Equal(t, []int{0, 3}, []int{s.r.members.waiting, s.r.members.checking}, "there are no helpers")
				require.Len(t, s.notes("recheck")[0].Text, maxReason)
			}
			s.obey()
			require.Equal(t, "a spare c", s.order())
			require.Len(t, asked, 1)
		})
	}
}

// A node that says good-bye is no silent loss.
func TestLeaveIsNotSilent(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 2, LastCall: time.Second}, "a", "b")
	s.must(Leave{ID: "b", Reason: "preempted"})
	require.False(t, s.r.Evidence().Losses[0].Silent)
}

// Without a topology the nodes of one domain become neighbours; with one it decides alone.
func TestDomainsAreNeighbours(t *testing.T) {
	for name, c := range map[string]struct {
		topo   Topology
		static bool
		want   string
	}{
		"domains":  {nil, false, "a c b e d"},
		"empty":    {Topology{}, false, "a c b e d"},
		"topology": {Topology{"a": "s1", "e": "s1"}, false, "a e b c d"},
		"static":   {nil, true, "a b c d e"},
	} {
		t.Run(name, func(t *testing.T) {
			s := gated(t, Params{Min: 5, Max: 5, Static: c.static})
			s.r.cfg.Topology = c.topo
			for i, id := range []string{"a", "b", "c", "d", "e"} {
				rank := -1
				if c.static {
					rank = i
				}
				s.joinNode(Node{ID: id, Name: id, IP: id, Rank: rank, Slots: 2, Can: s.can})
			}
			for id, domain := range map[string]string{"a": "x", "b": "y", "c": "x", "d": "", "e": "y"} {
				s.must(Cleared{ID: id, Domain: domain})
			}
			s.obey()
			require.Equal(t, c.want, s.order())
			require.Equal(t, "x", s.r.members.nodes["a"].domain)
		})
	}
}

func TestLongDomainIsCut(t *testing.T) {
	s := gated(t, Params{Min: 1, Max: 1})
	s.join("a")
	s.must(Cleared{ID: "a", Domain: strings.Repeat("d", MaxName+1)})
	require.Len(t, s.r.members.nodes["a"].domain, MaxName)
	s.must(Cleared{ID: "a"})
	require.Len(t, s.r.members.nodes["a"].domain, MaxName, "a check that does not know it leaves it")
}

// A late answer of a member counts from the seal on: the clock stands still.
func TestLatePassStandsStill(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 2, GateTimeout: time.Minute, MaxRestarts: 9})
	s.health["b"] = mute
	s.join("a", "b")
	s.obey()
	s.pass(time.Minute)
	s.obey()
	require.Equal(t, "a b", s.order())
	s.pass(time.Hour)
	s.must(Cleared{ID: "b", Until: s.now.Add(time.Second)})
	s.must(Cleared{ID: "b", Until: s.now})
	s.pass(time.Hour)
	s.ordered(OrderPause, "")
	s.obey()
	s.pass(time.Second - 1)
	require.False(t, s.r.checks.mustCheck(s.now, s.r.members.nodes["b"]))
	s.pass(1)
	require.True(t, s.r.checks.mustCheck(s.now, s.r.members.nodes["b"]))
}
