package rendezvous

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

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
	s.leave("c", "d")
	s.obey()
	require.Equal(t, 4, s.runs["a"].Round)
	s.join("e", "f")
	s.leave("e", "f")
	s.obey()
	require.Equal(t, "a b", s.order())
	require.Equal(t, [2]int{4, 1}, [2]int{s.runs["a"].Round, s.runs["a"].Epoch}, "it has not grown")
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
		text  string
	}{
		"two":                        {quiet, every(0, 1), 2 * time.Second, 2, "or 2s after the newest node"},
		"milliseconds apart":         {quiet, every(time.Millisecond, 5), 2 * time.Second, 6, "the newest node"},
		"seconds apart":              {quiet, every(1900*time.Millisecond, 4), 2 * time.Second, 5, "the newest node"},
		"the second is late":         {quiet, []time.Duration{time.Minute, time.Second}, 2 * time.Second, 3, "in 30s at"},
		"all":                        {quiet, every(time.Second, 7), 0, 8, "2 of 2:8 nodes"},
		"they keep coming":           {many, every(1500*time.Millisecond, 21), 0, 21, "the newest node"},
		"promised, and there":        {promised, every(5*time.Second, 3), 2 * time.Second, 4, "the last of the 4"},
		"promised, and more come":    {promised, append(every(5*time.Second, 3), time.Second), 2 * time.Second, 5, "last of"},
		"promised, and one missing":  {promised, every(5*time.Second, 2), 25 * time.Second, 3, "last of the 4"},
		"more are promised than fit": {more, every(time.Second, 3), 28 * time.Second, 4, "the last of the 8"},
		"no quiet":                   {Params{Min: 2, Max: 8, Promised: 2}, every(time.Second, 2), 29 * time.Second, 3, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, c.p)
			s.join("n00")
			defer func() { require.Contains(t, s.noted(job.EventLastCall), c.text) }()
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
