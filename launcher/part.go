package launcher

import (
	"context"
	"slices"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/verdict"
)

// Part takes part in the life of a node's workers. It takes part in more of it by implementing the optional interfaces
// below. The agent calls the parts in the order of Config.Parts, EndParts in the reverse order.
//
// Methods are called by the agent's loop and must return soon, except for Check, Watch, Examine and End.
type Part interface {
	// Name is the part's name in messages; no two parts of one launcher have the same.
	Name() string
}

// Checker examines this node before it gets workers. The Checkers run one after the other, until one does not pass.
type Checker interface {
	// Check returns soon after ctx ends, which it does when anything else is to be done: its answer does not count any
	// more then. An error means that the node could not be examined, which bars it like a check that did not pass.
	Check(ctx context.Context, d Directive) (CheckResult, error)
}

// CheckResult is the answer of a Checker.
type CheckResult struct {
	// Again, of one that has not passed: nothing is proved. The node waits for another check.
	Again  bool
	Passed bool
	Reason string    // why not, in one line
	Aspect string    // of the node that has failed, in a word; "" is none that a check can disprove
	Until  time.Time // how long a pass holds; zero: for this launcher's life
	// Covered are the aspects of the node that were found to be sound.
	Covered []string
	// Domain labels nodes that are connected better with each other than with the rest, such as by NVLink: the rendezvous
	// makes them neighbours. "" is unknown.
	Domain string
}

// CheckInvalidator knows whether the result of this node's check can still hold.
type CheckInvalidator interface {
	// Doubt returns one line about an event on this node since its check, such as a link that was down, or "". It is
	// called after an epoch's workers have ended, before the node joins again, and has two seconds, after which ctx ends.
	Doubt(ctx context.Context) string
}

// EnvProvider sets variables of the workers' environment.
type EnvProvider interface {
	// Environ is laid over the preset's variables for the worker of an epoch, as KEY=VALUE.
	Environ(e Epoch, localRank int) []string
}

// Preparer sees a worker's specification right before its start.
type Preparer interface {
	Preparing(e Epoch, id logs.WorkerID, s proc.Spec)
}

// Starter is notified of an epoch before its first worker is started.
type Starter interface {
	Starting(e Epoch)
}

// Watcher watches over running workers.
type Watcher interface {
	// Watch has a goroutine of its own for every epoch. pids are the workers' by local rank. It returns soon after ctx
	// ends, which it does when the workers have ended or are being stopped.
	Watch(ctx context.Context, e Epoch, pids []int, c Control)
}

// Examiner looks at workers before they are stopped because a collective has timed out. A worker that did not take part
// in it may still live, and its end destroys the evidence. No restart for any other reason waits for it.
type Examiner interface {
	// Examine has a goroutine of its own and is called at most once in an epoch, after the watchers were asked to end.
	// pids are the workers' by local rank, 0 for one that has ended; why is the text of the timeout, which may come from
	// another node. The workers are stopped when Examine returns, and in any case a second after it was called: ctx ends
	// shortly before, and later findings are lost.
	Examine(ctx context.Context, e Epoch, pids []int, why string)
}

// Control is how a Watcher acts on the epoch that it watches. Its methods do not block and may be called by any
// goroutine.
type Control interface {
	// Fail ends the epoch as the failure of a worker does that act is the answer to; policy.Succeed counts as
	// policy.RestartCharged. The caller sets Rank, LocalRank, PID and Message of f; the agent fills in other fields that
	// are empty. Only the first failure of an epoch counts, and none of an epoch that is over.
	Fail(f verdict.Failure, act policy.Action)
	// Output is the end of the standard error of a worker of the epoch or, if that is empty, of its standard output: 2 KiB
	// of text at most. It may read a file of the log directory.
	Output(localRank int) string
}

// Stopper is notified of the end of an epoch's workers.
type Stopper interface {
	// Stopped is called when all workers have ended. Before that it is called with why.Early if a signal is about to
	// end them: time is short then.
	Stopped(why StopInfo)
}

// Spawner starts the workers instead of Config.Processes. At most one part is a Spawner.
type Spawner interface {
	// Spawn returns a process that Config.Processes can stop.
	Spawn(s proc.Spec, id logs.WorkerID) (*proc.Process, error)
}

// FailureClassifier knows ends of workers that the launcher itself may have caused.
type FailureClassifier interface {
	// Excuse returns in one line why the end of a worker is not the job's fault, so that its restart is not charged; "":
	// it is. It is called for the first worker of an epoch that ends otherwise than by the job's success, and for every
	// one that exits with 0.
	Excuse(w logs.WorkerID, pid, exitCode int) (why string)
}

// ProgressReporter knows how far the workers have come.
type ProgressReporter interface {
	// Progress is that of the newest epoch that had workers, also after their end. It is called by any goroutine, before a
	// failure is reported, and must be quick.
	Progress() job.Progress
}

// MessageHandler gets every notice that the rendezvous sends to this node.
type MessageHandler interface {
	Notice(topic, body string)
}

// WorldUser reports whether Epoch.World is to be filled in.
type WorldUser interface {
	NeedsWorld() bool
}

// Ender finishes the work of the part; see EndParts.
type Ender interface {
	// End may take e.Budget, or until e.Enough is closed.
	End(e Ending)
}

// Ending is the time that is left after the verdict.
type Ending struct {
	Result Result
	Budget time.Duration   // of all parts together when EndParts is called; the remainder when End is
	Enough <-chan struct{} // closed by a signal: no more patience
}

// Epoch is common to the workers of one start on this node.
type Epoch struct {
	Directive // of kind Run
	// World is every node by group rank, this one included; nil unless a WorldUser asks for it.
	World []job.Member
}

// EndParts ends the parts, the last one first, after the job's verdict has been reported.
func EndParts(parts []Part, e Ending) {
	deadline := now().Add(e.Budget)
	for _, p := range slices.Backward(parts) {
		if ender, ok := p.(Ender); ok {
			e.Budget = max(0, time.Until(deadline))
			ender.End(e)
		}
	}
}
