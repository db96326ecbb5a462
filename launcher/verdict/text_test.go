package verdict

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func TestPlain(t *testing.T) {
	for _, tc := range []struct{ name, in, want string }{
		{"nothing to do", "a\n\n\tb ü", "a\n\n\tb ü"},
		{"colours", "\x1b[1;35mValueError\x1b[0m: \x1b[38:5:196mbad\x1b[m\n", "ValueError: bad\n"},
		{"cursor", "\x1b[2K\x1b[1A\x1b[?25la\x1b[ q\x1b7\x1b(Bb\x1b=", "ab"},
		{"title and link", "\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b\x1b]8;;\x1b\\c", "abc"},
		{"title, then a backslash", "\x1b]0;title\x07\\n\x1b]0;title\x1b\\\\n", `\n\n`},
		{"string without its end", "\x1b]0;title\nValueError: a\n", "0;title\nValueError: a\n"},
		{"cut in a sequence", "a\x1b[31\nb\x1b", "a\nb"},
		{"sequence in a sequence", "\x1b\x1b[31ma\x1b[3\x1b[0mb\x1b]x\x1b[0mc", "abc"},
		{"no UTF-8", "a\xff\xfe\x1b[0mb\xc3", "a\uFFFDb\uFFFD"},
		{"CRLF", "a\r\nb\r\r\n", "a\nb\n"},
		{"bar", "\r 0%\r50%\r100%\nend", "100%\nend"},
		{"bar that was erased", "\r50%\r     \rdone\n", "done\n"},
		{"colour after the bar's \\r", "10%\r\x1b[32m20%\r\x1b[0m\nend", "20%\nend"},
		{"error behind a bar", "\r 0%|  |\r50%|# |Traceback (most recent call last):\n  x\nE: y\n",
			"50%|# |Traceback (most recent call last):\n  x\nE: y\n"},
	} {
		t.Run(tc.name, func(t *testing.T) { require.Equal(t, tc.want, Plain([]byte(tc.in))) })
	}
}

// colored is what CPython 3.13.0 writes on a terminal.
const colored = "Traceback (most recent call last):\n" +
	"  File \x1b[35m\"train.py\"\x1b[0m, line \x1b[35m4\x1b[0m, in \x1b[35m<module>\x1b[0m\n" +
	"    \x1b[31mmain\x1b[0m\x1b[1;31m()\x1b[0m\n" +
	"    \x1b[31m~~~~\x1b[0m\x1b[1;31m^^\x1b[0m\n" +
	"  File \x1b[35m\"train.py\"\x1b[0m, line \x1b[35m2\x1b[0m, in \x1b[35mmain\x1b[0m\n" +
	"    raise ValueError(f\"bad batch {x}\")\n" +
	"\x1b[1;35mValueError\x1b[0m: \x1b[35mbad batch 1\x1b[0m\n"

func TestLineOfAColoredTraceback(t *testing.T) {
	for _, output := range []string{colored, "\r 0%|  |\r50%|# |" + strings.ReplaceAll(colored, "\n", "\r\n")} {
		f := said(exit(0, 1, 1), Plain([]byte(output)))
		require.Contains(t, Judge(Evidence{Failures: []Failure{f}}).Line(),
			"failed first: ValueError: bad batch 1 (exit code 1)")
	}
}

// TestPlainAsOnAPipe: a Python that colours says the same without.
func TestPlainAsOnAPipe(t *testing.T) {
	const python = "python3.13"
	if err := exec.Command(python, "-c", "").Run(); err != nil {
		t.Skipf("SKIPPED: no %s, the first that colours tracebacks, on PATH (%v): only TEXT KEPT FROM ONE IS TESTED",
			python, err)
	}
	write := func(env string) string {
		cmd := exec.Command(python,
			"-c", "import sys\ndef f(x): raise ExceptionGroup('several', [ValueError('bad batch'), KeyError(x)])\nf(1)")
		cmd.Env = append(os.Environ(), env)
		out, _ := cmd.CombinedOutput() // it fails
		return string(out)
	}
	color := write("FORCE_COLOR=1")
	require.Contains(t, color, "\x1b[")
	require.Equal(t, write("NO_COLOR=1"), Plain([]byte(color)))
}

func FuzzPlain(f *testing.F) {
	f.Add([]byte(colored))
	f.Add([]byte("\r 0%\r50%\x1b]0;t\x07\x1b[\r\n\x1b]8;;x\x1b\\\xff\x1b"))
	f.Fuzz(func(t *testing.T, in []byte) {
		got := Plain(in)
		require.True(t, utf8.ValidString(got))
		require.NotContains(t, got, "\x1b")
		require.NotContains(t, got, "\r")
		require.Equal(t, strings.Count(string(in), "\n"), strings.Count(got, "\n"))
		require.Equal(t, got, Plain([]byte(got)))
		for line := range strings.Lines(string(in)) {
			if utf8.ValidString(line) && !strings.ContainsAny(line, "\x1b\r") {
				require.Contains(t, got, line)
			}
		}
	})
}
