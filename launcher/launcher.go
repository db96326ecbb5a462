// Package launcher is the agent of one node: it follows the rendezvous, keeps the node's worker group in the current
// epoch, and reports why it ended.
//
// It knows the rendezvous, the workers' store and the event log only through the
// small interfaces of this file; internal/app/run wires them. It must not import
// rendezvous, netcheck, switchbox, checkpointd or hang, nor any command-line or
// metrics library.
//
// Goroutines: Agent.Run owns one event loop and waits for everything it starts.
package launcher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"syscall"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/filetimer"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/verdict"
)

// Directive is the present duty of this node.
type Directive struct {
	job.EpochID
	Kind        job.Kind
	Place       job.Place // for Lead and Run
	MaxRestarts int       // of the whole job
	// Cause is the reason; zero if there is none. That of a Wait may be the refusal of another node.
	Cause job.Cause
	// Hold, with Run: the run is held, so that no workers are started.
	Hold bool
	// Confirms, with Run: no workers are started; those that run already go on.
	Confirms bool
	// Command is the command of the workers; nil: Config.Path and Args.
	Command *job.Command
	// Leave is the reason why this node has to leave the job, "" if it may stay.
	Leave string
	// Rules are those of the run, for a node that has to act on them before the rendezvous does.
	Rules Rules
}

// follows: no other epoch was sealed between e and d.
func (d Directive) follows(e Directive) bool {
	return e.Round > 0 && (d.Round == e.Round && d.Epoch <= e.Epoch+1 || d.Round == e.Round+1)
}

// Rules define the effect of single workers' ends on the run.
type Rules struct {
	// Success: "rank0" and "any" want to hear of workers that succeed while others of their node run.
	Success string
	// LetRun, with Done: workers that still run go on, and how they end does not count.
	LetRun bool
	// Tolerate: an epoch goes on when one of its workers fails, as long as another one is left.
	Tolerate bool
	// Alone: with a Success of "rank0" or "node0", an epoch that no restart may follow goes on when other workers fail.
	Alone bool
}

// Rendezvous is how a node takes part in its run. Every method but Directives may block
// while the daemon is away, until ctx ends.
type Rendezvous interface {
	// Directives closes when the daemon will not have this node any more (Err).
	Directives() <-chan Directive
	Err() error
	// Running reports which epoch's workers run here; nil for none.
	Running(d *Directive)
	// Rejoin asks for a place in the next world, the workers of stopped having ended.
	Rejoin(ctx context.Context, stopped Directive, failures []verdict.Failure) error
	Ready(ctx context.Context, d Directive, addr string, port int) error
	Failing(ctx context.Context, d Directive, a policy.Action, failures []verdict.Failure) error
	Success(ctx context.Context, d Directive) error
	// RankSucceeded: one worker has, and others of this node still run. RankFailed: one has failed, and by d.Rules the
	// others may outlive it; left counts the remaining workers of this node.
	RankSucceeded(ctx context.Context, d Directive, rank int) error
	RankFailed(ctx context.Context, d Directive, a policy.Action, failures []verdict.Failure, left int) error
	// Cleared and Barred answer a Check: this node may get workers, or it must not, and why.
	Cleared(ctx context.Context, res CheckResult) error
	Barred(ctx context.Context, res CheckResult) error
	// Doubt withdraws the last answer of the check, with the reason. It precedes the Rejoin.
	Doubt(ctx context.Context, reason string) error
	// Bar keeps every launcher of this node's name without workers until a user unbars the name.
	Bar(ctx context.Context, reason string) error
	// World is the newest world that was sealed, by group rank.
	World(ctx context.Context) ([]job.Member, error)
	// Notices carries messages apart from the directives; nil if they are not read.
	Notices() <-chan job.Notice
	// Leaving announces that this node will leave within grace: the workers of all nodes are stopped.
	Leaving(ctx context.Context, reason string, grace time.Duration) error
	Leave(ctx context.Context, reason string, failures []verdict.Failure) (verdict.Evidence, error)
}

// Store is the TCPStore of the workers while this node is rank 0. Its port is bound once, before the first rendezvous,
// and kept.
type Store interface {
	// Reset makes a fresh namespace, and drops every connection. again: the previous epoch was served from here as well,
	// so that entries that outlive an epoch stay.
	Reset(again bool)
	Port() int
}

// Processes starts and ends the workers; proc.Supervisor is one.
type Processes interface {
	Start(proc.Spec) (*proc.Process, error)
	Stop(ps []*proc.Process, sig syscall.Signal, grace time.Duration, force <-chan struct{}) error
}

// Config describes this node's part of a job.
type Config struct {
	RunID string
	Role  string
	// NodeName is the node's name for users, Host its host name.
	NodeName, Host string
	// Addr is where other nodes reach this one.
	Addr string
	// Slots is the number of workers (nproc-per-node); 0: this node has a side alone.
	Slots int
	// Command is a worker's argv; ${local_rank} is replaced in Args. Path is the
	// executable.
	Path string
	Args []string
	// Own is how many of Args are no arguments of the script: the preset's are put behind them.
	Own int
	// Name is the program's name in the failure report.
	Name   string
	Dir    string
	Env    []string
	Stdin  *os.File // inherited by every worker; nil is /dev/null
	Preset preset.Preset
	// ServicePort, Servers, Share, Devices and Device are preset.Vars'.
	ServicePort      int
	Servers          int
	Share            string
	Devices          int
	Device           string
	VirtualLocalRank bool
	OldTorch         bool                      // see preset.Vars
	CPUs             func(localRank int) []int // CPU set of a worker; nil leaves it alone
	// MemoryPolicy is the NUMA policy for the memory of a worker; nil leaves it alone, as a nil policy does.
	MemoryPolicy func(localRank int) *proc.MemoryPolicy
	Policy       policy.Config
	// ShutdownTimeout is how long workers have between a signal and SIGKILL.
	ShutdownTimeout time.Duration
	// LeaveGrace is the time from the notice that this node has to leave to its end, including the last save. Zero: the
	// workers have ShutdownTimeout, and nothing else is bounded.
	LeaveGrace time.Duration
	Restart    Restart
	// SignalNames is the workers' TORCHELASTIC_SIGNALS_TO_HANDLE.
	SignalNames string
	// Substitute replaces ${local_rank} in an argument.
	Substitute func(arg string, localRank int) string
	// Resolve finds the program of a Command. Required if directives bring commands.
	Resolve func(job.Command) (Program, error)
	// Meanwhile is the argv of the command that runs while the run is held; nil: none.
	Meanwhile []string
	// Leaves carries reasons, in a few words, to leave the job; nil: there are none but signals and orders.
	Leaves <-chan string

	Rendezvous Rendezvous
	Store      Store
	Processes  Processes
	Logs       *logs.Logs
	// Parts take part in the workers' life, in this order.
	Parts []Part
	// NeedsWorld fills in Epoch.World.
	NeedsWorld bool
	// Sides returns the side processes of an epoch apart from the preset's, before its workers are started. An error holds
	// why they cannot be started. Nil: there are none.
	Sides func(Epoch) ([]Side, error)
	// Before runs before the workers of an epoch are started, and After when they have ended, unless Before has failed. A
	// failure of Before is that of the epoch, as a worker's is. Both have a goroutine of their own, and return soon after
	// ctx ends. Nil has nothing to do.
	Before func(ctx context.Context, e Epoch) *verdict.Failure
	After  func(ctx context.Context, r AfterRequest)
	// Spawn starts a worker in place of Processes, which can stop the process; nil: Processes does.
	Spawn func(s proc.Spec, id logs.WorkerID) (*proc.Process, error)
	// Excuse returns in one line why the end of a worker is not the job's fault, so that its restart is not charged; "":
	// it is. It is called for the first worker of an epoch that ends otherwise than by the job's success, and for every
	// one that exits with 0. Nil excuses nothing.
	Excuse func(localRank, pid, exitCode int) (why string)
	// Saved reports whether a save of this node's workers is complete, in memory or on disk. They then need no time to
	// save anything when they are stopped for a restart. It is called outside the agent's loop, once the workers have had
	// Restart.Grace, and returns soon after ctx ends. Nil: nothing is saved.
	Saved func(ctx context.Context) bool
	// Examiner and Doubter have a nil function if there is none.
	Examiner Examiner
	Doubter  Doubter
	// OnNotice gets every notice that the rendezvous sends to this node. Without any, notices are not read.
	OnNotice []func(topic, body string)
	// StayWhenBarred: a check that this node does not pass does not end the launcher, because others depend on it. It
	// stays without workers and ends with the job.
	StayWhenBarred bool
	// Observers are notified of every event, each once and in order, by the agent's loop: they must return soon.
	Observers []func(Event)
	// Memory reads the OOM kills of this container; nil when it cannot be read.
	Memory func() (proc.MemoryState, error)
	// Signals carries the launcher's signals. Those of Terminate end the job on this node, all others are passed on to the
	// workers.
	Signals   <-chan os.Signal
	Terminate func(os.Signal) bool
	// Timers carries the workers' requests to the file timer; nil without one.
	Timers <-chan filetimer.Request
	// LogsKept logs where the workers' files are.
	LogsKept bool
	Logger   *slog.Logger
}

// ReasonError is an error that ends this node's part of the job, with the reason that
// the exit status shall give.
type ReasonError struct {
	Reason policy.Reason
	Err    error
}

func (e *ReasonError) Error() string { return e.Err.Error() }
func (e *ReasonError) Unwrap() error { return e.Err }

// Result is how this node's part of the job ended.
type Result struct {
	Reason policy.Reason
	// Blame is set if the workers' failures show that a machine has ended the job, and which one.
	Blame policy.Blame
	// Err is set when the launcher itself failed, or its node's check, and not a worker.
	Err error
	// Verdict is set when the job failed: which rank failed first in the whole job and why; or which check of this node.
	Verdict string
	// Judged is the input of Verdict; zero without one.
	Judged verdict.Verdict
	// Local are this node's failed workers, and Root the index of the first of them.
	Local []verdict.Failure
	Root  int
	// Signal is the signal that ended the launcher, if one did.
	Signal syscall.Signal
	// Left is why this node has left the job, if no signal was the reason; Deadline is when it has to be gone, zero if
	// unknown.
	Left     string
	Deadline time.Time
}

// Validate reports the first thing that is missing.
func (c *Config) Validate() error {
	switch {
	case c.Slots < 1 && (c.Slots < 0 || c.Share == "" || c.Share == preset.Workers):
		return fmt.Errorf("launcher: %d workers on this node; need at least 1", c.Slots)
	case c.Path == "":
		return errors.New("launcher: no program to run")
	case c.ShutdownTimeout < 0:
		return fmt.Errorf("launcher: shutdown timeout %s must not be negative", c.ShutdownTimeout)
	case c.Restart.Grace < 0:
		return fmt.Errorf("launcher: restart grace %s must not be negative", c.Restart.Grace)
	case c.Rendezvous == nil || c.Store == nil || c.Processes == nil || c.Logs == nil:
		return errors.New("launcher: Rendezvous, Store, Processes and Logs are required")
	}
	return errors.Join(validateParts(c.Parts), c.Policy.Validate())
}
