// Package policy decides the answer to the end of a worker (Config.Decide, Decider) and the status with which the
// launcher itself ends (Reason.Code).
//
// The first Rule that matches decides, and without one the Restart. How many restarts the job has left is counted by
// the rendezvous, because every node must agree on it.
//
// The package is pure: it must not read a clock, a file or the environment, and starts no goroutine.
package policy

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Restart is the rule by which a worker's end is judged.
type Restart string

// The restart rules. Kubernetes training operators use these names.
const (
	// OnFailure restarts after every failure. It is the default, as in torchrun.
	OnFailure Restart = "OnFailure"
	// Never restarts nothing.
	Never Restart = "Never"
	// Always restarts for every exit code until the restarts are used up. A worker that exits with 0 is done for this
	// time; the rendezvous restarts the job when all are.
	Always Restart = "Always"
	// ExitCode restarts after retryable exit codes and after restartMe. Every other failure is permanent.
	ExitCode Restart = "ExitCode"
)

// restartMe is the exit code by which a worker asks, under ExitCode, for a restart that is not charged to
// --max-restarts. A shell also reports it for SIGUSR1, so that signal asks for the same. The backoff limit bounds these
// restarts; to have them charged, list 138 as retryable.
const restartMe = 138

// Config is a job's restart policy.
type Config struct {
	// Restart is the rule; "" is OnFailure.
	Restart Restart
	// MaxRestarts is the number of charged restarts that the whole job may use.
	MaxRestarts int
	// Retryable replaces the exit codes that ExitCode restarts after. The default is 130, 137 and 143: the shell's codes
	// of SIGINT, SIGKILL and SIGTERM, which an eviction, a preemption or the OOM killer leave behind.
	Retryable []CodeRange
	// Rules come before Restart; the first that matches decides. They do not change the answer to a success.
	Rules []Rule
	// Alone: there is no node to go elsewhere to, so RestartElsewhere is RestartCharged.
	Alone bool
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
	return c.validateRules()
}

// validateRules refuses settings that the rules leave without effect.
func (c Config) validateRules() error {
	last := len(c.Rules) - 1
	i := slices.IndexFunc(c.Rules, Rule.always)
	switch {
	case i < 0:
		return nil
	case i < last:
		r, never := c.Rules[i], c.Rules[last]
		return fmt.Errorf("the rule %q (%s) decides before %q (%s) can: leave one out", r, r.From, never, never.From)
	case c.Restart == Never || c.Restart == ExitCode:
		return fmt.Errorf("restart policy %s has no effect, because the rule %q (%s) decides the rest: leave one out",
			c.Restart, c.Rules[i], c.Rules[i].From)
	}
	return nil
}

// CheckSize refuses rules that a job of fewest to most nodes cannot follow.
func (c Config) CheckSize(fewest, most int) error {
	for _, r := range c.Rules {
		if r.Action == Shrink && fewest == most {
			return fmt.Errorf("%s: the rule %q shrinks a job that needs all of its %d nodes: use --nnodes=MIN:MAX, "+
				"or another action", r.From, r, most)
		}
	}
	return nil
}

// NeedsText reports whether Exit.Text counts.
func (c Config) NeedsText() bool {
	return slices.ContainsFunc(c.Rules, func(r Rule) bool { return r.Pattern != nil })
}

// Exit is one worker's end.
type Exit struct {
	Code       int      // the exit code; -n when signal n ended the worker
	Exceptions []string // the classes of the Python exception, with their modules where those are known
	Text       string   // the error and the end of the output; needed by patterns only, see Config.NeedsText
	OOM        bool     // the kernel killed it, or a process of its cgroup, for lack of memory
	Hung       bool     // a collective timed out, or a timer expired
	// Follows: its error means that another process is gone, stuck or stopped, which is not for this node to judge.
	Follows bool
}

// Action is the answer to a worker's end.
type Action int

// The actions, in the order of how much they change.
const (
	Succeed          Action = iota // the worker is done
	RestartFree                    // restart; not charged to --max-restarts
	RestartCharged                 // restart while the job has restarts left; then it fails
	RestartElsewhere               // as RestartCharged, with another node in the place of this one
	Shrink                         // as RestartCharged, without this node
	Hold                           // end the workers and keep the node, until an operator goes on
	Fail                           // end the job, even with restarts left
)

// names are the action's names in logs and in rules.
func (a Action) names() (log, rule string) {
	switch a {
	case Succeed:
		return "succeed", ""
	case RestartFree:
		return "restart, not charged", "retry-free"
	case RestartCharged:
		return "restart", "retry"
	case RestartElsewhere:
		return "restart elsewhere", "retry-elsewhere"
	case Shrink:
		return "shrink", "shrink"
	case Hold:
		return "hold", "hold"
	case Fail:
		return "fail", "stop-job"
	}
	return "action " + strconv.Itoa(int(a)), ""
}

// String names the action for logs.
func (a Action) String() string {
	log, _ := a.names()
	return log
}

// Word names the action as rules do; "" for Succeed, to which no rule leads.
func (a Action) Word() string {
	_, rule := a.names()
	return rule
}

// parseAction reads a Word.
func parseAction(word string) (Action, error) {
	for a := RestartFree; a <= Fail; a++ {
		if a.Word() == word {
			return a, nil
		}
	}
	return 0, fmt.Errorf("there is no action %q: use retry, retry-free, retry-elsewhere, shrink, hold or stop-job", word)
}

// Table lists the rules that decide about failures, in order: the ones of Restart are last.
func (c Config) Table() []Rule {
	rule := func(a Action, codes ...CodeRange) Rule {
		return Rule{Exit: codes, Action: a, From: "--restart-policy=" + string(cmp.Or(c.Restart, OnFailure))}
	}
	rules := slices.Clip(c.Rules)
	switch {
	case slices.ContainsFunc(rules, Rule.always):
		return rules
	case c.Restart == Never:
		return append(rules, rule(Fail))
	case c.Restart == ExitCode:
		retryable := c.Retryable
		if len(retryable) == 0 {
			retryable = defaultRetryable()
		}
		return append(rules, rule(RestartCharged, retryable...), rule(RestartFree, CodeRange{restartMe, restartMe}),
			rule(Fail))
	}
	return append(rules, rule(RestartCharged))
}

// shellCode is the code a shell reports for an exit: 128+n for signal n, which is -n here.
func shellCode(code int) int {
	if code < 0 {
		return 128 - code
	}
	return code
}

// CodeRange is a range of exit codes, both ends included, as a shell reports them: 128+n for signal n.
type CodeRange struct{ First, Last int }

func (r CodeRange) has(code int) bool { return r.First <= code && code <= r.Last }

// String is the range as ParseCodes reads it.
func (r CodeRange) String() string {
	if r.First == r.Last {
		return strconv.Itoa(r.First)
	}
	return strconv.Itoa(r.First) + "-" + strconv.Itoa(r.Last)
}

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
