package launcher

import (
	"syscall"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
)

// Event is something that has happened on this node: one of the structs below.
type Event any

func (c *Config) observe(e Event) {
	for _, notify := range c.Observers {
		notify(e)
	}
}

func (c *Config) notify(n job.Notice) {
	for _, notify := range c.OnNotice {
		notify(n.Topic, n.Body)
	}
}

// StartInfo reports that all workers of an epoch have been started.
type StartInfo struct {
	Epoch Epoch
	PIDs  []int      // by local rank
	Env   [][]string // likewise
}

// ExitInfo reports that a worker has ended.
type ExitInfo struct {
	Worker   logs.WorkerID
	PID      int
	ExitCode int  // -n: ended by signal n
	Stopped  bool // the launcher was stopping the workers
}

// SuccessInfo reports that all workers of this node have exited with 0.
type SuccessInfo struct{ Epoch Epoch }

// StopInfo reports that nothing is left of an epoch's workers.
type StopInfo struct{ Epoch Epoch }

// SignalInfo reports a signal to the launcher that ends this node's part of the job.
type SignalInfo struct {
	Signal syscall.Signal
	Again  bool // not the first one: the workers get no more grace
}

// LeaveInfo reports that this node begins to leave the job.
type LeaveInfo struct {
	Reason string        // in a few words
	Grace  time.Duration // until it has to be gone; 0 is unknown
}

// TimerInfo reports that a process is killed because it did not release its timer in time.
type TimerInfo struct {
	Worker logs.WorkerID
	PID    int // of the worker or of a process of its session
	Scope  string
	After  time.Duration // the timer's duration, rounded
	Signal syscall.Signal
}

// CheckInfo reports the answer of a check of this node, if it counts.
type CheckInfo struct {
	Part string // that did not pass; "" if all have
	CheckResult
	Took time.Duration
}

// BarInfo reports that this node has to stay without workers.
type BarInfo struct{ Cause job.Cause }

// FaultInfo reports that a part of the launcher has ended the epoch as failed.
type FaultInfo struct {
	Epoch   Epoch
	Part    string
	Failure verdict.Failure
	Action  policy.Action
}

// DecideInfo reports that a rule of the policy has chosen the answer to the failure of a worker.
type DecideInfo struct {
	Epoch    Epoch
	Failure  verdict.Failure
	Decision policy.Decision
}
