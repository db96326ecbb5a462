package rendezvous

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

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

// A world follows that of a node, also if it is of a later term than the node says to have seen.
func TestTermsRiseAfterAnyWorld(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1, MaxRestarts: 1})
	id := job.EpochID{Term: s.r.epoch.term + 7, Round: 1}
	s.must(Join{Node: Node{ID: "a", Name: "a", Rank: -1, Slots: 2}, Params: s.p, Seen: job.EpochID{Term: 1, Round: 1},
		Resume: &Resume{EpochID: id, Place: job.Place{GroupWorldSize: 1}}})
	s.must(Attach{ID: "a"})
	s.obey()
	require.Equal(t, id, s.runs["a"].EpochID)
	s.fail("a", RestartCharged)
	s.obey()
	require.Greater(t, s.runs["a"].Term, id.Term)
}

// The next term follows the newest world that a node has seen; the order of joins does not matter.
func TestTermsRiseAfterTheNewestWorld(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	newest := s.r.epoch.term + 3<<20
	for _, n := range []struct {
		id   string
		term uint64
	}{{"a", newest}, {"b", newest - 1<<20}} {
		s.must(Join{Node: Node{ID: n.id, Name: n.id, Rank: -1, Slots: 2}, Params: s.p,
			Seen: job.EpochID{Term: n.term, Round: 1}})
		s.must(Attach{ID: n.id})
	}
	s.pass(resumeWindow)
	s.obey()
	require.Greater(t, s.runs["a"].Term, newest)
}

// A node that ends its workers while the world is rebuilt, as an earlier daemon had told it, waits for the others.
func TestStoppedWhileTheWorldIsRebuilt(t *testing.T) {
	v := world(t, Params{Min: 2, Max: 2, MaxRestarts: 1}, "a", "b").revive()
	v.comeBack("a")
	v.must(Join{Node: v.old.r.members.nodes["a"].Node, Params: v.p, Stopped: v.old.r.epoch.id, Seen: v.old.r.epoch.id})
	require.Equal(t, "a:run", v.kinds())
	require.Nil(t, v.r.Status().Cause)
	v.comeBack("b")
	require.Equal(t, "a:wait b:stop", v.kinds())
	v.obey()
	require.Equal(t, "a b", v.order())
}

func TestPlausiblePlaces(t *testing.T) {
	require.True(t, plausible(job.Place{GroupWorldSize: 1}))
	require.True(t, plausible(job.Place{GroupWorldSize: MaxNodes, GroupRank: MaxNodes - 1}))
	for _, p := range []job.Place{{}, {GroupWorldSize: MaxNodes + 1}, {GroupWorldSize: 2, GroupRank: 2},
		{GroupWorldSize: 2, GroupRank: -1}} {
		require.False(t, plausible(p), "%+v", p)
	}
}

// A world whose members had all stopped is sealed again in the step in which the last of them comes back. With a
// further step for that, the others would first be told to wait.
func TestStoppedWorldIsSealedInOneStep(t *testing.T) {
	r, now := New(Config{Term: 100}), time.Unix(1000, 0)
	var acts []Action
	for i, id := range []string{"a", "b"} {
		seen := job.EpochID{Term: 1, Round: 1}
		place := job.Place{GroupRank: i, GroupWorldSize: 2, RankBase: i, WorldSize: 2}
		var err error
		acts, err = r.Step(now, Join{Node: Node{ID: id, Name: id, Rank: -1, Slots: 1}, Params: Params{Min: 2, Max: 2},
			Seen: seen, Stopped: seen, Resume: &Resume{EpochID: seen, Place: place}})
		require.NoError(t, err)
	}
	var kinds []job.Kind
	for _, a := range acts {
		if a.Directive != nil && a.Node == "a" {
			kinds = append(kinds, a.Directive.Kind)
		}
	}
	require.NotEmpty(t, kinds)
	require.Equal(t, job.Lead, kinds[len(kinds)-1])
}
