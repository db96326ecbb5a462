package rendezvous

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

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

func TestJoinThatArrivesAfterTheGoodbye(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 2})
	s.join("a", "b", "c")
	s.must(Leave{ID: "b"})
	s.must(Leave{ID: "c"})
	require.ErrorIs(t, s.step(Join{Node: Node{ID: "b", Name: "b", Rank: -1, Slots: 2}, Params: s.p}), ErrRefused)
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

// A launcher whose rank another one has taken over while it was cut off ends if it has workers, and else waits for the
// rank.
func TestRankThatWasTakenOver(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, Static: true, MaxRestarts: 1})
	s.joinNode(Node{ID: "a", Name: "a", Rank: 0, Slots: 2})
	s.joinNode(Node{ID: "b", Name: "b", Rank: 1, Slots: 2})
	s.obey()
	old := s.runs["b"]
	s.vanish("b")
	s.pass(BrokenGrace)
	s.joinNode(Node{ID: "b2", Name: "b2", Rank: 1, Slots: 2})
	back := Join{Node: Node{ID: "b", Name: "b", Rank: 1, Slots: 2}, Params: s.p}
	works := back
	works.Resume = &Resume{EpochID: old.EpochID, Place: *old.Place}
	stopped := works
	stopped.Stopped = old.EpochID
	require.ErrorIs(t, s.step(works), ErrRefused, "no world is sealed")
	s.obey()
	require.Equal(t, "a b2", s.order())
	require.ErrorIs(t, s.step(works), ErrRefused)
	require.ErrorContains(t, s.step(works), "b2 has taken over node rank 1")
	require.ErrorIs(t, s.step(stopped), ErrTaken)
	require.ErrorIs(t, s.step(back), ErrTaken)
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
