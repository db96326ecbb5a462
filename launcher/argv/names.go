package argv

import (
	"slices"
	"strings"
)

// match is a long spelling that an argument may stand for.
type match struct {
	spelling string
	opt      *Option
}

// spellings returns the long spellings of o with their dashes, in the order argparse prints them.
func spellings(o *Option) []string {
	all := make([]string, 0, 2+len(o.Aliases))
	for _, name := range append([]string{o.Name, strings.ReplaceAll(o.Name, "-", "_")}, o.Aliases...) {
		if name = "--" + name; !slices.Contains(all, name) {
			all = append(all, name)
		}
	}
	return all
}

func exactOption(opts []Option, name string) *Option {
	if len(name) == 2 && name != "--" {
		return shortOption(opts, name[1])
	}
	if found := longMatches(opts, name, false); len(found) > 0 {
		return found[0].opt
	}
	return nil
}

func shortOption(opts []Option, c byte) *Option {
	for i := range opts {
		if c != 0 && opts[i].Short == c {
			return &opts[i]
		}
	}
	return nil
}

// longMatches returns the long spellings that are name or, with abbrev, begin with it. torchrun's own go first:
// additions count only where torchrun would find nothing.
func longMatches(opts []Option, name string, abbrev bool) []match {
	var own, extra []match
	for i := range opts {
		for _, s := range spellings(&opts[i]) {
			switch {
			case s != name && !(abbrev && strings.HasPrefix(s, name)):
			case opts[i].Extra:
				extra = append(extra, match{s, &opts[i]})
			default:
				own = append(own, match{s, &opts[i]})
			}
		}
	}
	if len(own) > 0 {
		return own
	}
	return extra
}

func ambiguous(arg string, found []match) error {
	names := make([]string, len(found))
	for i, m := range found {
		names[i] = m.spelling
	}
	return usageErrorf("ambiguous option: %s could match %s", arg, strings.Join(names, ", "))
}

// unrecognized names the unknown options and, for each, the nearest known option.
func unrecognized(opts []Option, args []string) error {
	msg := "unrecognized arguments: " + strings.Join(args, " ")
	var near []string
	for _, arg := range args {
		name, _, _ := strings.Cut(strings.ReplaceAll(strings.TrimLeft(arg, "-"), "_", "-"), "=")
		if name == "use-env" {
			msg += " (--use-env belongs to torch.distributed.launch; remove it, workers always find their " +
				"ranks in the environment)"
		} else if s := nearest(opts, name); s != "" && !slices.Contains(near, s) {
			near = append(near, s)
		}
	}
	if len(near) > 0 {
		msg += " (did you mean " + strings.Join(near, ", ") + "?)"
	}
	return &UsageError{Msg: msg}
}

// nearest returns the option whose name is closest to name, "" when none is within a third of its letters.
func nearest(opts []Option, name string) string {
	best, limit := "", 1+len(name)/3
	for i := range opts {
		for _, s := range append([]string{opts[i].Name}, opts[i].Aliases...) {
			if d := editDistance(name, s); d < limit {
				best, limit = "--"+s, d
			}
		}
	}
	return best
}

// editDistance is Levenshtein's, over bytes.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
