package ctl

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

func TestOperatorStates(t *testing.T) {
	node := func(state string, restarts int) rendezvous.NodeStatus {
		return rendezvous.NodeStatus{Name: "n", State: state, Restarts: restarts}
	}
	two := []rendezvous.NodeStatus{node("member", 2), node("member", 1)}
	crash := &job.Cause{Kind: job.CauseFailure, Text: "rank 1 failed"}
	growth := &job.Cause{Kind: job.CauseGrowth}
	params := rendezvous.Params{Min: 2, Max: 2}
	for name, c := range map[string]struct {
		status rendezvous.Status
		nodes  []rendezvous.NodeStatus
		phase  string
		truths string // types of the conditions that are true
		counts map[string]int
	}{
		"nobody": {rendezvous.Status{Phase: "forming"}, nil, "Unknown", "", nil},
		"half is there": {rendezvous.Status{Phase: "forming", Params: params},
			[]rendezvous.NodeStatus{node("waiting", 0)},
			"Pending", "", map[string]int{"pending": 2}},
		"being started": {rendezvous.Status{Phase: "releasing", Round: 1, WorldSize: 2},
			two, "Running", "Initialized Running", map[string]int{"creating": 2}},
		"running": {rendezvous.Status{Phase: "running", Round: 1, WorldSize: 2},
			two, "Running", "Initialized Running", map[string]int{"running": 2}},
		"grown": {rendezvous.Status{Phase: "running", Round: 2, WorldSize: 2, Cause: growth},
			two, "Running", "Initialized Running", map[string]int{"running": 2}},
		"restarted": {rendezvous.Status{Phase: "running", Round: 1, Epoch: 1, WorldSize: 2, Cause: crash},
			two, "Running", "Initialized Running ReplicaFailure", map[string]int{"running": 2}},
		"between": {rendezvous.Status{Phase: "forming", Round: 1, Cause: crash},
			[]rendezvous.NodeStatus{node("stopping", 0), node("barred", 0)},
			"Running", "Initialized ReplicaFailure", map[string]int{"pending": 1, "failed": 1}},
		"paused": {rendezvous.Status{Phase: "forming", Round: 1, Paused: &job.Cause{}},
			[]rendezvous.NodeStatus{node("waiting", 0)},
			"Pending", "Initialized", map[string]int{"pending": 1}},
		"held": {rendezvous.Status{Phase: "running", Round: 1, WorldSize: 2, Hold: &job.Cause{}},
			two, "Pending", "Initialized", map[string]int{"pending": 2}},
		"one is silent": {rendezvous.Status{Phase: "running", Round: 1, WorldSize: 2},
			[]rendezvous.NodeStatus{node("member", 0), {State: "member", Suspect: true}, node("succeeded", 0),
				node("leaving", 0)},
			"Running", "Initialized Running", map[string]int{"running": 1, "unknown": 1, "succeeded": 1, "deleted": 1}},
		"succeeded": {rendezvous.Status{Phase: "finished", Round: 1, Outcome: "succeeded", Cause: crash},
			two, "Succeeded", "Initialized Completed", map[string]int{"succeeded": 2}},
		"one failed beside": {rendezvous.Status{Phase: "finished", Round: 1, Outcome: "succeeded"},
			[]rendezvous.NodeStatus{node("succeeded", 0), node("failed", 0)}, "Succeeded", "Initialized Completed",
			map[string]int{"succeeded": 1, "failed": 1}},
		"failed": {rendezvous.Status{Phase: "finished", Round: 1, Outcome: "failed", Cause: crash},
			two, "Failed", "Initialized ReplicaFailure Failed", map[string]int{"failed": 2}},
	} {
		t.Run(name, func(t *testing.T) {
			o := operatorOf(api.RunStatus{Status: c.status, Nodes: c.nodes})
			require.Equal(t, c.phase, o.Phase)
			var truths []string
			for _, cond := range o.Conditions {
				if cond.Status == "True" {
					truths = append(truths, cond.Type)
				}
			}
			require.Equal(t, c.truths, strings.Join(truths, " "))
			require.Len(t, o.Conditions, 5)
			require.Len(t, o.Aggregate, 7)
			for state, n := range o.Aggregate {
				require.Equal(t, c.counts[state], n, state)
			}
		})
	}
}

// Restarts are summed for each role.
func TestOperatorTasks(t *testing.T) {
	s := api.RunStatus{Nodes: []rendezvous.NodeStatus{
		{Role: "trainer", Restarts: 2}, {Role: "evaluator", Restarts: 1}, {Role: "trainer", Restarts: 3},
	}}
	require.Equal(t, []task{{"evaluator", 1, 1}, {"trainer", 2, 5}}, operatorOf(s).Tasks)
}

func TestNodeRows(t *testing.T) {
	now := time.Unix(10_000, 0)
	s := api.RunStatus{Status: rendezvous.Status{Phase: "running", Round: 1}, Nodes: []rendezvous.NodeStatus{
		{Name: "job-scheduler-0", State: "member"},
		{Name: "job-worker-0", State: "member", GroupRank: 1, Slots: 8, Machine: "10.1.1.1", Devices: 8,
			Since: now.Add(-3661 * time.Second)},
		{Name: "job-worker-1", State: "waiting", GroupRank: -1},
	}}
	require.Equal(t, []nodeRow{
		{"job-scheduler-0", "Running", "", false, 0, "job-scheduler-0"},
		{"job-worker-0", "Running", "1h1m", true, 8, "10.1.1.1"},
		{"job-worker-1", "Pending", "", false, 0, "job-worker-1"},
	}, nodeRows(s, now))
}
