// Package rule reads the workers' output: a Rule defines the lines that matter, and when they are bad. A Worker follows
// one worker's lines and returns findings, and a Stream makes lines of a worker's output.
//
// The package is pure: it must not read a clock, a file or the environment, and starts no goroutine. Times are
// durations since any fixed moment. Nothing here is safe for concurrent use.
package rule

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/duration"
)

// Action is the consequence of a finding.
type Action string

// The actions.
const (
	Report  Action = "report"  // it is reported
	Restart Action = "restart" // as the failure of the worker: the job restarts, and the restart is charged
	Stop    Action = "stop"    // as a failure that no restart can help
)

// Rule is one --log-rule. Without First, Every, Below, Above and NaN the line itself is the finding.
type Rule struct {
	Name    string
	Pattern *regexp.Regexp
	First   time.Duration // a line has to come within this of the workers' start; 0: it need not
	Every   time.Duration // after a line the next one has to come within this; 0: it need not
	Below   *float64      // a lower number is bad
	Above   *float64      // a higher number is bad
	NaN     bool          // NaN and infinities are bad
	Times   int           // so many bad lines one after the other make a finding; 1 or more
	Ranks   []rankRange   // ranks with lines that count; nil: all, and First is asked of rank 0
	Action  Action
	text    string
	literal []byte         // every line that matches has it; empty: unknown
	number  *regexp.Regexp // numberForm, where the number matters
}

// rankRange is the global ranks From to To.
type rankRange struct{ From, To int }

// String is the rule as it was written.
func (r *Rule) String() string { return r.text }

// numbers reports whether a line's number matters.
func (r *Rule) numbers() bool { return r.Below != nil || r.Above != nil || r.NaN }

// itself reports whether a line is bad by itself.
func (r *Rule) itself() bool { return !r.numbers() && r.First == 0 && r.Every == 0 }

// Covers reports whether lines of a rank count.
func (r *Rule) Covers(rank int) bool {
	return r.Ranks == nil || slices.ContainsFunc(r.Ranks, func(g rankRange) bool { return g.From <= rank && rank <= g.To })
}

// RankText is the ranks as they were written: 0-3,8 or all.
func (r *Rule) RankText() string {
	var parts []string
	for _, g := range r.Ranks {
		switch {
		case g.To == maxRank:
			return "all"
		case g.From == g.To:
			parts = append(parts, strconv.Itoa(g.From))
		default:
			parts = append(parts, fmt.Sprintf("%d-%d", g.From, g.To))
		}
	}
	return cmp.Or(strings.Join(parts, ","), "all")
}

// expects reports whether First is asked of a rank: most scripts print on rank 0 only, so it is rank 0 if no ranks are
// named.
func (r *Rule) expects(rank int) bool {
	return r.First > 0 && (r.Ranks != nil && r.Covers(rank) || r.Ranks == nil && rank == 0)
}

const form = "write NAME:REGEX[:every=300s][:first=900s][:below=N|above=N|nan][:times=N][:ranks=0-3,8]" +
	"[:action=report|restart|stop]"

// Bounds of a rule.
const (
	maxText  = 4 << 10
	maxName  = 64
	maxRules = 256
	maxTime  = 30 * 24 * time.Hour
	minTime  = time.Second
	maxTimes = 1_000_000
	maxRank  = 1 << 30
)

// Parse reads one rule. The options stand behind the last colons; a colon that belongs to the expression and could be
// taken for the beginning of an option is written \:.
func Parse(text string) (Rule, error) {
	r := Rule{Times: 1, Action: Report, text: text}
	name, rest, found := strings.Cut(text, ":")
	switch {
	case len(text) > maxText:
		return r, fmt.Errorf("%.100q... is longer than %d bytes", text, maxText)
	case !found:
		return r, fmt.Errorf("%q has no expression; %s", text, form)
	case !validName(name):
		return r, fmt.Errorf("the name %.100q needs 1 to %d letters, digits and ._-; %s", name, maxName, form)
	}
	r.Name = name
	pattern, err := r.options(rest)
	if err != nil {
		return r, fmt.Errorf("%s: %w", name, err)
	}
	if pattern == "" {
		return r, fmt.Errorf("%s: there is no expression; %s", name, form)
	}
	p, err := NewPattern(pattern)
	if err != nil {
		return r, fmt.Errorf("%s: %w", name, err)
	}
	r.Pattern, r.literal = p.expr, p.literal
	if r.numbers() {
		r.number = regexp.MustCompile(numberForm)
	}
	return r, r.sound()
}

func validName(s string) bool {
	return s != "" && len(s) <= maxName && !strings.ContainsFunc(s, func(c rune) bool {
		return !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("._-", c))
	})
}

// options takes the options off the end of text, and returns the expression before them.
func (r *Rule) options(text string) (pattern string, err error) {
	seen := map[string]bool{}
	for {
		i := lastColon(text)
		key, value, isOption := option(text[i+1:])
		if !isOption || i < 0 {
			return text, misplaced(text)
		}
		if seen[key] {
			return "", fmt.Errorf("%s is given twice; leave one out", key)
		}
		if err := r.set(key, value); err != nil {
			return "", err
		}
		seen[key], text = true, text[:i]
	}
}

// lastColon is where the last colon without a backslash before it is; -1: there is none.
func lastColon(text string) int {
	for i := len(text) - 1; i >= 0; i-- {
		if text[i] != ':' {
			continue
		}
		slashes := 0
		for i-1-slashes >= 0 && text[i-1-slashes] == '\\' {
			slashes++
		}
		if slashes%2 == 0 {
			return i
		}
	}
	return -1
}

// option takes an option apart. Text that does not look like one belongs to the expression.
func option(s string) (key, value string, ok bool) {
	if s == "nan" {
		return s, "", true
	}
	key, value, found := strings.Cut(s, "=")
	letters := strings.Trim(key, lower) == ""
	if !found || key == "" || !letters || strings.Trim(value, lower+"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,+-") != "" {
		return "", "", false
	}
	return key, value, true
}

const lower = "abcdefghijklmnopqrstuvwxyz"

// misplaced refuses an expression with an option in it.
func misplaced(pattern string) error {
	for part := range strings.SplitSeq(pattern, ":") {
		switch key, _, _ := option(part); key {
		case "every", "first", "below", "above", "times", "ranks", "action":
			return fmt.Errorf("%s stands before the end of the expression %q: write options last, and \\: for a colon of the "+
				"expression", part, pattern)
		}
	}
	return nil
}

func (r *Rule) set(key, value string) (err error) {
	switch key {
	case "every":
		r.Every, err = interval(value)
	case "first":
		r.First, err = interval(value)
	case "below":
		r.Below, err = number(value)
	case "above":
		r.Above, err = number(value)
	case "nan":
		r.NaN = true
	case "times":
		if r.Times, err = strconv.Atoi(value); err != nil || r.Times < 1 || r.Times > maxTimes {
			err = fmt.Errorf("need a number of lines from 1 to %d", maxTimes)
		}
	case "ranks":
		r.Ranks, err = ranges(value)
	case "action":
		if r.Action = Action(value); !slices.Contains([]Action{Report, Restart, Stop}, r.Action) {
			err = fmt.Errorf("need %s, %s or %s", Report, Restart, Stop)
		}
	default:
		return fmt.Errorf("there is no option %s; if %s=%s is part of the expression, write \\:%s=%s; %s",
			key, key, value, key, value, form)
	}
	if err != nil {
		return fmt.Errorf("%s=%s: %w", key, value, err)
	}
	return nil
}

// interval reads 300s, 5m or 1h30m, and seconds without a unit.
func interval(text string) (time.Duration, error) {
	return duration.Within(text, minTime, maxTime)
}

func number(text string) (*float64, error) {
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || !finite(f) {
		return nil, fmt.Errorf("need a number such as 0.5, 100 or 1e-3")
	}
	return &f, nil
}

// ranges reads 0-3,8, or all for every rank.
func ranges(text string) ([]rankRange, error) {
	if text == "all" {
		return []rankRange{{0, maxRank}}, nil
	}
	var list []rankRange
	for part := range strings.SplitSeq(text, ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		a, errA := strconv.ParseUint(from, 10, 30)
		b, errB := strconv.ParseUint(to, 10, 30)
		if errA != nil || errB != nil || b < a {
			return nil, fmt.Errorf("need ranks of the job such as 0, 0-3,8 or all")
		}
		list = append(list, rankRange{int(a), int(b)})
	}
	return list, nil
}

// sound refuses options that could not act.
func (r *Rule) sound() error {
	switch {
	case r.itself() && r.Pattern.MatchString(""):
		return fmt.Errorf("%s: the expression %q matches every line, and each would be a finding: name a word of the lines "+
			"that are meant", r.Name, r.Pattern)
	case r.Below != nil && r.Above != nil && *r.Below > *r.Above:
		return fmt.Errorf("%s: below=%v and above=%v leave no good number: give below the lower one",
			r.Name, *r.Below, *r.Above)
	case r.Times > 1 && !r.numbers() && !r.itself():
		return fmt.Errorf("%s: times counts lines that are bad, and with every or first alone none is: leave it out", r.Name)
	case r.Pattern.NumSubexp() > 1:
		return fmt.Errorf("%s: the expression has %d groups, and the first would be the number: write (?:...) for the others",
			r.Name, r.Pattern.NumSubexp())
	}
	return nil
}

// ParseFile reads rules, one a line. Empty lines and comments (#) do not count. The error names the line.
func ParseFile(text string) ([]Rule, error) {
	var rules []Rule
	n := 0
	for line := range strings.Lines(text) {
		n++
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		r, err := Parse(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		rules = append(rules, r)
	}
	return rules, nil
}

// Check refuses rules that cannot be used together.
func Check(rules []Rule) error {
	if len(rules) > maxRules {
		return fmt.Errorf("%d rules; at most %d can be followed", len(rules), maxRules)
	}
	names := map[string]bool{}
	for i := range rules {
		if names[rules[i].Name] {
			return fmt.Errorf("two rules are called %s; give each a name of its own", rules[i].Name)
		}
		names[rules[i].Name] = true
	}
	return nil
}
