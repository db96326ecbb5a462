package rendezvous

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

// leave lets the launcher of a node go away on purpose, as one does whose check has failed.
func (s *sim) leave(ids ...string) {
	for _, id := range ids {
		delete(s.dirs, id)
		delete(s.runs, id)
		s.must(Leave{ID: id, Reason: "its check has not passed"})
	}
}

// When checks leave too few nodes, those who wait hear at once who is missing and why, and once.
func TestShortageIsToldAtOnce(t *testing.T) {
	s := gated(t, Params{Min: 3, Max: 4, JoinTimeout: time.Minute, LastCall: time.Second})
	s.join("a", "b", "c")
	s.pass(time.Second)
	s.clear("a")
	s.must(Barred{ID: "b", Reason: "gpu 3 is gone"})
	const text = "too few nodes have passed their checks; waiting up to 1m0s for others: 2 nodes joined, need 3; " +
		"b is barred: gpu 3 is gone"
	require.Equal(t, "a:wait b:bar c:check", s.kinds())
	require.Equal(t, &job.Cause{Kind: job.CauseCheck, Node: "b", Text: text}, s.dirs["a"].Cause)
	require.Equal(t, text, s.notes("too-few")[0].Text)
	s.clear("c")
	require.Equal(t, text, s.dirs["c"].Cause.Text, "who hears later hears it, too")
	seq := s.dirs["a"].Seq
	s.leave("b")
	s.pass(time.Second)
	require.Equal(t, seq, s.dirs["a"].Seq, "it leaves for it; that is no news")
	require.Len(t, s.notes("too-few"), 1)

	s.join("d")
	s.must(Barred{ID: "d", Reason: "slow"})
	require.Len(t, s.notes("too-few"), 2)
	require.Equal(t, "too few nodes have passed their checks; waiting up to 1m0s for others: 2 nodes joined, need 3; "+
		"d is barred: slow; b has left: gpu 3 is gone", s.dirs["a"].Cause.Text)
	require.Empty(t, s.dirs["a"].Cause.Node, "there are two")
	s.leave("d")
	s.join("e")
	s.pass(time.Second)
	s.obey()
	require.Equal(t, "a c e", s.order())
	require.Empty(t, s.r.shortage.gone, "a world has formed without them")
	require.Nil(t, s.r.shortage.lacking)
}

func TestTheTimeoutNamesThoseWhoHaveLeft(t *testing.T) {
	for name, c := range map[string]struct {
		join, leave int
		kind        job.CauseKind
		text        string
	}{
		"one":   {3, 1, job.CauseCheck, "no world within 1m0s: 2 nodes joined, need 3; n000 has left: gpu 3 is gone"},
		"a few": {6, 4, job.CauseCheck, "n003 has left: gpu 3 is gone"},
		"many":  {8, 6, job.CauseCheck, "n003 has left: gpu 3 is gone and 2 more"},
	} {
		t.Run(name, func(t *testing.T) {
			s := gated(t, Params{Min: 3, Max: c.join, JoinTimeout: time.Minute})
			ids := nodes(c.join)
			s.join(ids...)
			for _, id := range ids[:c.leave] {
				s.must(Barred{ID: id, Reason: "gpu 3 is gone"})
				s.leave(id)
			}
			s.obey()
			s.pass(time.Minute)
			require.Equal(t, c.kind, s.dirs[ids[c.leave]].Cause.Kind)
			require.Contains(t, s.dirs[ids[c.leave]].Cause.Text, c.text)
			require.Equal(t, c.leave == 1, s.dirs[ids[c.leave]].Cause.Node != "")
		})
	}
}

// Nodes that have never come are not the checks' fault.
func TestShortageBesideOneThatHasLeft(t *testing.T) {
	s := gated(t, Params{Min: 3, Max: 3, JoinTimeout: time.Minute})
	s.join("a", "b", "c")
	s.must(Barred{ID: "b", Reason: "slow"})
	s.ordered(OrderBar, "x")
	s.joinNode(Node{ID: "x", Name: "x", Rank: -1, Slots: 2, Can: s.can})
	s.leave("b")
	require.True(t, s.r.shortage.failed(), "beside one that an order bars")
	s.leave("c", "x")
	s.pass(time.Minute)
	require.Equal(t, job.CauseTimeout, s.dirs["a"].Cause.Kind)
	require.Contains(t, s.dirs["a"].Cause.Text, "b has left: slow")
}

// A launcher that comes under the name of one that has left is judged for itself.
func TestTheSameNameComesAgain(t *testing.T) {
	for _, passes := range []bool{true, false} {
		s := gated(t, Params{Min: 2, Max: 2, JoinTimeout: time.Minute})
		s.join("a", "b")
		s.clear("a")
		s.must(Barred{ID: "b", Reason: "slow"})
		s.leave("b")
		s.joinNode(Node{ID: "b2", Name: "b", Rank: -1, Slots: 2, Can: s.can})
		if passes {
			s.must(Cleared{ID: "b2"})
			require.Empty(t, s.r.shortage.gone)
			continue
		}
		s.must(Barred{ID: "b2", Reason: "ecc"})
		require.Contains(t, s.dirs["a"].Cause.Text, "b is barred: ecc")
		require.NotContains(t, s.dirs["a"].Cause.Text, "slow")
	}
}

// An operator's bar is no failed check, and who is cleared after all is not missing.
func TestOnlyChecksAreTold(t *testing.T) {
	s := gated(t, Params{Min: 2, Max: 2})
	s.join("a", "b")
	s.must(Order{Kind: OrderBar, Node: "b"})
	s.obey()
	require.Empty(t, s.notes("too-few"))
	s.must(Order{Kind: OrderUnbar, Node: "b"})
	s.must(Barred{ID: "b", Reason: "slow"})
	require.Len(t, s.notes("too-few"), 1)
	s.clear("b")
	require.Nil(t, s.r.shortage.lacking)
	s.obey()
	require.Equal(t, "a b", s.order())
}

// Who waits in a run that has had no world hears of another one that would complete it, once.
func TestOtherRun(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 3})
	require.Zero(t, s.r.Lacks(), "nobody waits")
	s.join("a")
	lack := s.r.Lacks()
	require.Equal(t, Lack{1, 2, 3}, lack)
	for o, together := range map[Lack]bool{
		lack: true, {2, 2, 3}: true, {0, 2, 3}: false, {1, 1, 3}: false, {1, 2, 2}: false,
	} {
		require.Equal(t, together, lack.With(o), "%v", o)
		require.Equal(t, together, o.With(lack), "%v", o)
	}
	require.False(t, Lack{1, 3, 3}.With(Lack{1, 3, 3}), "they are two")
	for range 2 {
		s.must(OtherRun{ID: "x"})
	}
	require.Len(t, s.notes(job.EventOtherRun), 1)
	require.Contains(t, s.dirs["a"].Cause.Text, `nodes also wait in run "x"`)
	s.ordered(OrderPause, "")
	require.Zero(t, s.r.Lacks(), "it waits for an order")
	s.ordered(OrderResume, "")
	s.join("b")
	require.Zero(t, s.r.Lacks(), "there are enough")
	s.pass(defaultLastCall)
	s.obey()
	s.vanish("b")
	s.pass(BrokenGrace)
	s.obey()
	require.Equal(t, forming, s.r.epoch.phase)
	require.Zero(t, s.r.Lacks(), "it has had a world")
	s.must(OtherRun{ID: "y"})
	require.Len(t, s.notes(job.EventOtherRun), 1)
}

func TestNamesThatAreKeptAreBounded(t *testing.T) {
	s := gated(t, Params{Min: 1, Max: 1})
	for i := range maxGone + 2 {
		s.r.shortage.keepBar(&node{Node: Node{Name: fmt.Sprint(i)}, bar: &job.Cause{Text: "1"}})
	}
	require.Len(t, s.r.shortage.gone, maxGone)
	s.r.shortage.keepBar(&node{Node: Node{Name: "0"}, bar: &job.Cause{Text: "2"}})
	require.Equal(t, "2", s.r.shortage.gone["0"].Text)
	s.r.shortage.keepBar(&node{Node: Node{Name: "1"}})
	require.Equal(t, "1", s.r.shortage.gone["1"].Text)
}

// In a static run nobody replaces a node: a failed check ends it, as soon as all have answered or five seconds later.
func TestStaticRunEndsByACheck(t *testing.T) {
	start := func(t *testing.T) *sim {
		s := gated(t, Params{Min: 3, Max: 3, Static: true, GateTimeout: time.Hour})
		for i, id := range []string{"a", "b", "c"} {
			s.joinNode(Node{ID: id, Name: id, Rank: i, Slots: 2, Can: s.can})
		}
		return s
	}
	const text = "checks of nodes have failed, and nobody replaces a node of a static run; "
	t.Run("all answer", func(t *testing.T) {
		s := start(t)
		s.must(Barred{ID: "b", Reason: "slow"})
		s.leave("b")
		s.clear("a")
		require.Equal(t, "a:wait c:check", s.kinds())
		require.Nil(t, s.dirs["a"].Cause, "nobody is waited for")
		require.Equal(t, s.now.Add(staticPatience), s.r.Next())
		s.must(Barred{ID: "c", Reason: "ecc"})
		require.Equal(t, "a:fail c:fail", s.kinds())
		require.Equal(t, &job.Cause{Kind: job.CauseCheck, Text: text + "c is barred: ecc; b has left: slow"},
			s.dirs["a"].Cause)
	})
	t.Run("one does not", func(t *testing.T) {
		s := start(t)
		s.must(Barred{ID: "b", Reason: "slow"})
		s.pass(time.Second)
		s.must(Barred{ID: "a", Reason: "slow, too"})
		s.pass(staticPatience - time.Second - 1)
		require.Equal(t, job.Check, s.dirs["c"].Kind)
		s.pass(1)
		require.Equal(t, job.Fail, s.dirs["c"].Kind)
		require.Equal(t, text+"a is barred: slow, too; b is barred: slow", s.dirs["c"].Cause.Text)
	})
	t.Run("one leaves", func(t *testing.T) {
		s := start(t)
		s.must(Barred{ID: "b", Reason: "slow"})
		s.clear("a")
		s.leave("c")
		require.Equal(t, job.Fail, s.dirs["a"].Kind)
		require.Equal(t, "b", s.dirs["a"].Cause.Node)
	})
	t.Run("it is mended", func(t *testing.T) {
		s := start(t)
		s.must(Barred{ID: "b", Reason: "slow"})
		s.clear("b")
		require.True(t, s.r.gate.failAt.IsZero())
		s.pass(staticPatience)
		s.obey()
		require.Equal(t, "a b c", s.order())
	})
	t.Run("paused", func(t *testing.T) {
		s := start(t)
		s.must(Barred{ID: "b", Reason: "slow"})
		s.ordered(OrderPause, "")
		s.pass(time.Hour)
		require.Equal(t, "a:wait b:bar c:wait", s.kinds())
		s.ordered(OrderResume, "")
		require.Equal(t, "a:fail b:fail c:fail", s.kinds())
	})
	t.Run("later", func(t *testing.T) {
		s := start(t)
		s.obey()
		require.Equal(t, "a b c", s.order())
		s.must(Doubt{ID: "c", Reason: "carrier"})
		s.health["c"] = broken
		s.p.MaxRestarts = 0
		s.fail("a", RestartFree)
		s.obey()
		require.Equal(t, job.Fail, s.dirs["a"].Kind)
		require.Equal(t, text+"c is barred: gpu 3 is gone", s.dirs["a"].Cause.Text)
		require.Equal(t, job.CauseCheck, s.ended[0].Cause.Kind)
	})
}
