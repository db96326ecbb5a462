package console_test

import (
	"encoding/json"
	"log/slog"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/internal/console"
)

// terminal returns the two sides of a terminal.
func terminal(t *testing.T) (user, program *os.File) {
	t.Helper()
	user, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { user.Close() })
	require.NoError(t, unix.IoctlSetPointerInt(int(user.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(user.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	program, err = os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { program.Close() })
	return user, program
}

// shown is what a program shows when it logs with log to a terminal, or into a pipe.
func shown(t *testing.T, onTerminal bool, f console.Format, level slog.Level, log func(*slog.Logger)) string {
	t.Helper()
	r, w, err := os.Pipe()
	if onTerminal {
		r, w = terminal(t)
	} else {
		t.Cleanup(func() { r.Close(); w.Close() })
	}
	require.NoError(t, err)
	log(console.Logger(w, "prog", f, level))
	buf := make([]byte, 4096)
	n, err := r.Read(buf)
	require.NoError(t, err)
	return strings.ReplaceAll(string(buf[:n]), "\r\n", "\n")
}

func TestLogFormat(t *testing.T) {
	text := regexp.MustCompile(`^\d\d:\d\d:\d\d\.\d\d\d INFO  gpu-07: workers started world_size=16 why="two words"\n$`)
	for _, tc := range []struct {
		format     console.Format
		onTerminal bool
		json       bool
	}{
		{console.Auto, true, false},
		{console.Auto, false, true},
		{console.Text, true, false},
		{console.Text, false, false},
		{console.JSON, true, true},
		{console.JSON, false, true},
	} {
		t.Run(string(tc.format)+" "+strconv.FormatBool(tc.onTerminal), func(t *testing.T) {
			line := shown(t, tc.onTerminal, tc.format, slog.LevelInfo, func(l *slog.Logger) {
				l.With("run_id", "job1", "host", "gpu-07").Info("workers started", "world_size", 16, "why", "two words")
			})
			if !tc.json {
				require.Regexp(t, text, line)
				return
			}
			var got map[string]any
			require.NoError(t, json.Unmarshal([]byte(line), &got))
			delete(got, "time")
			require.Equal(t, map[string]any{"level": "INFO", "msg": "workers started", "program": "prog", "run_id": "job1",
				"host": "gpu-07", "world_size": 16.0, "why": "two words"}, got)
		})
	}
}

func TestTextLines(t *testing.T) {
	for name, tc := range map[string]struct {
		log  func(*slog.Logger)
		want string
	}{
		"no node":                   {func(l *slog.Logger) { l.Info("serving") }, "INFO  prog: serving\n"},
		"level":                     {func(l *slog.Logger) { l.Error("no") }, "ERROR prog: no\n"},
		"a record's own run is new": {func(l *slog.Logger) { l.Info("seal", "run_id", "j") }, "INFO  prog: seal run_id=j\n"},
		"attributes of the logger": {func(l *slog.Logger) { l.With("rank", 3).Warn("slow", "s", 1.5) },
			"WARN  prog: slow rank=3 s=1.5\n"},
		"groups": {func(l *slog.Logger) { l.WithGroup("g").Info("x", "host", "h") }, "INFO  prog: x g.host=h\n"},
		"one line": {func(l *slog.Logger) { l.Info("a\nb\x1b[2J", "k", "c\nd\u202e") },
			`INFO  prog: a\nb\x1b[2J k="c\nd\u202e"` + "\n"},
		"what is empty":   {func(l *slog.Logger) { l.Info("x", "node", "", "n", 0) }, "INFO  prog: x n=0\n"},
		"below the level": {func(l *slog.Logger) { l.Debug("not shown"); l.Info("shown") }, "INFO  prog: shown\n"},
	} {
		t.Run(name, func(t *testing.T) {
			_, line, found := strings.Cut(shown(t, false, console.Text, slog.LevelInfo, tc.log), " ")
			require.True(t, found)
			require.Equal(t, tc.want, line)
		})
	}
}

func TestParseFormat(t *testing.T) {
	for text, want := range map[string]console.Format{
		"": console.Auto, "auto": console.Auto, "text": console.Text, "json": console.JSON,
	} {
		got, err := console.ParseFormat(text)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	_, err := console.ParseFormat("xml")
	require.EqualError(t, err,
		`--log-format or $PET_LOG_FORMAT: "xml" is unknown: use auto (text on a terminal, else json), text or json`)
}

func TestLevel(t *testing.T) {
	for text, want := range map[string]slog.Level{"": slog.LevelInfo, "debug": slog.LevelDebug, "WARNING": slog.LevelWarn,
		"CRITICAL": slog.LevelError, "7": slog.LevelInfo} {
		t.Setenv("LOGLEVEL", text)
		require.Equal(t, want, console.Level(), text)
	}
}

func TestALevelThatIsNoneIsSaid(t *testing.T) {
	t.Setenv("LOGLEVEL", "loud")
	got := shown(t, false, console.Text, console.Level(), func(*slog.Logger) {})
	require.Contains(t, got,
		"WARN  prog: LOGLEVEL is not one of DEBUG, INFO, WARNING, ERROR and CRITICAL: INFO counts value=loud")
}
