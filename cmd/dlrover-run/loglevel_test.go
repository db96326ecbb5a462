package main

import (
	"bytes"
	"log/slog"
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
	} {
		l.Notice(c.topic, c.body)
		require.Equal(t, c.want, level.Level(), "%s %s", c.topic, c.body)
	}
	require.Contains(t, out.String(), `level=loud`)
	require.Contains(t, out.String(), "use debug, info, warn or error")
	require.Contains(t, out.String(), "from=INFO to=DEBUG")
}
