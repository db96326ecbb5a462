package argv

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Line is a command line that has been read. Its methods panic at the name of an option that is not in the table.
type Line struct {
	opts  []Option
	given []setting // in the order of first use, then the options set only by variables
	args  []string
}

// Args returns the training script and its arguments.
func (l *Line) Args() []string { return l.args }

// IsSet reports whether the command line or a variable gives the option.
func (l *Line) IsSet(name string) bool {
	_, set := l.find(name)
	return set
}

// Bool reports whether a flag is given.
func (l *Line) Bool(name string) bool { return l.IsSet(name) }

// String is the value of an option, its default if none is given.
func (l *Line) String(name string) string {
	value, _ := l.find(name)
	return value
}

// Strings are the values of an option that may be repeated. A variable gives them as lines.
func (l *Line) Strings(name string) []string {
	text := l.String(name)
	if text == "" {
		return nil
	}
	return slices.DeleteFunc(strings.Split(text, "\n"), func(s string) bool { return s == "" })
}

// Int is the value of an option of type Int; 0 where there is neither a value nor a default.
func (l *Line) Int(name string) int {
	n, _ := strconv.Atoi(l.String(name)) // convert has seen to it
	return n
}

// Duration is the value of an option of type Duration; 0 where there is neither a value nor a default. A value that
// does not fit becomes the longest duration, and NaN the most negative one, so that no check of a range lets it pass.
func (l *Line) Duration(name string) time.Duration {
	seconds, _ := strconv.ParseFloat(l.String(name), 64) // convert has seen to it
	switch ns := math.Round(seconds * float64(time.Second)); {
	case ns >= math.MaxInt64:
		return math.MaxInt64
	case ns > math.MinInt64:
		return time.Duration(ns)
	}
	return math.MinInt64
}

func (l *Line) find(name string) (value string, set bool) {
	for _, g := range l.given {
		if g.opt.Name == name {
			return g.value, true
		}
	}
	i := slices.IndexFunc(l.opts, func(o Option) bool { return o.Name == name })
	if i < 0 {
		panic(fmt.Sprintf("argv: no option %q", name))
	}
	return l.opts[i].Default, false
}
