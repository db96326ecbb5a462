package describe

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

var now = time.Unix(1700000000, 0)

func ago(d time.Duration) time.Time { return now.Add(-d) }

func TestCheckpoint(t *testing.T) {
	old := &Checkpoint{
		MemoryStep: 120, MemoryAt: ago(12 * time.Second), DiskStep: 100, DiskAt: ago(200 * time.Second),
	}
	require.Equal(t, "step 120 in memory, 12s old; step 100 on disk, 3m20s old", old.Text(now))
	require.Equal(t, "none in memory; none on disk", (&Checkpoint{}).Text(now))
}

// What all ranks have is as old as the save of the last of them. A rank whose state another one writes does not count.
func TestTheOldestOfTheRanksNewestSaves(t *testing.T) {
	require.Nil(t, CheckpointOf(nil))
	for want, ages := range map[string][]coordinator.Age{
		"step 9 in memory, 1s old; step 8 on disk, 2s old": {
			{MemoryStep: 9, MemoryAt: ago(time.Second), DurableStep: 8, DurableAt: ago(2 * time.Second)}},
		"step 7 in memory, 3s old; step 5 on disk, 5s old": {
			{MemoryStep: 9, MemoryAt: ago(time.Second)},
			{MemoryStep: 9, MemoryAt: ago(time.Second), DurableStep: 6, DurableAt: ago(4 * time.Second)},
			{MemoryStep: 7, MemoryAt: ago(3 * time.Second), DurableStep: 5, DurableAt: ago(5 * time.Second)},
			{MemoryStep: 8, MemoryAt: ago(2 * time.Second), DurableStep: 6, DurableAt: ago(4 * time.Second)},
			{MemoryStep: 8, MemoryAt: ago(2 * time.Second)}},
	} {
		require.Equal(t, want, CheckpointOf(ages).Text(now))
	}
}

func TestAge(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 59 * time.Second: "59s", time.Minute: "1m0s", time.Hour: "1h0m", 24 * time.Hour: "1d0h",
		50 * time.Hour: "2d2h",
	} {
		require.Equal(t, want, Age(d))
	}
}

func TestRuns(t *testing.T) {
	why := &job.Cause{Text: "why"}
	for _, c := range []struct {
		s       rendezvous.Status
		phase   string
		workers int
	}{
		{rendezvous.Status{Phase: "forming"}, "waiting for nodes", 0},
		{rendezvous.Status{Phase: "gating"}, "checking nodes", 0},
		{rendezvous.Status{Phase: "releasing"}, "starting", 8},
		{rendezvous.Status{Phase: "running"}, "running", 8},
		{rendezvous.Status{Phase: "stopping"}, "stopping", 0},
		{rendezvous.Status{Phase: "forming", Paused: why}, "paused: why", 0},
		{rendezvous.Status{Phase: "running", Hold: why}, "held: why", 0},
		{rendezvous.Status{Phase: "forming", Hold: why}, "waiting for nodes", 0},
		{rendezvous.Status{Phase: "finished", Outcome: "succeeded"}, "succeeded", 0},
		{rendezvous.Status{Phase: "finished", Outcome: "failed", Cause: why}, "failed: why", 0},
		{rendezvous.Status{Phase: "running", Cause: why}, "running", 8},
	} {
		c.s.WorldSize = 8
		require.Equal(t, c.phase, Phase(c.s))
		require.Equal(t, c.workers, Workers(c.s), c.phase)
	}
	for want, p := range map[string]rendezvous.Params{"-": {}, "4": {Min: 4, Max: 4}, "2 to 4": {Min: 2, Max: 4}} {
		require.Equal(t, want, Size(p))
	}
	require.Equal(t, "2 of 3", Restarts(rendezvous.Status{Restarts: 2, Params: rendezvous.Params{MaxRestarts: 3}}))
}

func TestBudget(t *testing.T) {
	b := rendezvous.BudgetStatus{Streak: 1, Sum: 5, Limit: -1, NextWait: time.Second}
	const next = "; the next restart waits 1s"
	require.Equal(t, "1 restarts in a row without progress"+next, Budget(b, now))
	b.Limit = 0
	require.Equal(t, "1 of 0 restarts in a row without progress"+next, Budget(b, now))
	b.SumCounts = true
	require.Equal(t, "5 of 0 restarts in all"+next, Budget(b, now))
	b.Limit = -1
	require.Equal(t, "5 restarts in all"+next, Budget(b, now))
	b.BackoffUntil, b.Deadline, b.HeldUntil = now.Add(2*time.Second), now.Add(time.Hour), now.Add(time.Minute)
	require.Equal(t, "5 restarts in all; the next start is in 2s; the deadline is in 1h0m; held for another 1m0s",
		Budget(b, now))
}

func TestNodes(t *testing.T) {
	why := &job.Cause{Text: "why"}
	for _, c := range []struct {
		n          rendezvous.NodeStatus
		text, rank string
	}{
		{rendezvous.NodeStatus{State: "member"}, "member", "0"},
		{rendezvous.NodeStatus{State: "member", GroupRank: 3, Suspect: true}, "member, silent", "3"},
		{rendezvous.NodeStatus{State: "member", GroupRank: 1, Barred: why}, "member, barred: why", "1"},
		{rendezvous.NodeStatus{State: "barred", GroupRank: -1, Barred: why}, "barred: why", "-"},
		{rendezvous.NodeStatus{State: "barred", GroupRank: -1}, "barred", "-"},
	} {
		require.Equal(t, c.text, Node(c.n))
		require.Equal(t, c.rank, Rank(c.n))
	}
}

func TestEvents(t *testing.T) {
	for want, n := range map[string]rendezvous.Note{
		"why": {Event: "fault", Text: "why"}, "n1": {Event: "join", Node: "n1"},
		"n1: why":            {Event: "fault", Node: "n1", Text: "why"},
		"2 nodes, 8 workers": {Event: job.EventSeal, Nodes: 2, World: 8},
	} {
		require.Equal(t, want, Event(api.Event{Note: n}))
	}
}

func TestWaits(t *testing.T) {
	node := func(name, state string) rendezvous.NodeStatus { return rendezvous.NodeStatus{Name: name, State: state} }
	s := api.RunStatus{Status: rendezvous.Status{Phase: "forming", Params: rendezvous.Params{Min: 4, Max: 4},
		Missing: []job.Loss{{Node: "gpu-02", GroupRank: 1, At: now.Add(-40 * time.Second), Reason: "it was killed."}}},
		Nodes: []rendezvous.NodeStatus{node("a", "waiting"), node("b", "stopping")}}
	require.Equal(t, []string{"2 of 4 nodes", "gpu-02 (node 1), gone 40s ago: it was killed", "workers to end on b"},
		Waits(s, "", now))

	s.Phase, s.Missing, s.Nodes = "gating", nil, nil
	for range 20 {
		s.Nodes = append(s.Nodes, node("n", "checking"))
	}
	s.Nodes[19].Suspect = true
	require.Equal(t, []string{"checks of n, n, n, n, n, n, n, n and 11 more (1 of 20 nodes passed)", "a word from n"},
		Waits(s, "1 of 20 nodes passed", now))

	s.Phase = "running"
	require.Empty(t, Waits(s, "", now))
}

func TestWaiting(t *testing.T) {
	w := api.Waiting{For: "1 of 2 nodes", Due: "the run fails", In: 30 * time.Second}
	require.Equal(t, "waiting for 1 of 2 nodes; in 22s: the run fails", Waiting(w, 8*time.Second))
	require.Equal(t, "waiting", Waiting(api.Waiting{}, time.Hour))
}
