// testlog reads the JSON of `go test -json` and prints what people want of it: a line for each package, the output of
// what failed, the slowest tests, what was not tested and why, and at the end what failed and why. It exits with 1 if
// anything failed.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
)

// shownSlow is how many of the slowest tests are named.
const shownSlow = 10

// event is a line of `go test -json`.
type event struct {
	Action, Package, ImportPath, Test, Output string
	Elapsed                                   float64 // seconds
}

// result is a test, or with no name a package.
type result struct {
	pkg, test, action string
	output            strings.Builder
	seconds           float64
}

func main() {
	if !report(os.Stdin, os.Stdout) {
		os.Exit(1)
	}
}

// report says whether all is well, which it is not without any result.
func report(in io.Reader, out io.Writer) bool {
	running := map[string]*result{}
	var ended []*result
	for lines := bufio.NewReader(in); ; {
		line, err := lines.ReadBytes('\n')
		var e event
		switch {
		case json.Unmarshal(line, &e) == nil:
			if r := e.take(running); r != nil {
				ended = append(ended, r)
				r.print(out)
			}
		case len(line) > 0: // of the go command itself
			out.Write(line)
		}
		if err != nil {
			break
		}
	}
	slowest(out, ended)
	skipped(out, ended)
	all := append(ended, unended(running)...)
	failed(out, all)
	return len(all) > 0 && !slices.ContainsFunc(all, func(r *result) bool { return !r.good() })
}

// take adds e to what is running, and returns what it ends.
func (e event) take(running map[string]*result) *result {
	pkg := cmp.Or(e.Package, e.ImportPath)
	key := pkg + " " + e.Test
	if e.ImportPath != "" {
		key = "build " + pkg
	}
	r := running[key]
	if r == nil {
		r = &result{pkg: pkg, test: e.Test}
		running[key] = r
	}
	r.output.WriteString(e.Output)
	switch e.Action {
	case "pass", "fail", "skip", "build-fail":
		delete(running, key)
		r.action, r.seconds = e.Action, e.Elapsed
		return r
	}
	return nil
}

// print shows the line of a package, and the output of what failed.
func (r *result) print(out io.Writer) {
	text := r.output.String()
	switch {
	case r.action == "fail" || r.action == "build-fail":
		io.WriteString(out, text)
	case r.test == "" && r.action == "pass": // a package without tests is skipped
		fmt.Fprintf(out, "ok %7.1fs %s\n", r.seconds, r.pkg)
	}
}

func slowest(out io.Writer, rs []*result) {
	rs = slices.Clone(rs)
	rs = slices.DeleteFunc(rs,
		func(r *result) bool { return r.test == "" || strings.Contains(r.test, "/") || r.seconds < 1 })
	slices.SortFunc(rs, func(a, b *result) int { return cmp.Compare(b.seconds, a.seconds) })
	for i, r := range rs[:min(len(rs), shownSlow)] {
		if i == 0 {
			fmt.Fprintln(out, "\nThe slowest:")
		}
		fmt.Fprintf(out, "%6.1fs %s %s\n", r.seconds, r.pkg, r.test)
	}
}

// reason finds in the output of a skipped test what Skip was given.
const reason = `(?m)^\s+\w+\.go:\d+: (.*)$`

func skipped(out io.Writer, rs []*result) {
	var lines []string
	pattern := regexp.MustCompile(reason)
	for _, r := range rs {
		if r.action != "skip" || r.test == "" {
			continue
		}
		why := "no reason given"
		if m := pattern.FindAllStringSubmatch(r.output.String(), -1); m != nil {
			why = m[len(m)-1][1]
		}
		lines = append(lines, fmt.Sprintf("  %s %s: %s", r.pkg, r.test, why))
	}
	if len(lines) > 0 {
		slices.Sort(lines)
		fmt.Fprintf(out, "\n%d TESTS WERE SKIPPED:\n%s\n", len(lines), strings.Join(lines, "\n"))
	}
}
