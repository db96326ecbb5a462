package run

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestANoticeSetsTheLogLevel(t *testing.T) {
	var out bytes.Buffer
	level := new(slog.LevelVar)
	l := logLevel{level, slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: level}))}
	for _, c := range []struct {
		topic, body string
		want        slog.Level
	}{
		{"log-level", "debug", slog.LevelDebug},
		{"log-level", "loud", slog.LevelDebug},
		{"drain", "error", slog.LevelDebug},
		{"log-level", "warn", slog.LevelWarn},
		{"log-level", "error", slog.LevelError},
		{"log-level", "info", slog.LevelInfo},
		{"log-level", strings.Repeat("x", 4096), slog.LevelInfo},
	} {
		l.notice(c.topic, c.body)
		require.Equal(t, c.want, level.Level(), "%s %s", c.topic, c.body)
	}
	require.Contains(t, out.String(), `level=loud`)
	require.NotContains(t, out.String(), strings.Repeat("x", 41))
	require.Contains(t, out.String(), "use debug, info, warn or error")
	require.Contains(t, out.String(), "from=INFO to=DEBUG")
}

// dlroverctl makes the launchers of a run talkative, and quiet again.
func TestDlroverctlSetsTheLogLevel(t *testing.T) {
	r := rule(t, "2", "n0", "n1")
	r.worlds(1)
	r.ctl(0, "log-level", "job", "error")
	for _, n := range r.nodes {
		eventually(t, "the notice", func() bool { return strings.Contains(n.err.String(), `"to":"ERROR"`) })
	}
	r.ctl(0, "restart", "job")
	r.worlds(2)
	for _, n := range r.nodes {
		require.Equal(t, 1, strings.Count(n.err.String(), "workers started"), "the second start is not worth an error")
	}
	r.release()
	r.ends(0)
}
