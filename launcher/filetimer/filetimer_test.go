package filetimer

import (
	"bytes"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var noon = time.Unix(1_700_000_000, 500_000_000)

func TestParse(t *testing.T) {
	for line, want := range map[string]Request{
		// Written by torch 1.13 and 2.15.
		`{"version": 1, "pid": 4242, "scope_id": "train.py#7", "expiration_time": 1700000030.5, "signal": 9}`: {PID: 4242,
			Scope: "train.py#7", After: 30 * time.Second, Signal: syscall.SIGKILL},
		`{"version": 1, "pid": 4242, "scope_id": "train.py#7", "expiration_time": -1, "signal": 0}`: {PID: 4242,
			Scope: "train.py#7", Release: true},

		`{"pid": 1, "scope_id": "\u00e4", "expiration_time": 1, "signal": 15}`: {PID: 1, Scope: "ä",
			Signal: syscall.SIGTERM},
		`{"pid": 1, "scope_id": "", "expiration_time": 1700000001, "signal": -3}`: {PID: 1,
			After: time.Second / 2},
		`{"pid": 1, "scope_id": "s", "expiration_time": Infinity, "signal": 9}`: {PID: 1, Scope: "s",
			After: maxAfter, Signal: 9},
		`{"pid": 1, "scope_id": "s", "expiration_time": NaN, "signal": 9}`: {PID: 1, Scope: "s",
			After: maxAfter, Signal: 9},
		`{"pid": 1, "scope_id": "s", "expiration_time": -Infinity, "signal": 0}`: {PID: 1,
			Scope: "s", Release: true},
		`{"pid": 1, "scope_id": "\"expiration_time\": NaN", "expiration_time": 1, "signal": 9}`: {PID: 1,
			Scope: `"expiration_time": NaN`, Signal: 9},
	} {
		got, err := parse([]byte(line), noon)
		require.NoError(t, err, line)
		require.Equal(t, want, got, line)
	}
	for line, want := range map[string]string{
		``:      "end of JSON",
		`{}`:    "needs pid",
		`hello`: "invalid character",
		`{"pid": 0, "scope_id": "s", "expiration_time": 1, "signal": 9}`:    "from 1",
		`{"pid": -1, "scope_id": "s", "expiration_time": 1, "signal": 9}`:   "from 1",
		`{"pid": 1.5, "scope_id": "s", "expiration_time": 1, "signal": 9}`:  "pid",
		`{"pid": 1, "expiration_time": 1, "signal": 9}`:                     "needs pid",
		`{"pid": 1, "scope_id": 7, "expiration_time": 1, "signal": 9}`:      "scope_id",
		`{"pid": 1, "scope_id": "s", "expiration_time": 1, "signal": 65}`:   "none above 64",
		`{"pid": 1, "scope_id": "s", "expiration_time": 1, "signal": 9} {}`: "after top-level",
		strings.Repeat(" ", maxLine) + `{}`:                                 "longer than",
	} {
		_, err := parse([]byte(line), noon)
		require.ErrorContains(t, err, want, line)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"version": 1, "pid": 4242, "scope_id": "train.py#7", "expiration_time": 1700000030.5, "signal": 9}`))
	f.Add([]byte(`{"pid": 1, "scope_id": "s", "expiration_time": 1e308, "signal": -9}`))
	f.Add([]byte(`{"pid": 1, "scope_id": "s", "expiration_time": -Infinity}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		r, err := parse(line, noon)
		if err != nil {
			require.Zero(t, r)
			return
		}
		require.Positive(t, r.PID, "0 and less are groups of processes")
		require.True(t, r.Signal >= 0 && r.Signal <= 64)
		require.True(t, r.After >= 0 && r.After <= maxAfter)
	})
}

func set(t *testing.T, tb *Table, pid int, scope string, after time.Duration, sig syscall.Signal) {
	t.Helper()
	_, err := tb.Set(Request{PID: pid, Scope: scope, After: after, Signal: sig}, noon)
	require.NoError(t, err)
}

func scopes(timers []Timer) (out []string) {
	for _, timer := range timers {
		out = append(out, fmt.Sprintf("%d %s %d", timer.PID, timer.Scope, timer.Signal))
	}
	return out
}

func TestTable(t *testing.T) {
	var tb Table
	_, ok := tb.Next()
	require.False(t, ok)
	require.Empty(t, tb.Expire(noon))

	set(t, &tb, 1, "a", 3*time.Second, 9)
	set(t, &tb, 1, "b", 2*time.Second, 9)
	set(t, &tb, 2, "a", time.Second, 9)
	next, ok := tb.Next()
	require.True(t, ok)
	require.Equal(t, noon.Add(time.Second), next)

	tb.Release(2, "a")
	tb.Release(2, "unknown")
	require.Empty(t, tb.Expire(noon.Add(time.Second)))
	require.Equal(t, []string{"1 b 9"}, scopes(tb.Expire(noon.Add(2*time.Second))))
	_, ok = tb.Next()
	require.False(t, ok, "the other timers of a process that is killed end")

	set(t, &tb, 1, "a", time.Second, 9)
	set(t, &tb, 1, "a", time.Minute, 9)
	require.Empty(t, tb.Expire(noon.Add(2*time.Second)), "a timer that is set again")
	tb.Drop(1)

	set(t, &tb, 3, "silent", time.Second, 0)
	set(t, &tb, 3, "late", 3*time.Second, 9)
	set(t, &tb, 3, "early", 2*time.Second, 15)
	set(t, &tb, 4, "silent", 2*time.Second, 0)
	set(t, &tb, 5, "later", time.Minute, 9)
	require.Equal(t, []string{"3 early 15", "4 silent 0"}, scopes(tb.Expire(noon.Add(5 * time.Second)))[0:2:2])
	next, _ = tb.Next()
	require.Equal(t, noon.Add(time.Minute), next)

	set(t, &tb, 6, "silent", time.Second, 0)
	set(t, &tb, 6, "silent again", 2*time.Second, 0)
	set(t, &tb, 6, "loud", 3*time.Second, 9)
	require.Equal(t, []string{"6 silent 0"}, scopes(tb.Expire(noon.Add(2*time.Second))),
		"a timer without a signal ends no other")
	require.True(t, tb.Runs(6))
	require.Equal(t, []string{"6 loud 9"}, scopes(tb.Expire(noon.Add(3*time.Second))))
	require.False(t, tb.Runs(6))
}

func TestTableIsBounded(t *testing.T) {
	var tb Table
	for i := range maxTimers {
		set(t, &tb, 1, fmt.Sprint(i), time.Second, 9)
	}
	_, err := tb.Set(Request{PID: 1, Scope: "one more"}, noon)
	require.ErrorContains(t, err, "65536")
	set(t, &tb, 1, "0", time.Second, 9)
}

func TestLinesAreBounded(t *testing.T) {
	var got []string
	text := "first\n" + strings.Repeat("x", 5*maxLine) + "\nthird\n\n" + strings.Repeat("y",
		maxLine) + "\nrest without an end"
	err := eachLine(strings.NewReader(text), func(line []byte) bool { got = append(got, string(line)); return true })
	require.ErrorContains(t, err, "EOF")
	require.Len(t, got, 5)
	require.Greater(t, len(got[1]), maxLine)
	got[1] = "long"
	require.Equal(t, []string{"first", "long", "third", "", strings.Repeat("y", maxLine)}, got)
}

func listen(t *testing.T, path string, log *slog.Logger) *FIFO {
	t.Helper()
	f, err := Listen(path, log)
	require.NoError(t, err)
	return f
}

func write(t *testing.T, path, text string) {
	t.Helper()
	w, err := os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK, 0) // as the client does
	require.NoError(t, err)
	_, err = w.WriteString(text)
	require.NoError(t, err)
	require.NoError(t, w.Close())
}

func TestFIFOIsPrivateAndGoes(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	f := listen(t, "", slog.New(slog.DiscardHandler))
	fi, err := os.Lstat(f.Path())
	require.NoError(t, err)
	require.Equal(t, fs.ModeNamedPipe|0o600, fi.Mode())
	fi, err = os.Lstat(filepath.Dir(f.Path()))
	require.NoError(t, err)
	require.Equal(t, fs.ModeDir|0o700, fi.Mode())
	require.NoError(t, f.Close())
	left, err := os.ReadDir(os.Getenv("TMPDIR"))
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestFIFOPassesWhatIsARequest(t *testing.T) {
	var log bytes.Buffer
	f := listen(t, filepath.Join(t.TempDir(), "timer"), slog.New(slog.NewTextHandler(&log, nil)))
	go func() {
		write(t, f.Path(), "nonsense\n{}\n"+strings.Repeat("z", 3*maxLine)+"\n")
		write(t, f.Path(), `{"pid": 7, "scope_id": "s", "expiration_time": -1, "signal": 0}`+"\n")
	}()
	require.Equal(t, Request{PID: 7, Scope: "s", Release: true}, <-f.Requests())
	write(t, f.Path(), strings.Repeat(`{"pid": 7, "scope_id": "s", "expiration_time": -1, "signal": 0}`+"\n", 3))
	<-f.Requests()
	require.NoError(t, f.Close(), "with requests that nobody takes")
	require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
	require.Contains(t, log.String(), "nonsense")
}

func TestFIFOAtAPathThatIsTaken(t *testing.T) {
	log, dir := slog.New(slog.DiscardHandler), t.TempDir()
	path := filepath.Join(dir, "timer")
	require.NoError(t, unix.Mkfifo(path, 0o666))
	f := listen(t, path, log) // left behind by a process that died
	fi, err := os.Lstat(path)
	require.NoError(t, err)
	require.Equal(t, fs.ModeNamedPipe|0o600, fi.Mode())

	_, err = Listen(path, log)
	require.ErrorIs(t, err, ErrServed)
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.WriteFile(path, []byte("precious"), 0o600))
	require.NoError(t, f.Close())
	require.NoError(t, os.Symlink(path, path+".link"))
	for _, p := range []string{path, path + ".link", dir} {
		_, err = Listen(p, log)
		require.ErrorContains(t, err, "something else than a named pipe", p)
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "precious", string(text))
	_, err = Listen(filepath.Join(dir, "nowhere", "timer"), log)
	require.ErrorIs(t, err, fs.ErrNotExist)
}
