package rendezvous

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

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
	s.ordered(OrderStop, "")
	require.Equal(t, []NodeStatus{
		{Name: "b", State: "failed", GroupRank: 0, Slots: 2, Since: at},
		{Name: "a", State: "failed", GroupRank: 1, Slots: 2, Since: at},
		{Name: "spare", State: "waiting", GroupRank: -1, Slots: 2, Since: at},
	}, s.r.Ended())
}

// Nodes have the switches that the topology names, those that have gone included; without one they have domains.
func TestNodesHaveSwitches(t *testing.T) {
	s := newSim(t, Params{Min: 3, Max: 3})
	s.r = New(Config{Topology: Topology{"10.0.0.1": "leaf-1", "10.0.0.2": "leaf-2"}})
	for i, id := range []string{"a", "b", "c"} {
		s.joinNode(Node{ID: id, Name: id, Rank: -1, IP: fmt.Sprintf("10.0.0.%d", i+1), Slots: 2})
	}
	s.obey()
	switches := func() (all []string) {
		for _, n := range s.r.Nodes() {
			all = append(all, n.Name+" "+n.Switch)
		}
		return all
	}
	require.Equal(t, []string{"a leaf-1", "b leaf-2", "c "}, switches())
	s.must(Rewire{Topology: Topology{"10.0.0.3": "leaf-3"}})
	require.Equal(t, []string{"a ", "b ", "c leaf-3"}, switches())
	s.vanish("b")
	s.pass(time.Minute)
	gone := s.r.Status().Missing
	require.Len(t, gone, 1)
	require.Equal(t, "leaf-2", gone[0].Switch, "as it was when its world was sealed")
	s.must(Rewire{})
	s.r.members.nodes["a"].domain = "nvl-7"
	require.Equal(t, "a nvl-7", switches()[0])
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

// A node without workers waits, however its check stands.
func TestStatusCountsThoseThatWait(t *testing.T) {
	s := gated(t, Params{Min: 4, Max: 4})
	s.join("a", "b", "c", "d")
	s.clear("a")
	s.must(Barred{ID: "b"})
	s.must(Barred{ID: "c", Again: true})
	require.Equal(t, []nodeState{waiting, barred, barred, checking}, []nodeState{s.state("a"), s.state("b"), s.state("c"),
		s.state("d")})
	require.Equal(t, 4, s.r.Status().Waiting)
	require.Zero(t, s.r.Status().Members)
}

func (s *sim) state(id string) nodeState { return s.r.members.nodes[id].state }

func TestMembersCanBeLookedAtInPart(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.join("a", "b")
	for m := range s.r.Members() {
		require.Contains(t, []string{"a", "b"}, m.ID)
		break
	}
}

// A launcher that has ended its workers expects to wait. It is told so only together with something that it does not
// know.
func TestKnown(t *testing.T) {
	for name, c := range map[string]struct {
		meanwhile func(*sim)
		known     bool
	}{
		"nothing new":   {func(*sim) {}, true},
		"a pause":       {func(s *sim) { s.r.orders.paused = &job.Cause{Kind: job.CauseOperator, Text: "x"} }, false},
		"a command":     {func(s *sim) { s.r.orders.command = &job.Command{Program: []string{"x"}} }, false},
		"what is spent": {func(s *sim) { s.r.account.spent.Streak, s.r.account.sent = 7, nil }, false},
		"the restarts":  {func(s *sim) { s.r.account.restarts++ }, false},
		"a shortage":    {func(s *sim) { s.r.shortage.lacking = &job.Cause{Kind: job.CauseCheck, Text: "x"} }, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 3})
			s.join("a", "b")
			s.obey()
			s.fail("a", RestartCharged)
			stop := s.dirs["b"].Seq
			require.Zero(t, s.member("b").Known, "a Stop is news")
			c.meanwhile(s)
			s.obeyOne("b")
			require.Equal(t, job.Wait, s.dirs["b"].Kind)
			require.Equal(t, map[bool]uint64{true: stop}[c.known], s.member("b").Known)
		})
	}
	s := newSim(t, Params{Min: 2, Max: 2})
	s.join("a")
	require.Zero(t, s.member("a").Known, "it has never been told anything")
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
