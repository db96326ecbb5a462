package logs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/openfile"
)

// joined is the content of path with its rotated files, oldest first, and the sizes in that order.
func joined(t *testing.T, path string) (all string, parts []string) {
	t.Helper()
	for i := 100; i >= 0; i-- {
		name := path
		if i > 0 {
			name = fmt.Sprintf("%s.%d", path, i)
		}
		if b, err := os.ReadFile(name); err == nil {
			all += string(b)
			parts = append(parts, string(b))
		}
	}
	return all, parts
}

func TestRotation(t *testing.T) {
	line := strings.Repeat("x", 99) + "\n"
	for _, tc := range []struct {
		name        string
		size        int64
		writes      []string
		wantParts   int
		wholeLines  bool
		biggestPart int
	}{
		{"fits", 1000, []string{line, line}, 1, true, 200},
		{"fits exactly", 200, []string{line, line}, 1, true, 200},
		{"lines", 250, []string{line, line, line, line, line}, 3, true, 200},
		{"one write over several files", 250, []string{strings.Repeat(line, 10)}, 5, true, 200},
		{"line in pieces stays whole", 150, []string{line, line[:40], line[40:], line}, 2, true, 200},
		{"line longer than a file, its end near", 50, []string{line, line}, 2, true, 100},
		{"no line end at all", 10000, []string{strings.Repeat("y", 64<<10)}, 7, false, 10000},
		{"no line end, small pieces", 10000, repeat("z", 30000), 3, false, 10000 + nearLineEnd},
		{"one byte files", 1, []string{"a\nb\n", "c"}, 3, false, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "stdout.log")
			f := &file{path: path, rotateSize: tc.size, rotateCount: 99, create: createLog,
				failed: func(p string, err error) { t.Errorf("%s: %v", p, err) }}
			for _, s := range tc.writes {
				f.write([]byte(s))
			}
			f.close(slog.New(slog.DiscardHandler))
			got, parts := joined(t, path)
			require.Equal(t, strings.Join(tc.writes, ""), got)
			require.Len(t, parts, tc.wantParts)
			for _, p := range parts {
				require.LessOrEqual(t, len(p), tc.biggestPart)
				if tc.wholeLines {
					require.True(t, strings.HasSuffix(p, "\n"), "%q", p)
				}
			}
		})
	}
}

func repeat(s string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = s
	}
	return out
}

func TestRotationKeepsTheNewest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "stdout.log")
	f := &file{path: path, rotateSize: 2, rotateCount: 2, create: createLog, failed: func(string, error) {}}
	for _, s := range []string{"1\n", "2\n", "3\n", "4\n", "5\n"} {
		f.write([]byte(s))
	}
	f.closeFile()
	_, parts := joined(t, path)
	require.Equal(t, []string{"3\n", "4\n", "5\n"}, parts)
}

func TestRotationThatFailsLosesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "stdout.log")
	errs, fail := 0, false
	f := &file{path: path, rotateSize: 4, rotateCount: 9, failed: func(string, error) { errs++ }}
	f.create = func(p string) (io.WriteCloser, int64, error) {
		if fail {
			return nil, 0, syscall.EMFILE
		}
		return createLog(p)
	}
	for i := range 9 {
		fail = i >= 2 && i < 6
		fmt.Fprintf(writerFunc(f.write), "ln%d\n", i)
	}
	f.closeFile()
	got, _ := joined(t, path)
	require.Equal(t, "ln0\nln1\nln2\nln3\nln4\nln5\nln6\nln7\nln8\n", got)
	require.NotZero(t, errs)
	require.Zero(t, f.lost)

	// A directory in the way of the rename.
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "b.log.1", "x"), 0o755))
	f = &file{
		path: filepath.Join(dir, "b.log"), rotateSize: 4, rotateCount: 1, create: createLog,
		failed: func(string, error) { errs++ },
	}
	for range 3 {
		f.write([]byte("abc\n"))
	}
	f.closeFile()
	require.Equal(t, "abc\nabc\nabc\n", read(t, dir, "b.log"))
}

type writerFunc func([]byte)

func (w writerFunc) Write(p []byte) (int, error) {
	w(p)
	return len(p), nil
}

// limited is a file on a disk with room for n bytes.
type limited struct {
	bytes.Buffer
	n int
}

func (l *limited) Close() error { return nil }
func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.n)
	l.n -= n
	l.Buffer.Write(p[:n])
	if n < len(p) {
		return n, syscall.ENOSPC
	}
	return n, nil
}

func TestFileGoesOnWhenThereIsSpaceAgain(t *testing.T) {
	disk := &limited{n: 6}
	var openErr error = syscall.ENOSPC
	var said []error
	f := &file{path: "/logs/stdout.log", failed: func(_ string, err error) { said = append(said, err) }}
	f.create = func(string) (io.WriteCloser, int64, error) { return disk, 0, openErr }

	f.write([]byte("lost\n"))
	openErr = nil
	f.write([]byte("abcd\n"))
	f.write([]byte("efgh\n"))
	disk.n = 100
	f.write([]byte("ijkl\n"))
	require.Equal(t, "abcd\neijkl\n", disk.String())
	require.Equal(t, int64(5+4), f.lost)
	require.Len(t, said, 2)

	var log bytes.Buffer
	f.close(slog.New(slog.NewTextHandler(&log, nil)))
	require.Contains(t, log.String(), "lost_bytes=9")
	require.Contains(t, log.String(), "/logs/stdout.log")
	require.Contains(t, log.String(), "no space left")
	f.write([]byte("late"))
	require.Equal(t, "abcd\neijkl\n", disk.String(), "closed for good")
}

func TestOpenLogFollowsNoLink(t *testing.T) {
	dir := t.TempDir()
	victim := filepath.Join(dir, "victim")
	require.NoError(t, os.WriteFile(victim, []byte("precious"), 0o644))
	link := filepath.Join(dir, "stdout.log")
	require.NoError(t, os.Symlink(victim, link))
	_, _, err := openLog(link)
	require.ErrorIs(t, err, openfile.ErrLink)
	require.Equal(t, "precious", read(t, victim))
}

func TestTail(t *testing.T) {
	for _, tc := range []struct {
		name   string
		writes []string
		want   string
	}{
		{"nothing", nil, ""},
		{"less", []string{"abc"}, "abc"},
		{"exactly", []string{"abcdefgh"}, "abcdefgh"},
		{"more in one write", []string{"0123456789"}, "23456789"},
		{"more in small writes", []string{"012", "345", "678", "9"}, "23456789"},
		{"wraps twice", repeat("abc", 7), "bcabcabc"},
		{"whole after wrap", []string{"012345678", "9", "ABCDEFGH", "I"}, "BCDEFGHI"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ring := tail{max: 8}
			for _, s := range tc.writes {
				ring.write([]byte(s))
			}
			require.Equal(t, tc.want, string(ring.bytes()))

			path := filepath.Join(t.TempDir(), "f")
			require.NoError(t, os.WriteFile(path, []byte(strings.Join(tc.writes, "")), 0o600))
			require.Equal(t, tc.want, string(fileTail(path, 8)))
		})
	}
	require.Empty(t, fileTail(filepath.Join(t.TempDir(), "missing"), 8))
}

func TestOutput(t *testing.T) {
	type put struct {
		by   string // p, q: tee'd streams; r: raw
		text string
		cont bool
	}
	for _, tc := range []struct {
		name string
		puts []put
		want string
	}{
		{"whole lines", []put{{"p", "[p]:a\n", false}, {"q", "[q]:b\n", false}}, "[p]:a\n[q]:b\n"},
		{"prompt goes on", []put{{"p", "[p]:a", false}, {"p", "b\n", true}}, "[p]:ab\n"},
		{"other stream between", []put{{"p", "[p]:a", false}, {"q", "[q]:b\n", false}, {"p", "c\n", true}},
			"[p]:a\n[q]:b\n[p]:c\n"},
		{"two prompts", []put{{"p", "[p]:a", false}, {"q", "[q]:b", false}, {"p", "c\n", true}, {"q", "d\n", true}},
			"[p]:a\n[q]:b\n[p]:c\n[q]:d\n"},
		{"only the end is left", []put{{"p", "[p]:a", false}, {"q", "[q]:b\n", false}, {"p", "\n", true}}, "[p]:a\n[q]:b\n"},
		{"only the end is left, in another's line",
			[]put{{"p", "[p]:a", false}, {"q", "[q]:b", false}, {"p", "\n", true}, {"q", "c\n", true}}, "[p]:a\n[q]:bc\n"},
		{"end and more", []put{{"p", "[p]:a", false}, {"q", "[q]:b", false}, {"p", "\n[p]:c\n", true}},
			"[p]:a\n[q]:b\n[p]:c\n"},
		{"raw", []put{{"r", "a", false}, {"r", "b\n", true}, {"r", "\n", false}}, "ab\n\n"},
		{"raw and tee do not", []put{{"r", "a", false}, {"p", "[p]:b", false}, {"r", "c\n", true}}, "a\n[p]:b\nc\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got strings.Builder
			clock := time.Unix(1e9, 0)
			tick := func() time.Time { clock = clock.Add(patience); return clock } // nobody waits for anybody
			o := &output{now: tick, write: func(p []byte) (int, error) { return got.WriteString(string(p)) }}
			streams := map[string]*lines{
				"p": o.tee(lines{prefix: []byte("[p]:")}), "q": o.tee(lines{prefix: []byte("[q]:")}), "r": o.pass(),
			}
			for _, p := range tc.puts {
				head := eraseLine + string(streams[p.by].prefix)
				s := streams[p.by]
				s.send(piece{s.by, []byte(head + p.text), len(head), p.cont}, tick())
			}
			require.Equal(t, tc.want, got.String())
		})
	}
}

func TestOutputCountsWhatIsDropped(t *testing.T) {
	said := 0
	o := &output{
		now: time.Now, write: func(p []byte) (int, error) { return 1, errors.New("gone") }, failed: func(error) { said++ },
	}
	for by := range owner(2) {
		o.put(piece{by + 1, []byte(eraseLine + "abc\n"), gap, false}, o.now())
	}
	require.Equal(t, int64(6), o.dropped.Load())
	require.Equal(t, 2, said)
}

// What a worker puts in the place of its log is not written to, and holds up nobody; the bytes are counted.
func TestALogThatIsNoFile(t *testing.T) {
	for name, plant := range map[string]func(path string) error{
		"fifo":   func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"device": func(path string) error { return os.Symlink("/dev/full", path) },
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "stdout.log")
			var failed error
			f := &file{path: path, rotateSize: 10, rotateCount: 2, create: func(path string) (io.WriteCloser, int64, error) {
				_ = plant(path) // before each opening, the first one included
				return createLog(path)
			}, failed: func(_ string, err error) { failed = err }}
			f.write([]byte("line 1\nline 2\nline 3\n"))
			require.Error(t, failed)
			require.EqualValues(t, 21, f.lost)
			require.Empty(t, fileTail(path, 8))
		})
	}
}

// The beginning of a line that is longer than what is kept is kept, too, with what leads to it, as long as some of the
// line is.
func TestTailKeepsTheBeginningOfALongLine(t *testing.T) {
	const room = 64 << 10
	before := strings.Repeat("step\n", 4000) + "Traceback:\n"
	for _, n := range []int{100, 20_000, 60_000, 70_000, 1 << 20} {
		for _, after := range []string{"", "\n", "\nafter\n" + strings.Repeat("more\n", 3000),
			"\n" + strings.Repeat("more\n", 20_000)} {
			text := before + "ValueError: " + strings.Repeat("x", n) + " end" + after
			kept := strings.Contains(text[max(0, len(text)-room):], "x end")
			for _, size := range []int{1000, 8192, 10_000, 1 << 21} {
				ring := tail{max: room}
				for p := []byte(text); len(p) > 0; p = p[min(size, len(p)):] {
					ring.write(p[:min(size, len(p))])
				}
				got := string(ring.bytes())
				require.True(t, strings.HasSuffix(got, text[len(text)-min(room, len(text)):]))
				require.LessOrEqual(t, len(got), room+leading+longLine+len(omitted))
				require.Equal(t, kept, strings.Contains(got, "Traceback:\nValueError: x"), "%d %d %d", n, len(after), size)
			}
			path := filepath.Join(t.TempDir(), "f")
			require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
			got := string(fileTail(path, room))
			require.True(t, strings.HasSuffix(got, text[len(text)-min(room, len(text)):]))
			require.Equal(t, kept, strings.Contains(got, "Traceback:\nValueError: x"), "file %d %d", n, len(after))
		}
	}
}
