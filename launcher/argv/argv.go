// Package argv is the command line of dlrover-run: torchrun's, as Python's argparse reads it, plus DLRover's options
// and our own. Options is the table that everything else is generated from. Parse reads an argv and the PET_* variables
// into a Line, Completion writes shell completions, and the other Parse functions read option values.
//
// The package is pure: it must not import os, open a file, read a clock or start a goroutine. The environment is passed
// as a function.
//
// Known differences from torchrun, all of them where argparse is hard to defend:
//   - argparse looks for ambiguous prefixes in the whole line, so it refuses `train.py --rdzv` for an argument that
//     belongs to the script. Parse never looks behind the script, nor behind -h.
//   - `-mr=3` means `-m -r 3` and `-m=r3` is an error, as from Python 3.13 on; before, they meant `-r =3` and
//     `-m -r 3`.
//   - One word such as `"--nnodes 4"` in place of the script is refused with advice; argparse takes it for the script.
//   - The value of `--option=--` is "--"; argparse makes it an empty list before Python 3.13.
//   - The variable of a flag is not looked at when the flag is on the command line, or with -h.
//   - An integer must fit in 64 bits and be written in ASCII digits.
//   - Unknown options are reported before a missing script, and with a suggestion.
//   - An option that torchrun does not have never makes one of torchrun's abbreviations ambiguous. Spelt out it is
//     that option, though: --event-log is ours, where torchrun takes it for short for --event-log-handler.
package argv

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/internal/duration"
)

// Kind is the number of arguments that an option takes.
type Kind int

// The kinds of options.
const (
	Value    Kind = iota // exactly one argument
	Flag                 // none
	Pairs                // one or more of "A:B", separated by spaces or commas; stops at the first of another form
	Optional             // none, or one behind "="; Option.Bare is the value without one
)

// Type is the type that the parser converts a value to; the users of the value check everything else.
type Type int

// The types of values.
const (
	String Type = iota
	Int
	Duration // 60 or 0.5 are seconds, as torchrun has them; 90s, 2m and 1h30m as well. The canonical text is in seconds
)

// Option is one row of the command line's table.
type Option struct {
	Name    string   // canonical spelling, dashed; the same with underscores is accepted too
	Short   byte     // one-letter spelling, 0 if none
	Aliases []string // further long spellings, without dashes in front
	Kind    Kind
	Type    Type
	Choices []string // enforced on the command line only: torchrun does not check the default that a PET_ variable gives
	// Others are words of other systems, by which Choices are meant. Help and reference name them, completion does not.
	Others  []synonym
	Default string
	Bare    string // value of an Optional that is given without one
	Env     string // PET_ variable that gives the default, "" if there is none

	Meta     string // placeholder of the value in help; PATH and DIR are completed as files
	Usage    string
	Category string // section of the help text

	// Repeat: every value counts, not only the last one; see Line.Strings.
	Repeat bool
	// Extra marks an option that torchrun does not have. It never makes an abbreviation of torchrun's own ambiguous.
	Extra bool
	// Alone marks a flag with which no training script is needed.
	Alone bool
	// Check, when not nil, judges the final value, from the command line or the environment.
	Check func(value string) error
}

// synonym is another word for a value.
type synonym struct{ Word, Means string }

// LookupEnv returns the value of an environment variable and whether it is set. It has the signature of os.LookupEnv.
type LookupEnv func(string) (string, bool)

// UsageError is a command line that cannot be used; the exit status is 2. Msg is in argparse's words where it has any.
type UsageError struct{ Msg string }

func (e *UsageError) Error() string { return e.Msg }

// ErrHelp and ErrVersion are returned when -h or --version precedes any error on the command line.
var (
	ErrHelp    = errors.New("help requested")
	ErrVersion = errors.New("version requested")
)

// CompletionRequest is returned, as an error, for --print-completion: print Completion(Shell, opts) and exit 0.
type CompletionRequest struct{ Shell string }

func (e *CompletionRequest) Error() string { return "completion for " + e.Shell + " requested" }

// Parse reads argv, without the program's name, and the PET_ variables. Of an option that is repeated the last value
// counts (see Option.Repeat), and a variable counts where the command line has none. The script's arguments are passed
// as they are. As in torchrun, one "--" directly behind the script is dropped when there was none in front of it. The
// error is a *UsageError, *CompletionRequest, ErrHelp or ErrVersion.
func Parse(opts []Option, argv []string, env LookupEnv) (*Line, error) {
	p := parser{opts: opts, argv: argv}
	if err := p.options(); err != nil {
		return nil, err
	}
	if len(p.unknown) > 0 {
		return nil, unrecognized(opts, p.unknown)
	}
	if env != nil {
		if err := p.environment(env); err != nil {
			return nil, err
		}
	}
	for _, g := range p.given {
		if err := g.usable(); err != nil {
			return nil, err
		}
	}
	if len(p.argv) == 0 && !slices.ContainsFunc(p.given, func(s setting) bool { return s.opt.Alone }) {
		return nil, usageErrorf("the following arguments are required: training_script")
	}
	return &Line{opts: opts, given: p.given, args: p.argv}, nil
}

// parser consumes argv from the left; after the options follow the script and its arguments.
type parser struct {
	opts    []Option
	argv    []string
	given   []setting
	unknown []string
}

// setting is an option with the value it has got so far and, for messages, where that came from.
type setting struct {
	opt   *Option
	value string // canonical text, "" for a flag
	env   bool
}

func (s setting) usable() error {
	if s.opt.Check == nil {
		return nil
	}
	if err := s.opt.Check(s.value); err != nil {
		if s.env {
			return envError(s.opt, s.value, err)
		}
		return argumentError(s.opt, err)
	}
	return nil
}

// options consumes everything up to the script, and the "--" around it.
func (p *parser) options() error {
	for len(p.argv) > 0 {
		arg := p.argv[0]
		if arg == "--" {
			p.argv = p.argv[1:]
			return nil
		}
		w, err := p.classify(arg)
		if err != nil {
			return err
		}
		if w.kind == positional {
			return p.script()
		}
		p.argv = p.argv[1:]
		switch {
		case w.kind == unknown:
			p.unknown = append(p.unknown, arg)
		case w.cluster:
			err = p.takeCluster(arg)
		default:
			err = p.take(w.opt, w.value, w.hasValue)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *parser) script() error {
	name, _, spaced := strings.Cut(p.argv[0], " ")
	if spaced && strings.HasPrefix(name, "--") && len(longMatches(p.opts, name, false)) > 0 {
		return usageErrorf("argument %s is one word: give the option and its value as two arguments, or join them with '='",
			pyRepr(p.argv[0]))
	}
	if len(p.argv) > 1 && p.argv[1] == "--" {
		p.argv = slices.Concat(p.argv[:1], p.argv[2:])
	}
	return nil
}

// word is the class of one argument before the script: argparse's _parse_optional.
type word struct {
	kind     wordKind
	opt      *Option
	value    string // behind "="
	hasValue bool
	cluster  bool // "-mr3": one-letter options in one argument
}

type wordKind int

const (
	positional wordKind = iota
	option
	unknown
)

func (p *parser) classify(arg string) (word, error) {
	if len(arg) < 2 || arg[0] != '-' {
		return word{}, nil
	}
	name, value, hasValue := strings.Cut(arg, "=")
	if o := exactOption(p.opts, name); o != nil {
		return word{kind: option, opt: o, value: value, hasValue: hasValue}, nil
	}
	if strings.HasPrefix(arg, "--") {
		found := longMatches(p.opts, name, true)
		if len(found) > 1 {
			return word{}, ambiguous(arg, found)
		}
		if len(found) == 1 {
			return word{kind: option, opt: found[0].opt, value: value, hasValue: hasValue}, nil
		}
	} else if shortOption(p.opts, arg[1]) != nil {
		return word{kind: option, cluster: true}, nil
	}
	if isNegativeNumber(arg) || strings.Contains(arg, " ") {
		return word{}, nil
	}
	return word{kind: unknown}, nil
}

// takeCluster reads "-mr3": flags, then at most one option with its value attached or in the next argument.
func (p *parser) takeCluster(arg string) error {
	rest := arg[1:]
	var cluster []*Option
	for more := true; more && rest != ""; more = cluster[len(cluster)-1].Kind == Flag {
		o := shortOption(p.opts, rest[0])
		if o == nil {
			return argumentError(cluster[len(cluster)-1], fmt.Errorf("ignored explicit argument %s", pyRepr(rest)))
		}
		cluster, rest = append(cluster, o), rest[1:]
	}
	for _, o := range cluster {
		if err := p.take(o, strings.TrimPrefix(rest, "="), o.Kind != Flag && rest != ""); err != nil {
			return err
		}
	}
	return nil
}

// take stores one use of an option, consuming its arguments from p.argv when none is attached.
func (p *parser) take(o *Option, value string, attached bool) error {
	switch {
	case o.Kind == Flag && attached:
		return argumentError(o, fmt.Errorf("ignored explicit argument %s", pyRepr(value)))
	case o.Name == "help":
		return ErrHelp
	case o.Name == "version":
		return ErrVersion
	case o.Kind == Flag:
		p.set(o, "", false)
		return nil
	case o.Kind == Pairs:
		return p.takePairs(o, value, attached)
	case o.Kind == Optional && !attached:
		value, attached = o.Bare, true
	}
	if !attached {
		var err error
		if value, err = p.next(o); err != nil {
			return err
		}
	}
	value, err := convert(o, value)
	if err == nil {
		err = checkChoice(o, value)
	}
	if err != nil {
		return argumentError(o, err)
	}
	if o.Name == "print-completion" {
		return &CompletionRequest{Shell: value}
	}
	p.set(o, value, false)
	return nil
}

// next consumes the argument of an option. One that looks like an option is not a value, unless it is a negative number
// or has a space in it.
func (p *parser) next(o *Option) (string, error) {
	if len(p.argv) > 0 && p.argv[0] != "--" {
		w, err := p.classify(p.argv[0])
		if err != nil {
			return "", err
		}
		if w.kind == positional {
			value := p.argv[0]
			p.argv = p.argv[1:]
			return value, nil
		}
	}
	return "", argumentError(o, errors.New("expected one argument"))
}

func (p *parser) takePairs(o *Option, value string, attached bool) error {
	if !attached && len(p.argv) > 0 && p.argv[0] == Ring {
		value, attached, p.argv = Ring, true, p.argv[1:]
	}
	var pairs []string
	switch {
	case attached && value == Ring:
		pairs = []string{Ring}
	case attached:
		if pairs = splitPairs(value); pairs == nil {
			return argumentError(o, fmt.Errorf("invalid pair list: %s (want A:B[,A:B...], or ring)", pyRepr(value)))
		}
	}
	for !attached && len(p.argv) > 0 {
		more := splitPairs(p.argv[0])
		if more == nil {
			break
		}
		pairs, p.argv = append(pairs, more...), p.argv[1:]
	}
	if pairs == nil {
		return argumentError(o, errors.New("expected at least one argument"))
	}
	p.set(o, strings.Join(pairs, ","), false)
	return nil
}

// set records a value; of a repeated option the last one counts, pairs and those that may be repeated add up.
func (p *parser) set(o *Option, value string, env bool) {
	i := slices.IndexFunc(p.given, func(s setting) bool { return s.opt == o })
	switch {
	case i < 0:
		p.given = append(p.given, setting{opt: o, value: value, env: env})
	case o.Repeat:
		p.given[i].value += "\n" + value
	case o.Kind == Pairs:
		p.given[i].value += "," + value
	default:
		p.given[i].value = value
	}
}

// environment adds the defaults that PET_ variables give to the options not on the command line. A variable that is set
// to nothing is a value, as in torchrun.
func (p *parser) environment(env LookupEnv) error {
	onLine := len(p.given)
	for i := range p.opts {
		o := &p.opts[i]
		text, ok := "", false
		if o.Env != "" {
			text, ok = env(o.Env)
		}
		if !ok || slices.ContainsFunc(p.given[:onLine], func(s setting) bool { return s.opt == o }) {
			continue
		}
		if o.Kind == Flag {
			n, ok := pyInt(text)
			if !ok {
				return envError(o, text, errors.New("the variable of a flag must be an integer, 0 for off and any other for on"))
			}
			if n != "0" {
				p.set(o, "", true)
			}
			continue
		}
		value, err := convert(o, text)
		if err != nil {
			return envError(o, text, err)
		}
		p.set(o, value, true)
	}
	return nil
}

// convert returns the canonical text of a value of o's type.
func convert(o *Option, value string) (string, error) {
	switch o.Type {
	case Int:
		n, ok := pyInt(value)
		if _, err := strconv.ParseInt(n, 10, 64); !ok || err != nil {
			return "", fmt.Errorf("invalid int value: %s", pyRepr(value))
		}
		return n, nil
	case Duration:
		f, ok := pyFloat(value)
		if !ok {
			d, err := duration.Parse(value)
			if err != nil {
				return "", fmt.Errorf("invalid duration: %s (want 90s, 2m or 1h30m; a plain number is in seconds)", pyRepr(value))
			}
			f = d.Seconds()
		}
		return strconv.FormatFloat(f, 'g', -1, 64), nil
	}
	if i := slices.IndexFunc(o.Others, func(s synonym) bool { return s.Word == value }); i >= 0 {
		return o.Others[i].Means, nil
	}
	return value, nil
}

func checkChoice(o *Option, value string) error {
	if len(o.Choices) == 0 || slices.Contains(o.Choices, value) {
		return nil
	}
	repr := pyRepr
	if o.Type != String {
		repr = func(s string) string { return s }
	}
	choices := make([]string, len(o.Choices))
	for i, c := range o.Choices {
		choices[i] = repr(c)
	}
	return fmt.Errorf("invalid choice: %s (choose from %s)", repr(value), strings.Join(choices, ", "))
}

func usageErrorf(format string, args ...any) error {
	return &UsageError{Msg: fmt.Sprintf(format, args...)}
}

func argumentError(o *Option, err error) error {
	all := spellings(o)
	if o.Short != 0 {
		all = slices.Insert(all, 0, "-"+string(rune(o.Short)))
	}
	return usageErrorf("argument %s: %v", strings.Join(all, "/"), err)
}

func envError(o *Option, value string, err error) error {
	return usageErrorf("environment variable %s=%s, default of --%s: %v", o.Env, pyRepr(value), o.Name, err)
}
