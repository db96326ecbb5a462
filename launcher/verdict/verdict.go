// Package verdict finds the worker of the whole job that failed first, and why. Judge chooses among the exits of all
// nodes, Verdict.Line is the result in one line, Block prints one node's failures like torchrun, and ParseErrorFile
// reads a worker's own report of its end.
//
// The package is pure: it must not read a clock, a file or the environment, and starts no goroutine. Times of different
// nodes are compared as they are. Clocks that differ by more than lossGrace can change the order in which failures on
// different nodes are seen; the rules that rank above time (see Judge) do not depend on it.
package verdict

import (
	"cmp"
	"slices"
	"time"

	"dlrover-run/internal/stable"
	"dlrover-run/internal/text"
)

// OOM is the kernel's report that it killed a process of the worker's cgroup for lack of memory.
type OOM struct {
	Limit int64 `json:"limit,omitempty"` // the cgroup's memory limit in bytes; 0 if unknown or none
	Peak  int64 `json:"peak,omitempty"`  // the most it used, in bytes; 0 if unknown
}

// Failure is one worker that did not succeed.
type Failure struct {
	Node      int    `json:"node"` // group rank
	NodeName  string `json:"node_name,omitempty"`
	Host      string `json:"host,omitempty"`
	Rank      int    `json:"rank"`
	LocalRank int    `json:"local_rank"`
	PID       int    `json:"pid"`
	Role      string `json:"role,omitempty"`

	ExitCode int       `json:"exit_code"`         // -n when signal n ended the worker
	At       time.Time `json:"at"`                // when the worker was seen to have ended
	Stopped  bool      `json:"stopped,omitempty"` // it ended after a signal of the launcher
	OOM      *OOM      `json:"oom,omitempty"`
	Timer    string    `json:"timer,omitempty"` // the launcher killed it, or a process of it, because of this

	// From the worker's error file, see ParseErrorFile. All are empty, and ErrorTime zero, without one.
	ErrorFile string    `json:"error_file,omitempty"`
	Message   string    `json:"message,omitempty"`
	Traceback string    `json:"traceback,omitempty"`
	ErrorTime time.Time `json:"error_time,omitzero"` // whole seconds, rounded down

	LastLines string `json:"last_lines,omitempty"` // the end of the worker's output

	Policy    string `json:"policy,omitempty"`    // the rule that decided about the failure; "" without one
	Permanent bool   `json:"permanent,omitempty"` // the policy does not retry it
}

// Bytes that Compact leaves of the long fields.
const (
	maxMessage   = 1 << 10
	maxPolicy    = 1 << 9
	maxTraceback = 4 << 10
	maxLastLines = 2 << 10
)

// Compact returns f small enough to travel: at most 8 KiB of text. Messages keep their beginning and end, tracebacks
// and output their end, which is where Python puts the cause, and of a longer cause its beginning, where the class is.
func (f Failure) Compact() Failure {
	f.Message = text.Ends(f.Message, maxMessage)
	f.Timer, f.Policy = text.Head(f.Timer, maxCause), text.Head(f.Policy, maxPolicy)
	f.Traceback = Ending(f.Traceback, maxTraceback)
	f.LastLines = Ending(f.LastLines, maxLastLines)
	return f
}

// Loss is a node that went away.
type Loss struct {
	Node     int       `json:"node"` // group rank
	NodeName string    `json:"node_name,omitempty"`
	Host     string    `json:"host,omitempty"`
	Reason   string    `json:"reason,omitempty"`
	At       time.Time `json:"at"` // when it was last known to be there, not when it was given up
	Ranks    []int     `json:"ranks,omitempty"`
}

// Evidence is the known failures at the end of one round.
type Evidence struct {
	Failures []Failure `json:"failures,omitempty"`
	Losses   []Loss    `json:"losses,omitempty"`

	// Hung names the hung ranks, if the round was ended because of them; all failures then are consequences.
	Hung string `json:"hung,omitempty"`

	RestartsUsed int `json:"restarts_used"`
	MaxRestarts  int `json:"max_restarts"`
	WorldSize    int `json:"world_size"`

	// Time is the account of the run's time in a line; "" where no steps are counted.
	Time string `json:"-"`
}

// Rule is the rule that decided a verdict.
type Rule string

// The rules.
const (
	NoCause     Rule = "no-cause"    // nothing ended by itself
	FirstExit   Rule = "first-exit"  // the earliest exit that nothing else explains
	OutOfMemory Rule = "oom"         // the kernel's OOM killer
	NodeLost    Rule = "node-lost"   // a node went away
	Consequence Rule = "consequence" // Root only followed; its cause was not reported
	WasHung     Rule = "hang"        // the workers hung
)

// Verdict names the cause of a job's end: Root or Loss, Hung under WasHung, or none under NoCause.
type Verdict struct {
	Rule      Rule      `json:"rule"`
	Class     Class     `json:"class"` // of Root, or Lost
	Root      *Failure  `json:"root,omitempty"`
	Loss      *Loss     `json:"loss,omitempty"`
	Hung      string    `json:"hung,omitempty"`
	Followers []Failure `json:"followers,omitempty"` // all other failures, the earliest first

	OtherLosses  int `json:"other_losses,omitempty"` // lost nodes other than Loss
	RestartsUsed int `json:"restarts_used"`
	MaxRestarts  int `json:"max_restarts"`
	WorldSize    int `json:"world_size"`
}

const (
	// window is how much later than the first exit a worker may end and still be its cause. A process closes its
	// connections before it is gone: tearing down CUDA, NCCL and Python threads takes seconds, in which its peers fail
	// and are seen to end first.
	window = 5 * time.Second

	// lossGrace is how much later than a failure the loss of a node may be dated and still be its cause: a node that goes
	// down kills its workers before its launcher.
	lossGrace = 300 * time.Millisecond
)

// Judge finds the cause. Its rules:
//
//   - A hang that the hang detection has ended a round for is the cause.
//   - A worker that the launcher stopped is no cause, unless its error file is dated no later than the first end that
//     the launcher did not ask for: a failed worker can hang in its teardown until it is stopped. A worker without an
//     error file that ended with an error of its own in its output (see Failure.Explains) comes after other failures,
//     but before errors that are known to be consequences.
//   - A failure happened when the worker was seen to have ended, or by the end of the second that its error file names
//     if that is earlier.
//   - Among the failures within window of the earliest one, a kill by the OOM killer comes before other failures, and
//     those come before errors that are known to be consequences, such as "connection closed by peer". Then the
//     earliest counts, then the earliest error file, then the lowest rank.
//   - The earliest loss of a node is the cause if it is dated before an OOM kill, or not later than lossGrace after any
//     other failure. A known consequence always yields to a loss, because silent nodes are found late.
func Judge(e Evidence) Verdict {
	v := Verdict{
		Rule: NoCause, Class: Unknown, RestartsUsed: e.RestartsUsed, MaxRestarts: e.MaxRestarts, WorldSize: e.WorldSize,
		Followers: stable.Sorted(slices.Values(e.Failures), func(a, b Failure) int {
			return cmp.Or(a.At.Compare(b.At), cmp.Compare(a.Rank, b.Rank))
		}),
	}
	if e.Hung != "" {
		v.Rule, v.Class, v.Hung = WasHung, Hang, e.Hung
		return v
	}
	losses := stable.Sorted(slices.Values(e.Losses), func(a, b Loss) int { return a.At.Compare(b.At) })
	root, found := firstFailure(suspects(v.Followers, losses))
	if len(losses) > 0 && (!found || root.yieldsTo(losses[0])) {
		v.Rule, v.Class, v.Loss, v.OtherLosses = NodeLost, Lost, &losses[0], len(losses)-1
		return v
	}
	v.OtherLosses = len(losses)
	if found {
		f := v.Followers[root.index]
		v.Rule, v.Class, v.Root = root.weight.rule(), f.Class(), &f
		v.Followers = slices.Delete(v.Followers, root.index, root.index+1)
	}
	return v
}

// weight ranks failures that end within window of each other.
type weight int

const (
	follows weight = iota // its error is a known consequence
	undated               // it was stopped, and may have failed before
	plain
	oom
)

func (w weight) rule() Rule {
	return [...]Rule{follows: Consequence, undated: FirstExit, plain: FirstExit, oom: OutOfMemory}[w]
}

func weightOf(f Failure) weight {
	switch {
	case f.OOM != nil:
		return oom
	case followed(f) && f.Class() != Hardware:
		return follows
	}
	return plain
}

// suspect is a failure that may be the cause.
type suspect struct {
	index     int // in the failures
	weight    weight
	at        time.Time // the latest time at which it can have failed
	errorTime time.Time
	rank      int
}

func (s suspect) yieldsTo(l Loss) bool {
	switch s.weight {
	case follows, undated:
		return true
	case oom:
		return l.At.Before(s.at)
	}
	return !l.At.After(s.at.Add(lossGrace))
}

// suspects returns the failures, which are sorted by At, that the launcher did not cause.
func suspects(failures []Failure, losses []Loss) []suspect {
	var firstEnd time.Time // that the launcher did not ask for; zero = none
	if i := slices.IndexFunc(failures, func(f Failure) bool { return !f.Stopped }); i >= 0 {
		firstEnd = failures[i].At
	}
	if len(losses) > 0 && (firstEnd.IsZero() || losses[0].At.Before(firstEnd)) {
		firstEnd = losses[0].At
	}
	var out []suspect
	for i, f := range failures {
		switch {
		case !f.Stopped, !f.ErrorTime.IsZero() && !f.ErrorTime.After(firstEnd):
			out = append(out, suspect{i, weightOf(f), failedBy(f), f.ErrorTime, f.Rank})
		case f.ErrorTime.IsZero() && f.Explains() && !firstEnd.IsZero():
			out = append(out, suspect{i, undated, firstEnd, time.Time{}, f.Rank})
		}
	}
	return out
}

// failedBy is the latest time at which f can have failed. Error files carry whole seconds, rounded down.
func failedBy(f Failure) time.Time {
	if reported := f.ErrorTime.Add(time.Second); !f.ErrorTime.IsZero() && reported.Before(f.At) {
		return reported
	}
	return f.At
}

// firstFailure chooses among suspects; false if there are none.
func firstFailure(all []suspect) (suspect, bool) {
	if len(all) == 0 {
		return suspect{}, false
	}
	first := slices.MinFunc(all, func(a, b suspect) int { return a.at.Compare(b.at) })
	inWindow := slices.DeleteFunc(all, func(s suspect) bool { return s.at.After(first.at.Add(window)) })
	return slices.MinFunc(inWindow, func(a, b suspect) int {
		return cmp.Or(
			cmp.Compare(b.weight, a.weight),
			a.at.Compare(b.at),
			compareErrorTimes(a.errorTime, b.errorTime),
			cmp.Compare(a.rank, b.rank))
	}), true
}

// compareErrorTimes puts failures without an error file last.
func compareErrorTimes(a, b time.Time) int {
	if a.IsZero() != b.IsZero() {
		if a.IsZero() {
			return 1
		}
		return -1
	}
	return a.Compare(b)
}
