package policy

import (
	"fmt"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// CodePolicy chooses the launcher's exit status (--exit-code-policy).
type CodePolicy string

// The exit code policies.
const (
	// TorchrunCodes is the default: 0 for success, 2 for a usage error, 1 for everything else, as torchrun has it.
	TorchrunCodes CodePolicy = "torchrun"
	// ReasonCodes gives every Reason its own status, for schedulers with rules by exit code.
	ReasonCodes CodePolicy = "reason"
	// DLRoverCodes are the statuses from which DLRover's master reads why a pod has ended.
	DLRoverCodes CodePolicy = "dlrover"
)

// Validate refuses an unknown policy; "" is TorchrunCodes.
func (p CodePolicy) Validate() error {
	switch p {
	case "", TorchrunCodes, ReasonCodes, DLRoverCodes:
		return nil
	}
	return fmt.Errorf("exit code policy %q is unknown: use %s, %s or %s", string(p), TorchrunCodes, ReasonCodes,
		DLRoverCodes)
}

// Reason is why the launcher ends. Its value is the exit status under ReasonCodes; the values are an interface to
// schedulers and never change their meaning.
//
// They keep clear of statuses that mean something to others: 14, 201 and 202 (DLRover), 93 (NVRx), 99 (Grid Engine),
// 101 and 102 (PaddlePaddle), 64 to 78 (sysexits), 126 and 127 (shells), 138 (restartMe), 200 and 210
// (FrameworkController). 128+n is used for signal n only, so that rules such as "143 was preempted, run it again" hold
// for the launcher too.
type Reason int

// The reasons.
const (
	Success      Reason = 0 // all workers succeeded
	Unclassified Reason = 1 // anything not listed here
	Usage        Reason = 2 // the command line or the environment is wrong

	WorkerFailed    Reason = 10 // a worker failed and the restarts are used up
	WorkerPermanent Reason = 11 // a worker failed in a way that the restart policy does not retry
	OutOfMemory     Reason = 12 // the kernel's OOM killer ended a worker and the restarts are used up
	NodeLost        Reason = 13 // a node went away and the job could not go on without it

	RendezvousTimeout Reason = 20 // too few nodes came together in time
	RendezvousClosed  Reason = 21 // the job has ended already, or failed on another node
	MasterUnreachable Reason = 22 // no connection to the rendezvous master
	TokenRefused      Reason = 23 // the rendezvous master refused the token

	CannotExecute Reason = 30 // the script or its interpreter cannot be started
	LogDir        Reason = 31 // the log directory cannot be written
	SaveLost      Reason = 32 // all workers succeeded, and a checkpoint of theirs is not on disk

	NodeCheckFailed Reason = 40 // this node has not passed its check
	TooFewPassed    Reason = 41 // too few nodes have passed their checks
	Hung            Reason = 42 // the workers made no progress and the restarts are used up
	Deadline        Reason = 43 // the job was not done in time
	NoFirstStep     Reason = 44 // the job did not make its first step in time
	OperatorStop    Reason = 45 // an operator has stopped the job
)

// Signaled is the reason of a launcher that stops because it received signal n.
func Signaled(n int) Reason { return Reason(128 + n) }

// Reasons lists all reasons except the Signaled ones, in order of their codes.
func Reasons() []Reason {
	return []Reason{Success, Unclassified, Usage, WorkerFailed, WorkerPermanent, OutOfMemory, NodeLost,
		RendezvousTimeout, RendezvousClosed, MasterUnreachable, TokenRefused, CannotExecute, LogDir, SaveLost,
		NodeCheckFailed, TooFewPassed, Hung, Deadline, NoFirstStep, OperatorStop}
}

// Blame completes a Reason: whether a machine has ended the job, and which one. Only DLRoverCodes asks for it.
type Blame int

// The blames.
const (
	Nobody        Blame = iota // no machine is known to be at fault
	OwnMemory                  // the kernel's OOM killer ended a worker of this node
	OwnHardware                // this node's hardware is broken
	OtherHardware              // another node's hardware is broken, and this node's is not known to be
)

// The statuses under DLRoverCodes, besides 0, 1, 2 and 143.
const (
	dlroverMemory = 247
	// DLRover takes both for a fault of the hardware. The launcher distinguishes with them on which node it is.
	dlroverOwnHardware   = 201
	dlroverOtherHardware = 202
)

// Code is the launcher's exit status. b counts where the reason leaves the blame open.
func (r Reason) Code(p CodePolicy, b Blame) int {
	switch {
	case p == DLRoverCodes:
		return r.dlroverCode(b)
	case p == ReasonCodes, r == Success, r == Usage:
		return int(r)
	}
	return 1
}

func (r Reason) dlroverCode(b Blame) int {
	switch {
	case r == Success, r == Usage, r == Signaled(int(unix.SIGTERM)):
		return int(r)
	case r > 128: // of other signals: a pod that is stopped gets SIGTERM
		return 1
	case r == NodeCheckFailed, b == OwnHardware:
		return dlroverOwnHardware
	case r == TooFewPassed, b == OtherHardware:
		return dlroverOtherHardware
	case b == OwnMemory:
		return dlroverMemory
	}
	return 1
}

// String is the reason in words.
func (r Reason) String() string {
	switch r {
	case Success:
		return "success"
	case Unclassified:
		return "unclassified error"
	case Usage:
		return "usage error"
	case WorkerFailed:
		return "a worker failed and no restart was left"
	case WorkerPermanent:
		return "a worker failed permanently"
	case OutOfMemory:
		return "a worker ran out of memory"
	case NodeLost:
		return "a node was lost"
	case RendezvousTimeout:
		return "too few nodes came together in time"
	case RendezvousClosed:
		return "the job has ended elsewhere"
	case MasterUnreachable:
		return "the master cannot be reached"
	case TokenRefused:
		return "the master refused the token"
	case CannotExecute:
		return "the worker's command cannot be started"
	case LogDir:
		return "the log directory cannot be written"
	case SaveLost:
		return "the workers succeeded, but not all of their checkpoints are on disk"
	case NodeCheckFailed:
		return "this node has not passed its check"
	case TooFewPassed:
		return "too few nodes have passed their checks"
	case Hung:
		return "the workers hung and no restart was left"
	case Deadline:
		return "the job was not done in time"
	case NoFirstStep:
		return "the job did not make its first step in time"
	case OperatorStop:
		return "an operator stopped the job"
	}
	if name := unix.SignalName(syscall.Signal(r - 128)); name != "" {
		return "ended by " + name
	}
	return "reason " + strconv.Itoa(int(r))
}
