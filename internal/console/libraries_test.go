package console_test

import (
	"bytes"
	"encoding/json"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/console"
)

// library makes what is written to the standard logger visible, at level and above.
func library(t *testing.T, level slog.Level) *bytes.Buffer {
	t.Helper()
	flags, out := log.Flags(), log.Writer()
	t.Cleanup(func() { log.SetFlags(flags); log.SetOutput(out) })
	var said bytes.Buffer
	console.Libraries(slog.New(slog.NewJSONHandler(&said, &slog.HandlerOptions{Level: level})))
	return &said
}

func TestLibrariesAreQuiet(t *testing.T) {
	said := library(t, slog.LevelInfo)
	log.Print("Unsolicited response received on idle HTTP channel")
	slog.Info("the default logger of log/slog")
	require.Empty(t, said.String())
}

func TestLibrariesAreHeardWhenDebugging(t *testing.T) {
	said := library(t, slog.LevelDebug)
	log.Print("two\nlines\x1b[2J\n")
	var line struct{ Level, Msg, Text string }
	require.NoError(t, json.Unmarshal(said.Bytes(), &line))
	require.Equal(t, "DEBUG", line.Level)
	require.Equal(t, "a library says", line.Msg)
	require.Equal(t, "two\nlines\x1b[2J", line.Text)
}

// net/http survives a handler that panics, and says so through the standard logger.
func TestPanicsOfHandlersAreErrors(t *testing.T) {
	said := library(t, slog.LevelInfo)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("bad state") }))
	s.Config.ErrorLog = nil // the standard logger, which httptest's own server does not use
	s.Start()
	_, err := http.Get(s.URL)
	require.Error(t, err)
	s.Close()
	require.Contains(t, said.String(), `"level":"ERROR"`)
	require.Contains(t, said.String(), "bad state")
}
