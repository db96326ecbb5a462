package help

import (
	"fmt"
	"strconv"
	"strings"
)

// Misuse explains an option that program does not accept, and names the help to read. err is the flag package's.
func Misuse(program string, err error) error {
	return fmt.Errorf("%s; see %s --help", plain(err.Error()), program)
}

// plain is an error of the flag package in the words that people use.
func plain(text string) string {
	if name, ok := strings.CutPrefix(text, "flag provided but not defined: -"); ok {
		return "unknown option " + dashed(name)
	}
	if name, ok := strings.CutPrefix(text, "flag needs an argument: -"); ok {
		return "option " + dashed(name) + " needs a value"
	}
	if rest, ok := strings.CutPrefix(text, "invalid boolean value "); ok {
		return wrong(text, rest, " for -", "takes true, false or no value")
	}
	if rest, ok := strings.CutPrefix(text, "invalid value "); ok {
		return wrong(text, rest, " for flag -", "need a whole number")
	}
	return text
}

// wrong explains a wrong value, which stands quoted at the head of rest: by the values that its option takes, if the
// option names them, else by the rule.
func wrong(text, rest, before, rule string) string {
	quoted, err := strconv.QuotedPrefix(rest)
	if err != nil {
		return text
	}
	value, _ := strconv.Unquote(quoted) // QuotedPrefix has checked it
	name, own, _ := strings.Cut(strings.TrimPrefix(rest[len(quoted):], before), ": ")
	if own != "parse error" {
		rule = own
	}
	return dashed(name) + "=" + value + ": " + rule
}

// dashed is how people write an option.
func dashed(name string) string {
	return strings.Repeat("-", min(len(name), 2)) + name
}
