package eventlog

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEventsAreAppendedAsJSONLines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events")
	for range 2 {
		l, err := Open(path)
		require.NoError(t, err)
		l.With(slog.String("run_id", "r")).Event("start", slog.Int("round", 3))
		require.NoError(t, l.Close())
	}
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	require.Len(t, lines, 2)
	var e map[string]any
	require.NoError(t, json.Unmarshal([]byte(lines[1]), &e))
	require.Contains(t, e, "time")
	delete(e, "time")
	require.Equal(t, map[string]any{"event": "start", "run_id": "r", "round": 3.0}, e)
}

func TestNoPathMeansNoLog(t *testing.T) {
	l, err := Open("")
	require.NoError(t, err)
	l.With().Event("dropped")
	require.NoError(t, l.Close())
}

func TestLinksAreNotFollowed(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Symlink(filepath.Join(dir, "target"), filepath.Join(dir, "link")))
	_, err := Open(filepath.Join(dir, "link"))
	require.Error(t, err)
}
