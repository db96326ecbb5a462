package ctl

import (
	"cmp"
	"io"
	"maps"
	"slices"
	"strconv"

	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/job"
	"dlrover-run/internal/table"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// operatorStatus is the status of a run in the terms of training operators: T9k's, which are those of Kubeflow's
// with two more conditions. A replica is a node.
type operatorStatus struct {
	Phase      string         `json:"phase"` // Pending, Running, Succeeded, Failed or Unknown
	Conditions []condition    `json:"conditions"`
	Aggregate  map[string]int `json:"aggregate"` // replicas by state; all of replicaStates are there
	Tasks      []task         `json:"tasks"`     // by name of the role
}

// condition is one condition; its Status is True or False.
type condition struct {
	Type    string `json:"type"`
	Status  string `json:"status"`
	Message string `json:"message,omitempty"`
}

// task summarizes the replicas of one role.
type task struct {
	Role         string `json:"name"`
	Replicas     int    `json:"replicas"`
	RestartCount int    `json:"restartCount"` // the sum of its replicas'
}

// operatorOf maps a run.
func operatorOf(s api.RunStatus) operatorStatus {
	o := operatorStatus{Phase: operatorPhase(s), Aggregate: map[string]int{}}
	for _, state := range replicaStates() {
		o.Aggregate[state] = 0
	}
	tasks := map[string]task{}
	for _, n := range s.Nodes {
		o.Aggregate[replicaState(s.Status, n)]++
		t := tasks[n.Role]
		tasks[n.Role] = task{n.Role, t.Replicas + 1, t.RestartCount + n.Restarts}
	}
	if missing := s.Params.Min - len(s.Nodes); missing > 0 && s.Outcome == "" {
		o.Aggregate["pending"] += missing
	}
	o.Tasks = slices.SortedFunc(maps.Values(tasks), func(a, b task) int { return cmp.Compare(a.Role, b.Role) })
	o.Conditions = conditions(s, o.Phase)
	return o
}

func operatorPhase(s api.RunStatus) string {
	switch {
	case s.Outcome == string(job.Succeeded):
		return "Succeeded"
	case s.Outcome == string(job.Failed):
		return "Failed"
	case len(s.Nodes) == 0:
		return "Unknown"
	case s.Paused != nil || s.Hold != nil || s.Round == 0:
		return "Pending"
	}
	return "Running" // between two starts of its workers, too
}

func conditions(s api.RunStatus, state string) []condition {
	cause := ""
	if s.Cause != nil {
		cause = s.Cause.Text
	}
	list := []condition{
		{Type: "Initialized", Status: truth(s.Round > 0)},
		{Type: "Running", Status: truth(s.Outcome == "" && describe.Workers(s.Status) > 0)},
		{Type: "ReplicaFailure", Status: truth(failed(s.Cause) && state != "Succeeded")},
		{Type: "Completed", Status: truth(state == "Succeeded")},
		{Type: "Failed", Status: truth(state == "Failed")},
	}
	for i, c := range list {
		if c.Status == "True" && (c.Type == "ReplicaFailure" || c.Type == "Failed") {
			list[i].Message = cause
		} else if c.Type == "Running" && c.Status == "False" && s.Outcome == "" {
			list[i].Message = phaseText(s)
		}
	}
	return list
}

// phaseText is the reason why no workers run.
func phaseText(s api.RunStatus) string {
	if len(s.Nodes) == 0 {
		return "no node is here"
	}
	return describe.Phase(s.Status)
}

func truth(b bool) string {
	if b {
		return "True"
	}
	return "False"
}

// failed reports whether the newest stop followed a failure, not growth or an operator's order.
func failed(c *job.Cause) bool {
	return c != nil && !slices.Contains([]job.CauseKind{job.CauseGrowth, job.CauseLeave,
		job.CauseOperator, job.CauseRefusal, job.CauseCheck}, c.Kind)
}

// replicaStates are those that are counted.
func replicaStates() []string {
	return []string{"creating", "deleted", "failed", "pending", "running", "succeeded", "unknown"}
}

// replicaState is that of one node. A node that has left the run is not listed: no replica is ever deleted here.
func replicaState(s rendezvous.Status, n rendezvous.NodeStatus) string {
	switch {
	case n.State == "failed":
		return "failed"
	case n.State == "succeeded" || s.Outcome == string(job.Succeeded):
		return "succeeded"
	case n.State == "barred" || s.Outcome == string(job.Failed):
		return "failed"
	case n.Suspect:
		return "unknown"
	case n.State == "leaving":
		return "deleted"
	case n.State == "member" && s.Hold == nil && s.Phase == "running":
		return "running"
	case n.State == "member" && s.Hold == nil:
		return "creating"
	}
	return "pending"
}

func (o operatorStatus) print(w io.Writer) {
	t := table.New(w)
	t.Row()
	t.Row("phase", o.Phase)
	for _, cond := range o.Conditions {
		t.Row(cond.Type, cond.Status, cond.Message)
	}
	for _, state := range replicaStates() {
		t.Row(state, strconv.Itoa(o.Aggregate[state]))
	}
	for _, task := range o.Tasks {
		t.Row("restarts of "+cmp.Or(task.Role, "default"), strconv.Itoa(task.RestartCount))
	}
	_ = t.Flush()
}
