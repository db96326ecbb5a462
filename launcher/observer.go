package launcher

import (
	"dlrover-run/internal/job"
	"syscall"
	"time"

	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
)

// Observer is notified of events on this node, each once and in order, by the agent's loop: it must return soon. Embed
// NopObserver to implement a part of it.
type Observer interface {
	// Started: all workers of an epoch have been started.
	Started(StartInfo)
	// Exited: a worker has ended.
	Exited(ExitInfo)
	// Succeeded: all workers of this node have exited with 0.
	Succeeded(SuccessInfo)
	// Stopped: nothing is left of an epoch's workers.
	Stopped(StopInfo)
	// Signaled: the launcher has received a signal that ends this node's part of the job.
	Signaled(SignalInfo)
	// Leaving: this node begins to leave the job.
	Leaving(LeaveInfo)
	// TimerExpired: a process is killed because it did not release its timer in time.
	TimerExpired(TimerInfo)
	// Checked: a check of this node has given an answer that counts.
	Checked(CheckInfo)
	// Barred: this node has to stay without workers.
	Barred(job.Cause)
	// Faulted: a part of the launcher has ended the epoch as failed.
	Faulted(FaultInfo)
	// Decided: a rule of the policy has chosen the answer to the failure of a worker.
	Decided(DecideInfo)
}

// StartInfo describes the start of an epoch's workers.
type StartInfo struct {
	Epoch Epoch
	PIDs  []int // by local rank
}

// ExitInfo describes the end of one worker.
type ExitInfo struct {
	Worker   logs.WorkerID
	PID      int
	ExitCode int  // -n: ended by signal n
	Stopped  bool // the launcher was stopping the workers
}

// SuccessInfo describes the success of this node's workers.
type SuccessInfo struct{ Epoch Epoch }

// StopInfo describes the end of an epoch's workers.
type StopInfo struct {
	Epoch     Epoch
	Reason    string        // why they have ended, in a few words
	CauseKind job.CauseKind // of the directive that stopped them; "" if none did
	Early     bool          // they have not ended: a signal is about to end them
	Leaving   bool          // this node leaves the job
}

// SignalInfo describes a signal that ends this node's part.
type SignalInfo struct {
	Signal syscall.Signal
	Again  bool // not the first one: the workers get no more grace
}

// LeaveInfo holds why this node leaves.
type LeaveInfo struct {
	Reason string
	Grace  time.Duration // until it has to be gone; 0 is unknown
}

// TimerInfo describes a timer that has expired.
type TimerInfo struct {
	Worker logs.WorkerID
	PID    int // of the worker or of a process of its session
	Scope  string
	After  time.Duration // the timer's duration, rounded
	Signal syscall.Signal
}

// CheckInfo describes the answer of this node's check.
type CheckInfo struct {
	Part string // that did not pass; "" if all have
	CheckResult
	Took time.Duration
}

// FaultInfo describes a failure that a part has found.
type FaultInfo struct {
	Epoch   Epoch
	Part    string
	Failure verdict.Failure
	Action  policy.Action
}

// DecideInfo describes a rule's answer to a failure.
type DecideInfo struct {
	Epoch    Epoch
	Failure  verdict.Failure
	Decision policy.Decision
}

// NopObserver is an Observer that does nothing.
type NopObserver struct{}

// Started implements Observer.
func (NopObserver) Started(StartInfo) {}

// Exited implements Observer.
func (NopObserver) Exited(ExitInfo) {}

// Succeeded implements Observer.
func (NopObserver) Succeeded(SuccessInfo) {}

// Stopped implements Observer.
func (NopObserver) Stopped(StopInfo) {}

// Signaled implements Observer.
func (NopObserver) Signaled(SignalInfo) {}

// Leaving implements Observer.
func (NopObserver) Leaving(LeaveInfo) {}

// TimerExpired implements Observer.
func (NopObserver) TimerExpired(TimerInfo) {}

// Checked implements Observer.
func (NopObserver) Checked(CheckInfo) {}

// Barred implements Observer.
func (NopObserver) Barred(job.Cause) {}

// Faulted implements Observer.
func (NopObserver) Faulted(FaultInfo) {}

// Decided implements Observer.
func (NopObserver) Decided(DecideInfo) {}
