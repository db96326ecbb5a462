package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// printed is the result of a test that failed with that output.
func printed(test, output string) *result {
	r := &result{pkg: "p", test: test, action: "fail", seconds: 1.5}
	r.output.WriteString(output)
	return r
}

const assertion = "    a_test.go:9: \n        \tError Trace:\t/x/a_test.go:9\n" +
	"        \tError:      \tShould be true\n" +
	"        \t            \tand more\n        \tMessages:   \tthe message\n"

func TestFailed(t *testing.T) {
	logged := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "    a_test.go:1: log %d\n        of it\n", i)
		}
		return b.String()
	}
	trimmed := strings.ReplaceAll(assertion, "9: \n", "9:\n")
	for name, tc := range map[string]struct {
		rs   []*result
		want string
	}{
		"none": {[]*result{{pkg: "p", test: "T", action: "pass"}, {pkg: "p", test: "S", action: "skip"}}, ""},
		"an assertion": {[]*result{printed("T", "=== RUN T\nnoise\n"+assertion+logged(9))},
			"\n1 FAILED:\n  p T (1.5s)\n" + trimmed},
		"logged before": {[]*result{printed("T", strings.ReplaceAll(logged(9), "        of it\n", "")+assertion)},
			"\n1 FAILED:\n  p T (1.5s)\n    a_test.go:1: log 6\n    a_test.go:1: log 7\n    a_test.go:1: log 8\n" + trimmed},
		"a fatal line": {[]*result{printed("T", "=== RUN T\n    a_test.go:3: broken\n--- FAIL: T\n")},
			"\n1 FAILED:\n  p T (1.5s)\n    a_test.go:3: broken\n"},
		"a subtest": {[]*result{printed("T/x", assertion), printed("T", "--- FAIL: T\n"), printed("", "FAIL\n")},
			"\n1 FAILED:\n  p T/x (1.5s)\n" + trimmed},
		"a panic": {[]*result{printed("T", "noise\npanic: no\n\ngoroutine 1\n")},
			"\n1 FAILED:\n  p T (1.5s)\npanic: no\n\ngoroutine 1\n\n"},
		"goleak": {[]*result{printed("", "goleak: found\n")}, "\n1 FAILED:\n  p (1.5s)\ngoleak: found\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			failed(&out, tc.rs)
			require.Equal(t, tc.want, out.String())
		})
	}
}

func TestWhyIsBounded(t *testing.T) {
	var out bytes.Buffer
	failed(&out, []*result{printed("T", strings.Repeat(assertion, 100)+strings.Repeat("x", 1000)+"\n")})
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Len(t, lines, 2+shownWhy)
	require.Equal(t, "    ... and 461 lines more, above", lines[len(lines)-1])
	long := bound([]string{strings.Repeat("é", shownWidth)})[0]
	require.LessOrEqual(t, len(long), shownWidth+3)
}
