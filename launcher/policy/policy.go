// Package policy says what the end of a worker leads to (Config.Decide) and with which status the launcher itself ends
// (Reason.Code).
//
// Decide looks at one exit only. How many restarts the job has left is counted by the rendezvous, because every node
// must agree on it. What Decide looks at is a struct and what it returns an
// open enumeration, so that log rules, further signals and back-off extend them without a new call.
//
// The package is pure: it must not read a clock, a file or the environment, and starts no goroutine.
package policy

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Restart is the rule by which a worker's end is judged.
type Restart string

// The restart rules. The names are those of Kubernetes training operators.
const (
	// OnFailure restarts after every failure. It is the default and what torchrun does.
	OnFailure Restart = "OnFailure"
	// Never restarts nothing.
	Never Restart = "Never"
	// Always restarts whatever the exit code until the restarts are used up. A worker that exits with 0 is done for
	// this time; the rendezvous starts the job anew when all are.
	Always Restart = "Always"
	// ExitCode restarts after retryable exit codes and after RestartMe. Every other failure is permanent.
	ExitCode Restart = "ExitCode"
)

// RestartMe is the exit code by which a worker asks, under ExitCode, for a restart that is not charged to
// --max-restarts. It is also what a shell reports for SIGUSR1, so that signal asks for the same. Nothing bounds these
// restarts; to have them charged, list 138 as retryable.
const RestartMe = 138

// Config is a job's restart policy.
type Config struct {
	// Restart is the rule; "" is OnFailure.
	Restart Restart
	// MaxRestarts is the number of charged restarts that the whole job may use.
	MaxRestarts int
	// Retryable replaces the exit codes that ExitCode restarts after. The default is 130, 137 and 143: the shell's codes
	// of SIGINT, SIGKILL and SIGTERM, which an eviction, a preemption or the OOM killer leave behind.
	Retryable []CodeRange
}

// Validate refuses values out of range, and options that the chosen rule would ignore.
func (c Config) Validate() error {
	switch c.Restart {
	case "", OnFailure, Never, Always, ExitCode:
	default:
		return fmt.Errorf("restart policy %q is unknown: use %s, %s, %s or %s", c.Restart, OnFailure, Never, Always, ExitCode)
	}
	if c.MaxRestarts < 0 {
		return fmt.Errorf("--max-restarts=%d: need a number from 0", c.MaxRestarts)
	}
	if c.Restart == Never && c.MaxRestarts > 0 {
		return fmt.Errorf("restart policy %s with %d restarts contradicts itself: leave out max restarts, or use %s",
			Never, c.MaxRestarts, OnFailure)
	}
	if len(c.Retryable) > 0 && c.Restart != ExitCode {
		return fmt.Errorf("retryable exit codes have no effect without restart policy %s: add it, or leave out the codes",
			ExitCode)
	}
	for _, r := range c.Retryable {
		if err := r.validate(); err != nil {
			return err
		}
	}
	return nil
}

// Exit is one worker's end.
type Exit struct {
	Code int // the exit code; -n when signal n ended the worker
}

// Action is what a worker's end leads to. The values are ordered: the largest among a node's workers is what the node
// must do.
type Action int

// The actions.
const (
	Succeed        Action = iota // the worker is done
	RestartFree                  // restart; not charged to --max-restarts
	RestartCharged               // restart while the job has restarts left; then it fails
	Fail                         // end the job, whatever restarts are left
)

// String names the action for logs.
func (a Action) String() string {
	switch a {
	case Succeed:
		return "succeed"
	case RestartFree:
		return "restart, not charged"
	case RestartCharged:
		return "restart"
	case Fail:
		return "fail"
	}
	return "action " + strconv.Itoa(int(a))
}

// Decide judges one exit.
func (c Config) Decide(e Exit) Action {
	switch {
	case e.Code == 0:
		return Succeed
	case c.Restart == Always:
		return RestartCharged
	case c.Restart == Never:
		return Fail
	case c.Restart == ExitCode:
		return c.decideByCode(ShellCode(e.Code))
	}
	return RestartCharged
}

func (c Config) decideByCode(code int) Action {
	retryable := c.Retryable
	if len(retryable) == 0 {
		retryable = defaultRetryable()
	}
	switch {
	case slices.ContainsFunc(retryable, func(r CodeRange) bool { return r.First <= code && code <= r.Last }):
		return RestartCharged
	case code == RestartMe:
		return RestartFree
	}
	return Fail
}

// ShellCode is the code a shell reports for an exit: 128+n for signal n, which is -n here.
func ShellCode(code int) int {
	if code < 0 {
		return 128 - code
	}
	return code
}

// CodeRange is a range of exit codes, both ends included, as a shell reports them: 128+n for signal n.
type CodeRange struct{ First, Last int }

func (r CodeRange) validate() error {
	if r.First < 1 || r.Last > 255 || r.First > r.Last {
		return fmt.Errorf("exit codes %d-%d are not a range within 1 to 255", r.First, r.Last)
	}
	return nil
}

func defaultRetryable() []CodeRange {
	return []CodeRange{{130, 130}, {137, 137}, {143, 143}}
}

// ParseCodes reads a comma separated list of exit codes and ranges, such as "130,137,200-210".
func ParseCodes(s string) ([]CodeRange, error) {
	var out []CodeRange
	for item := range strings.SplitSeq(s, ",") {
		r, err := parseRange(strings.TrimSpace(item))
		if err != nil {
			return nil, fmt.Errorf("exit codes %q: %w: write them like 130,137,200-210", s, err)
		}
		out = append(out, r)
	}
	return out, nil
}

func parseRange(s string) (CodeRange, error) {
	if s == "" {
		return CodeRange{}, errors.New("an item is empty")
	}
	first, last, isRange := strings.Cut(s, "-")
	if !isRange {
		last = first
	}
	a, errA := strconv.Atoi(strings.TrimSpace(first))
	b, errB := strconv.Atoi(strings.TrimSpace(last))
	if errA != nil || errB != nil {
		return CodeRange{}, fmt.Errorf("%q is neither a number nor a range", s)
	}
	r := CodeRange{a, b}
	return r, r.validate()
}
