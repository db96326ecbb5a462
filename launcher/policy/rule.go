package policy

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/duration"
	logrule "dlrover-run/launcher/logs/rule"
)

// Rule is the answer to one kind of failure. All of its conditions must hold; one without any holds always.
type Rule struct {
	Exit      []CodeRange      // the exit code, 128+n for signal n; nil: any
	Signal    []int            // the signal that ended the worker itself
	Exception []string         // Python's class, or the end of its name behind a dot
	Pattern   *logrule.Pattern // a line of the error or of the end of the output
	Event     []event          // one of these has happened
	Action    Action
	Max       int           // how often it decides within Per, on one node; 0: always
	Per       time.Duration // a window that slides; 0 without Max
	Reason    string        // for people
	From      string        // where it was written: "--rule", "site.yaml:12", "nvrx"
}

// event is a known fact about a worker's end apart from its exit code and output.
type event string

// The events.
const (
	eventOOM  event = "oom"  // the kernel killed it, or a process of its cgroup, for lack of memory
	eventHang event = "hang" // a collective timed out, or a timer of torch's expired
)

func events() []event { return []event{eventOOM, eventHang} }

const form = "write CONDITION [and CONDITION]... -> ACTION [max N per DURATION] [because TEXT]"

const conditionForm = "a condition is exit 1,3-5, signal SIGKILL, exception NAME, pattern /REGEX/, event oom|hang, " +
	"or any"

// Bounds of rules.
const (
	maxRules  = 256
	maxRule   = 4 << 10 // bytes
	maxReason = 256     // bytes
	maxMax    = 1000
	minPer    = time.Second
	maxPer    = 30 * 24 * time.Hour
)

// ParseRule reads a rule of one line:
//
//	exit 1,3-5 and pattern /NCCL WARN/ -> retry-elsewhere max 2 per 1h because the fabric is being repaired
func ParseRule(text string) (Rule, error) {
	if err := sound(text, maxRule); err != nil {
		return Rule{}, fmt.Errorf("%.100q: %w", text, err)
	}
	r, err := parseRule(text)
	if err != nil {
		return Rule{}, fmt.Errorf("%q: %w", text, err)
	}
	return r, nil
}

func parseRule(text string) (r Rule, err error) {
	rest, err := r.conditions(text)
	if err != nil {
		return r, err
	}
	action, rest := word(rest)
	if err := r.setAction(action); err != nil {
		return r, err
	}
	next, rest := word(rest)
	if next == "max" {
		limit, after, found := strings.Cut(rest, " because ")
		if err := r.setMax(limit); err != nil {
			return r, err
		}
		if next = ""; found {
			next, rest = "because", after
		}
	}
	switch next {
	case "":
	case "because":
		if err := r.setReason(strings.TrimSpace(rest)); err != nil {
			return r, err
		}
	default:
		return r, fmt.Errorf("%q stands where max or because could; %s", next, form)
	}
	return r, nil
}

// conditions reads up to the arrow, and returns the rest behind it.
func (r *Rule) conditions(text string) (rest string, err error) {
	seen := map[string]bool{}
	for {
		var key, value string
		if key, rest = word(text); key == "any" {
			if len(seen) > 0 {
				return "", errors.New("any stands alone: leave it or the other conditions out")
			}
		} else {
			if value, rest, err = r.value(key, rest); err != nil {
				return "", err
			}
			if err := r.condition(key, value, seen); err != nil {
				return "", err
			}
		}
		switch next, after := word(rest); {
		case next == "->":
			return after, nil
		case next != "and":
			return "", fmt.Errorf("there is no -> behind the conditions; %s; %s", form, conditionForm)
		case key == "any":
			return "", errors.New("any stands alone: leave it or the other conditions out")
		default:
			text = after
		}
	}
}

// value is the text behind the name of a condition: a word, or an expression between slashes.
func (r *Rule) value(key, text string) (value, rest string, err error) {
	if key != "pattern" {
		value, rest = word(text)
		return value, rest, nil
	}
	text = strings.TrimLeft(text, " ")
	if !strings.HasPrefix(text, "/") {
		return "", "", errors.New(`pattern needs an expression between slashes, as in /CUDA error/; \/ is a slash in it`)
	}
	var b strings.Builder
	for i := 1; i < len(text); i++ {
		switch {
		case text[i] == '/':
			return b.String(), text[i+1:], nil
		case text[i] == '\\' && i+1 < len(text):
			if i++; text[i] != '/' {
				b.WriteByte('\\')
			}
		}
		b.WriteByte(text[i])
	}
	return "", "", fmt.Errorf(`the expression %q does not end: write a slash behind it, and \/ for one in it`, text)
}

// word is the first word of text, and the rest behind it.
func word(text string) (first, rest string) {
	text = strings.TrimLeft(text, " ")
	first, rest, _ = strings.Cut(text, " ")
	return first, rest
}

// condition sets one condition, which may be set once.
func (r *Rule) condition(key, value string, seen map[string]bool) (err error) {
	switch {
	case seen[key]:
		return fmt.Errorf("%s is given twice: leave one out, or write a rule of its own", key)
	case value == "" && slices.Contains([]string{"exit", "signal", "exception", "pattern", "event"}, key):
		return fmt.Errorf("%s has no value; %s", key, conditionForm)
	}
	seen[key] = true
	switch key {
	case "exit":
		r.Exit, err = ParseCodes(value)
	case "signal":
		r.Signal, err = each(value, parseSignal)
	case "exception":
		r.Exception, err = each(value, parseException)
	case "pattern":
		r.Pattern, err = parsePattern(value)
	case "event":
		r.Event, err = each(value, parseEvent)
	default:
		return fmt.Errorf("there is no condition %q; %s", key, conditionForm)
	}
	return err
}

// each reads a list separated by commas.
func each[T any](list string, parse func(string) (T, error)) (out []T, err error) {
	for item := range strings.SplitSeq(list, ",") {
		one, err := parse(strings.TrimSpace(item))
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}

const maxSignal = 64

func parseSignal(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil {
		name := strings.ToUpper(s)
		n = int(max(unix.SignalNum(name), unix.SignalNum("SIG"+name)))
	}
	if n < 1 || n > maxSignal {
		return 0, fmt.Errorf("signal %q is unknown: write a name such as SIGKILL, or a number from 1 to %d", s, maxSignal)
	}
	return n, nil
}

func signalName(n int) string {
	if name := unix.SignalName(syscall.Signal(n)); name != "" {
		return name
	}
	return strconv.Itoa(n)
}

func parseException(s string) (string, error) {
	for part := range strings.SplitSeq(s, ".") {
		wrong := func(r rune) bool { return r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r) }
		if part == "" || strings.ContainsFunc(part, wrong) || unicode.IsDigit([]rune(part)[0]) {
			return "", fmt.Errorf("exception %q is not the name of a Python class: write one such as ValueError or "+
				"torch.cuda.OutOfMemoryError; for a text use pattern", s)
		}
	}
	return s, nil
}

func parsePattern(expr string) (*logrule.Pattern, error) {
	p, err := logrule.NewPattern(expr)
	if err != nil {
		return nil, fmt.Errorf("pattern /%s/: %w", expr, err)
	}
	if p.Find([]byte("\n")) != nil {
		return nil, fmt.Errorf("pattern /%s/ matches every line: name a word of the lines that are meant, or write any", expr)
	}
	return &p, nil
}

func parseEvent(s string) (event, error) {
	if !slices.Contains(events(), event(s)) {
		return "", fmt.Errorf("there is no event %q: use %s or %s", s, eventOOM, eventHang)
	}
	return event(s), nil
}

func (r *Rule) setAction(text string) (err error) {
	r.Action, err = parseAction(text)
	return err
}

// setMax reads "2 per 1h".
func (r *Rule) setMax(text string) error {
	number, window, _ := strings.Cut(text, " per ")
	n, errN := strconv.Atoi(strings.TrimSpace(number))
	per, errPer := duration.Within(window, minPer, maxPer)
	if errN != nil || errPer != nil || n < 1 || n > maxMax {
		return fmt.Errorf("max %q: need a number from 1 to %d and a duration from 1s to 720h, such as max 2 per 1h",
			text, maxMax)
	}
	r.Max, r.Per = n, per
	return nil
}

func (r *Rule) setReason(text string) error {
	if text == "" {
		return errors.New("there is no reason behind because: write one, or leave because out")
	}
	if err := sound(text, maxReason); err != nil {
		return fmt.Errorf("reason %.100q: %w", text, err)
	}
	r.Reason = text
	return nil
}

// sound refuses text that is too long, or that acts on a terminal.
func sound(text string, limit int) error {
	switch {
	case len(text) > limit:
		return fmt.Errorf("longer than %d bytes", limit)
	case strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) || r == unicode.ReplacementChar }):
		return errors.New("need UTF-8 without control characters")
	}
	return nil
}

// String is the rule as ParseRule reads it.
func (r Rule) String() string {
	s := r.when() + " -> " + r.Action.Word()
	if r.Max > 0 {
		s += " max " + strconv.Itoa(r.Max) + " per " + duration.Text(r.Per)
	}
	if r.Reason != "" {
		s += " because " + r.Reason
	}
	return s
}

// when are the conditions.
func (r Rule) when() string {
	var all []string
	add := func(key string, values []string) {
		if len(values) > 0 {
			all = append(all, key+" "+strings.Join(values, ","))
		}
	}
	add("exit", texts(r.Exit, CodeRange.String))
	add("signal", texts(r.Signal, signalName))
	add("exception", r.Exception)
	if r.Pattern != nil {
		all = append(all, "pattern /"+escapeSlashes(r.Pattern.String())+"/")
	}
	add("event", texts(r.Event, func(e event) string { return string(e) }))
	if len(all) == 0 {
		return "any"
	}
	return strings.Join(all, " and ")
}

// escapeSlashes reverts value.
func escapeSlashes(expr string) string {
	var b strings.Builder
	for i := 0; i < len(expr); i++ {
		switch {
		case expr[i] == '/':
			b.WriteByte('\\')
		case expr[i] == '\\' && i+1 < len(expr):
			b.WriteByte('\\')
			i++
		}
		b.WriteByte(expr[i])
	}
	return b.String()
}

func texts[T any](list []T, text func(T) string) (out []string) {
	for _, v := range list {
		out = append(out, text(v))
	}
	return out
}

// always reports whether r holds for every failure, without a limit.
func (r Rule) always() bool { return r.Max == 0 && r.when() == "any" }

// tells reports whether r asks for more than a status: a worker that failed as a consequence of another one may have
// the same status.
func (r Rule) tells() bool { return r.Exception != nil || r.Pattern != nil || r.Event != nil }

// matches reports whether all conditions of r hold.
func (r Rule) matches(e Exit) bool {
	code := shellCode(e.Code)
	return (r.Exit == nil || slices.ContainsFunc(r.Exit, func(c CodeRange) bool { return c.has(code) })) &&
		(r.Signal == nil || slices.Contains(r.Signal, -e.Code)) &&
		(r.Exception == nil || slices.ContainsFunc(r.Exception, e.raised)) &&
		(r.Event == nil || slices.ContainsFunc(r.Event, e.happened)) &&
		(r.Pattern == nil || r.Pattern.Find([]byte(e.Text)) != nil)
}

// raised reports whether name is one of the exception's classes, or the end of its name.
func (e Exit) raised(name string) bool {
	return slices.ContainsFunc(e.Exceptions, func(class string) bool {
		former, renamed := formerNames()[class]
		return endsIn(class, name) || renamed && endsIn(former, name)
	})
}

func endsIn(class, name string) bool { return class == name || strings.HasSuffix(class, "."+name) }

// formerNames are names by which Python still knows a class, although its tracebacks have another one.
func formerNames() map[string]string {
	return map[string]string{"torch.OutOfMemoryError": "torch.cuda.OutOfMemoryError"} // from PyTorch 2.5 on
}

func (e Exit) happened(ev event) bool {
	return ev == eventOOM && e.OOM || ev == eventHang && e.Hung
}

// Check refuses rules that cannot be used together: the ones of one place, in their order.
func Check(rules []Rule) error {
	if len(rules) > maxRules {
		return fmt.Errorf("%d rules; at most %d can be given", len(rules), maxRules)
	}
	for i, r := range rules {
		for _, before := range rules[:i] {
			if before.Max == 0 && (before.always() || before.when() == r.when()) {
				return fmt.Errorf("%s: the rule %q never decides anything, because %q stands before it (%s): "+
					"leave one out, or change their order", r.From, r, before, before.From)
			}
		}
	}
	return nil
}
