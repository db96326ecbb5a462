package verdict_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/verdict"
)

func TestException(t *testing.T) {
	const chained = "Traceback (most recent call last):\n  File \"a.py\", line 1\nKeyError: 1\n\n" +
		"During handling of the above exception, another exception occurred:\n\n" +
		"Traceback (most recent call last):\n  File \"a.py\", line 2\nmy.own.Error_2: no:\nmore\n"
	for _, tt := range []struct {
		name, want string
		failure    verdict.Failure
	}{
		{"on standard error", "torch.cuda.OutOfMemoryError",
			verdict.Failure{ExitCode: 1, LastLines: traceback("torch.cuda.OutOfMemoryError: CUDA out of memory.")}},
		{"the last of a chain", "my.own.Error_2", verdict.Failure{ExitCode: 1, LastLines: chained}},
		{"without a text", "AssertionError", verdict.Failure{ExitCode: 1, LastLines: traceback("AssertionError")}},
		{"error file, whose traceback has the module", "torch.OutOfMemoryError",
			verdict.Failure{ExitCode: -9, Message: "OutOfMemoryError: x", Traceback: traceback("torch.OutOfMemoryError: x")}},
		{"error file without a traceback", "ValueError", verdict.Failure{ExitCode: 1, Message: "ValueError: x"}},
		{"logged, then another status", "ValueError", verdict.Failure{ExitCode: 3, LastLines: traceback("ValueError: x")}},
		{"ctrl-C", "KeyboardInterrupt", verdict.Failure{ExitCode: -2, LastLines: traceback("KeyboardInterrupt")}},
		{"survived, then killed", "", verdict.Failure{ExitCode: -9, LastLines: traceback("ValueError: x")}},
		{"a sentence", "", verdict.Failure{ExitCode: 1, Message: "something broke: x"}},
		{"a number", "", verdict.Failure{ExitCode: 1, Message: "1: x"}},
		{"C++", "", verdict.Failure{ExitCode: 1, LastLines: terminated("NCCL error")}},
		{"nothing", "", verdict.Failure{ExitCode: 1}},
	} {
		require.Equal(t, tt.want, strings.Join(tt.failure.Exceptions(), " "), tt.name)
	}
}

func TestFollows(t *testing.T) {
	f := verdict.Failure{ExitCode: 1, LastLines: traceback("RuntimeError: Connection reset by peer")}
	require.True(t, f.Follows())
	require.False(t, verdict.Failure{ExitCode: 1, LastLines: traceback("ValueError: x")}.Follows())
	f.OOM = &verdict.OOM{}
	require.False(t, f.Follows(), "the kernel's word counts more")
	f.OOM, f.Timer = nil, "a timer"
	require.False(t, f.Follows())
}

func TestLineSaysWhichRuleDidNotRetry(t *testing.T) {
	f := verdict.Failure{ExitCode: 3, Policy: "rule exit 3 -> stop-job (a.yaml:4)", Permanent: true}
	line := verdict.Judge(verdict.Evidence{Failures: []verdict.Failure{f}}).Line()
	require.Contains(t, line, "; not retried by rule exit 3 -> stop-job (a.yaml:4); restarts used")
	f.Permanent = false
	require.NotContains(t, verdict.Judge(verdict.Evidence{Failures: []verdict.Failure{f}}).Line(), "a.yaml")
}

func TestLastException(t *testing.T) {
	require.Empty(t, verdict.LastException("ValueError: nothing says that it ended anything\n"))
	require.Equal(t, "ValueError: bad", verdict.LastException(
		"Traceback (most recent call last):\n  File \"a.py\", line 3, in f\n    g()\n\x1b[31mValueError: bad\x1b[0m\nlate\n"))
}
