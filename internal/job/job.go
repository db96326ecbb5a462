// Package job has the values of a distributed job that the libraries share: an epoch, a place in its world, the end of
// a worker. Those with JSON names are parts of the wire format of rendezvous/api.
//
// The package is pure: it has no clock, no files and no goroutines.
package job

import "time"

// Kind is the task of a node now.
type Kind string

// The kinds of a directive.
const (
	// Wait: joined; a world is forming, or this node is a hot spare.
	Wait Kind = "wait"
	// Lead: this node is rank 0 of a sealed world. It clears its store and reports Ready; only then do nodes get Run,
	// so that no worker ever meets the store of an earlier epoch.
	Lead Kind = "lead"
	// Run: start the workers of (Round, Epoch).
	Run Kind = "run"
	// Stop: end the workers of (Round, Epoch) and join again.
	Stop Kind = "stop"
	// Done: every node's workers succeeded.
	Done Kind = "done"
	// Fail: end the workers and leave; the run has failed for good.
	Fail Kind = "fail"
	// Check: examine this node and report Cleared or Barred. Any newer directive ends the examination.
	Check Kind = "check"
	// Bar: stay without workers; the cause has the reason. A later Check or Wait ends it.
	Bar Kind = "bar"
)

// EpochID names one epoch of one history of a run. Term separates histories: a restarted daemon counts rounds from one,
// but never repeats a term.
type EpochID struct {
	Term  uint64 `json:"term"`
	Round int    `json:"round"`
	Epoch int    `json:"epoch"`
}

// Newer reports whether e began after o.
func (e EpochID) Newer(o EpochID) bool {
	return e.Term > o.Term || e.Term == o.Term && (e.Round > o.Round || e.Round == o.Round && e.Epoch > o.Epoch)
}

// Place is a node's position in a sealed world. Its size does not depend on the world's.
type Place struct {
	GroupRank      int    `json:"group_rank"`
	GroupWorldSize int    `json:"group_world_size"`
	RankBase       int    `json:"rank_base"`
	WorldSize      int    `json:"world_size"`
	RoleRankBase   int    `json:"role_rank_base"`
	RoleWorldSize  int    `json:"role_world_size"`
	RestartCount   int    `json:"restart_count"`
	MasterAddr     string `json:"master_addr,omitempty"`
	MasterPort     int    `json:"master_port,omitempty"`
	// WorkerStore: the first worker serves the workers' store at MasterAddr:MasterPort, instead of its launcher. It is so
	// in worlds with agents that know it no other way; for a Lead, the launcher chooses a port for that worker.
	WorkerStore bool `json:"worker_store,omitempty"`
}

// CauseKind classifies the cause that ended an epoch or a run.
type CauseKind string

// The kinds of a Cause.
const (
	CauseFailure CauseKind = "worker-failure"
	CauseLoss    CauseKind = "node-loss"
	CauseLeave   CauseKind = "node-leave"
	CauseGrowth  CauseKind = "growth"
	CauseTimeout CauseKind = "timeout"
	// CauseRefusal comes with a Wait: another node was refused.
	CauseRefusal CauseKind = "refusal"
	// Causes of an Order, and of the bars that it leaves.
	CauseHang     CauseKind = "hang"
	CauseCheck    CauseKind = "check"
	CauseOperator CauseKind = "operator"
	CauseSlow     CauseKind = "slow" // ranks of the node slow the job
	// CauseDeadline and CauseNoStep end a run: it took too long, or made no first step in time.
	CauseDeadline CauseKind = "deadline"
	CauseNoStep   CauseKind = "no-first-step"
	// CauseBudget ends a run with failed workers that would need more restarts than its Budget allows.
	CauseBudget CauseKind = "budget"
	// CauseEnded comes with a Done: the run had succeeded before the node's launcher was started.
	CauseEnded CauseKind = "ended"
)

// Cause describes in one line the cause that ended an epoch or a run.
type Cause struct {
	Kind CauseKind `json:"kind"`
	Node string    `json:"node,omitempty"`
	Text string    `json:"text"`
}

// Member is one row of the world table.
type Member struct {
	GroupRank int      `json:"group_rank"`
	Node      string   `json:"node"`
	Addr      string   `json:"addr,omitempty"`
	Addrs     []string `json:"addrs,omitempty"`
	RankBase  int      `json:"rank_base"`
	Slots     int      `json:"slots"`
	Role      string   `json:"role,omitempty"`
	Ports     []int    `json:"ports,omitempty"`
	Bases     []int    `json:"bases,omitempty"`
	Agent     string   `json:"agent,omitempty"`
}

// Notice is a short message for a node or for all of a run, outside the directives: nothing that the run depends on
// needs it. It may be lost when more than 64 come while a node is away.
type Notice struct {
	// Seq grows with every notice of a run, also from one daemon to the next.
	Seq uint64 `json:"seq"`
	// Topic names the intended reader of Body, such as "log-level".
	Topic string `json:"topic"`
	Body  string `json:"body,omitempty"`
}

// Progress is how far the workers of one epoch have come, as far as a node knows.
type Progress struct {
	// Step is the number of steps since the workers were started, if Stepping is true.
	Step     int64 `json:"step,omitempty"`
	Stepping bool  `json:"stepping,omitempty"`
	// Checkpoint is the newest one, if Saving is true.
	Checkpoint int64 `json:"checkpoint,omitempty"`
	Saving     bool  `json:"saving,omitempty"`
	// Ran and Idle are the ages of the first and the newest step, and Kept that of the checkpoint; 0: unknown.
	Ran  time.Duration `json:"ran,omitempty"`
	Idle time.Duration `json:"idle,omitempty"`
	Kept time.Duration `json:"kept,omitempty"`
	// Loaded is the step of the checkpoint with which the workers have begun, 0 for none, if Resumed is true.
	Loaded  int64 `json:"loaded,omitempty"`
	Resumed bool  `json:"resumed,omitempty"`
	// Blocked is for how long saves have kept the workers from training.
	Blocked time.Duration `json:"blocked,omitempty"`
}

// With is the further of both.
func (p Progress) With(o Progress) Progress {
	w := Progress{
		Step: max(p.Step, o.Step, 0), Stepping: p.Stepping || o.Stepping,
		Checkpoint: max(p.Checkpoint, o.Checkpoint, 0), Saving: p.Saving || o.Saving,
		Ran: max(p.Ran, o.Ran, 0), Idle: max(p.Idle, 0), Kept: max(p.Kept, 0),
		Loaded: max(p.Loaded, o.Loaded, 0), Resumed: p.Resumed || o.Resumed, Blocked: max(p.Blocked, o.Blocked, 0),
	}
	if o.Idle > 0 && (w.Idle == 0 || o.Idle < w.Idle) {
		w.Idle = o.Idle
	}
	if o.Saving && (!p.Saving || o.Checkpoint > p.Checkpoint) {
		w.Kept = max(o.Kept, 0)
	}
	return w
}

// Reached is p without ages and the rest that says nothing about how far the workers have come.
func (p Progress) Reached() Progress {
	return Progress{Step: p.Step, Stepping: p.Stepping, Checkpoint: p.Checkpoint, Saving: p.Saving}
}

// Aged is p after another d.
func (p Progress) Aged(d time.Duration) Progress {
	for _, age := range []*time.Duration{&p.Ran, &p.Idle, &p.Kept} {
		if *age > 0 {
			*age += d
		}
	}
	return p
}

// Beyond reports whether a run that had come as far as best is further now. Steps count from the newest checkpoint, if
// there is one, so they are compared only while that is the same.
func (p Progress) Beyond(best Progress) bool {
	if p.Saving && (!best.Saving || p.Checkpoint > best.Checkpoint) {
		return true
	}
	return p.Stepping && p.Step > best.Step
}
