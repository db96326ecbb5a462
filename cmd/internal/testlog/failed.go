package main

import (
	"cmp"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"dlrover-run/internal/text"
)

const (
	shownWhy    = 40  // lines of one test
	shownBefore = 3   // lines of the log before a failed assertion
	shownTrace  = 12  // lines after that of a panic, and of the end of other output
	shownWidth  = 400 // bytes of a line
)

// failed repeats, for readers who see only the end of a log, which tests failed and why.
func failed(out io.Writer, rs []*result) {
	rs = slices.DeleteFunc(slices.Clone(rs), func(r *result) bool { return r.good() })
	var blocks []string
	for _, r := range rs {
		lines := r.why()
		if len(lines) == 0 && r.explained(rs) {
			continue
		}
		if len(lines) == 0 {
			lines = r.end()
		}
		blocks = append(blocks, strings.Join(append([]string{r.title()}, bound(lines)...), "\n"))
	}
	if len(blocks) > 0 {
		fmt.Fprintf(out, "\n%d FAILED:\n%s\n", len(blocks), strings.Join(blocks, "\n"))
	}
}

func (r *result) good() bool { return r.action == "pass" || r.action == "skip" }

func (r *result) title() string {
	name := strings.TrimSuffix("  "+r.pkg+" "+r.test, " ")
	if r.action == "" {
		return name + ": it has not ended"
	}
	return fmt.Sprintf("%s (%.1fs)", name, r.seconds)
}

// explained reports whether another of the bad results says more than r, which says nothing: that of a subtest, or for
// a package that of a test or of the build.
func (r *result) explained(bad []*result) bool {
	return slices.ContainsFunc(bad, func(o *result) bool {
		switch {
		case r.test != "":
			return o.pkg == r.pkg && strings.HasPrefix(o.test, r.test+"/")
		case r.action == "build-fail":
			return false
		}
		return o.pkg == r.pkg && o.test != "" || o.action == "build-fail"
	})
}

// why are the lines that tell errors; without any the end of the test's log, which does not tell them from others.
func (r *result) why() []string {
	lines := strings.Split(r.output.String(), "\n")
	if found := assertions(lines); found != nil {
		return found
	}
	isLog := logLines()
	logged := slices.DeleteFunc(lines, func(l string) bool { return !isLog(l) })
	return logged[max(0, len(logged)-shownWhy):]
}

// end is the end of whatever was printed.
func (r *result) end() []string {
	if r.output.Len() == 0 {
		return nil
	}
	lines := strings.Split(strings.TrimRight(r.output.String(), "\n"), "\n")
	lines = slices.DeleteFunc(lines, func(l string) bool { return strings.HasPrefix(l, "=== ") })
	return lines[max(0, len(lines)-shownTrace):]
}

func logLines() func(line string) bool {
	return regexp.MustCompile(`^\s+[\w.]+\.go:\d+: `).MatchString
}

// assertions picks from the output of a test the failed assertions of testify, with what was logged right before each,
// and the beginnings of panics and of reports of the race detector.
func assertions(lines []string) (picked []string) {
	isLog := logLines()
	for i := 0; i < len(lines); i++ {
		from, to := i, i+1
		switch line := strings.TrimSpace(lines[i]); {
		case strings.HasPrefix(line, "Error Trace:"):
			for to < len(lines) && asserted(lines[to]) {
				to++
			}
			for from > 0 && i-from <= shownBefore && isLog(lines[from-1]) {
				from--
			}
		case strings.HasPrefix(line, "panic: "), strings.HasPrefix(line, "fatal error: "), line == "WARNING: DATA RACE":
			to = min(i+1+shownTrace, len(lines))
		default:
			continue
		}
		picked = append(picked, lines[from:to]...)
		i = to - 1
	}
	return picked
}

// asserted reports whether a line goes on with what testify says of a failed assertion.
func asserted(line string) bool {
	rest := strings.TrimLeft(line, " ")
	return len(line)-len(rest) >= 4 && strings.HasPrefix(rest, "\t")
}

// bound keeps the first lines, and of each its beginning.
func bound(lines []string) []string {
	more := len(lines) - shownWhy
	lines = slices.Clone(lines[:min(len(lines), shownWhy)])
	for i, l := range lines {
		if lines[i] = strings.TrimRight(l, " \t"); len(l) > shownWidth {
			lines[i] = text.Head(l, shownWidth)
		}
	}
	if more > 0 {
		lines[shownWhy-1] = fmt.Sprintf("    ... and %d lines more, above", more+1)
	}
	return lines
}

// unended are the results that a stream broke off before.
func unended(running map[string]*result) (rs []*result) {
	for _, r := range running {
		rs = append(rs, r)
	}
	slices.SortFunc(rs, func(a, b *result) int { return cmp.Or(cmp.Compare(a.pkg, b.pkg), cmp.Compare(a.test, b.test)) })
	return rs
}
