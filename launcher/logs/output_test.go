package logs

import (
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// meetingPoint is an output with a clock of its own and three raw streams.
type meetingPoint struct {
	*output
	got     strings.Builder
	clock   time.Time
	streams [3]*lines
}

func newMeetingPoint(terminal bool, prefix string) *meetingPoint {
	m := &meetingPoint{clock: time.Unix(1e9, 0)}
	m.output = &output{now: func() time.Time { return m.clock }, write: m.got.Write}
	if terminal {
		m.terminal = os.Stdin
	}
	for i := range m.streams {
		m.streams[i] = m.tee(lines{prefix: []byte(prefix), raw: prefix == "", hold: rawDelay})
	}
	return m
}

func (m *meetingPoint) say(i int, text string) {
	m.streams[i].feed([]byte(text), m.clock)
	m.tick(i)
}

// tick is what the pump of a stream does after a read, or when woken.
func (m *meetingPoint) tick(i int) {
	if due := m.streams[i].due(); !due.IsZero() && !due.After(m.clock) {
		m.streams[i].partial(m.clock)
	}
	m.streams[i].flush()
}

func (m *meetingPoint) after(d time.Duration) {
	m.clock = m.clock.Add(d)
	m.woken()
	for i := range m.streams {
		m.tick(i)
	}
}

func TestLinesDoNotCutEachOther(t *testing.T) {
	const soon = rawDelay
	for _, tc := range []struct {
		name     string
		terminal bool
		prefix   string
		do       func(m *meetingPoint)
		want     string
	}{
		{"in pieces", false, "", func(m *meetingPoint) {
			for _, part := range []string{"a", "b", "\n"} {
				m.say(0, part)
				m.say(1, part)
			}
		}, "ab\nab\n"},
		{"a pause counts only when nobody writes in it", false, "", func(m *meetingPoint) {
			m.say(0, "half")
			for range 40 {
				m.after(soon / 2)
				m.say(1, ".\n")
			}
			m.say(0, "whole\n")
		}, strings.Repeat(".\n", 40) + "halfwhole\n"},
		{"but not for ever", false, "", func(m *meetingPoint) {
			m.say(0, "prompt")
			for range 100 {
				m.after(soon / 2)
				m.say(1, ".\n")
			}
			m.after(patience)
		}, strings.Repeat(".\n", 99) + "prompt\n.\n"},
		{"who comes waits for the end", false, "", func(m *meetingPoint) {
			m.say(0, "long")
			m.after(soon)
			m.say(1, "other\n")
			m.say(2, "third\n")
			m.say(1, "other 2\n")
			m.after(patience / 2)
			m.say(0, " line\n")
		}, "long line\nother\nthird\nother 2\n"},
		{"not longer than patience", false, "", func(m *meetingPoint) {
			m.say(0, "prompt> ")
			m.after(soon)
			m.say(1, "other\n")
			m.say(2, "thi")
			m.after(patience)
			m.say(1, "then\n")
			m.say(0, "rest\n")
			m.after(patience)
			m.say(0, "at once\n")
		}, "prompt> \nother\nthi\nthen\nrest\nat once\n"},
		{"with prefixes", false, "[p]:", func(m *meetingPoint) {
			m.say(0, "prompt> ")
			m.after(patience)
			m.say(1, "other\n")
			m.after(patience)
			m.say(0, "rest\n")
		}, "[p]:prompt> \n[p]:other\n[p]:rest\n"},
		{"a newline that comes late is there already", false, "", func(m *meetingPoint) {
			m.say(0, "half")
			m.after(soon)
			m.say(1, "other\n")
			m.after(patience)
			m.say(0, "\n")
			m.say(0, "more\n")
		}, "half\nother\nmore\n"},
		{"nobody waits for a stream that has ended", false, "", func(m *meetingPoint) {
			m.say(0, "no end")
			m.after(soon)
			m.say(1, "waits\n")
			m.streams[0].finish(m.clock)
			m.say(2, "does not\n")
		}, "no end\nwaits\ndoes not\n"},
		{"the end of one stream adds nothing", false, "", func(m *meetingPoint) {
			m.say(0, "no end")
			m.streams[0].finish(m.clock)
		}, "no end"},
		{"bars share a line of a terminal", true, "", func(m *meetingPoint) {
			m.say(0, "\r10%|###")
			m.say(1, "\r10%|#")
			m.say(0, "\r20%|###")
			m.say(0, "\r30%|###")
			m.say(2, "line\n")
		}, "\r10%|###" + eraseLine + "\r10%|#" + eraseLine + "\r20%|###\r30%|###\nline\n"},
		{"a line takes the place of a bar that was erased", true, "", func(m *meetingPoint) {
			m.say(0, "\r10%|###")
			m.say(0, "\r        \r")
			m.say(1, "line\n")
			m.say(0, "\r20%|###")
		}, "\r10%|###\r        \r" + eraseRest + "line\n\r20%|###"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := newMeetingPoint(tc.terminal, tc.prefix)
			tc.do(m)
			require.Equal(t, tc.want, m.got.String())
			m.close()
		})
	}
}

func TestTheLaunchersOwnLines(t *testing.T) {
	m := newMeetingPoint(true, "")
	l := &Logs{console: [2]*output{1: m.output}}
	own := l.Stderr()
	say := func(text string) {
		n, err := own.Write([]byte(text))
		require.NoError(t, err)
		require.Equal(t, len(text), n)
	}
	say("first\n")
	m.say(0, "prompt> ")
	m.after(rawDelay)
	m.say(1, "waits\n")
	say("at once\n")
	m.say(0, "answer\n")
	own.FreshLine()
	m.say(0, "\r10%|#")
	say("line\n")
	m.say(0, "no end")
	m.after(rawDelay)
	own.FreshLine()
	own.FreshLine()
	require.Equal(t, "first\nprompt> \nat once\nwaits\nanswer\n\r10%|#\nline\nno end\n", m.got.String())
	m.close()
}

// The status line of the launcher is replaced by whatever comes next, and ends nothing.
func TestTheLaunchersStatusLine(t *testing.T) {
	m := newMeetingPoint(true, "")
	own := (&Logs{console: [2]*output{1: m.output}}).Stderr()
	say := func(text string) {
		_, err := own.Write([]byte(text))
		require.NoError(t, err)
	}
	say("waits 2\x1b[K\r")
	say("waits 1\x1b[K\r")
	say("line\n")
	say("waits 0\x1b[K\r")
	own.FreshLine()
	m.say(0, "worker\n")
	require.Equal(t, "waits 2\x1b[K\rwaits 1\x1b[K\r"+eraseRest+"line\nwaits 0\x1b[K\r"+eraseRest+"worker\n",
		m.got.String())
	m.close()
}

// TestALoggerOnAConsoleThatIsGone: the warning about a console is written to that console, by a logger that may be
// writing to it.
func TestALoggerOnAConsoleThatIsGone(t *testing.T) {
	r := newRig(t, Config{Dir: os.DevNull})
	_, gone := pipe(t)
	require.NoError(t, gone.Close())
	r.console[1].write = gone.Write
	r.cfg.Logger = slog.New(slog.NewTextHandler(r.Stderr(), nil))
	r.cfg.Logger.Info("lost, too")
	run(t, worker(t, r.begin(t), 0), sh("echo lost >&2"))
	require.Greater(t, r.console[1].dropped.Load(), int64(len("lost\n")))
}

// TestWhatWaitsIsBounded: and it goes out in order.
func TestWhatWaitsIsBounded(t *testing.T) {
	m := newMeetingPoint(false, "")
	m.say(0, "prompt> ")
	m.after(rawDelay)
	line := strings.Repeat("x", 1000) + "\n"
	n := 0
	for ; m.heldBytes+len(line) <= maxHeld-gap; n++ {
		m.say(1, line)
	}
	require.Equal(t, "prompt> ", m.got.String())
	m.say(1, line)
	m.say(1, line)
	require.Zero(t, m.heldBytes)
	require.Equal(t, "prompt> \n"+strings.Repeat(line, n+2), m.got.String())
	m.close()
}

func TestWhatWaitsGoesOutByItself(t *testing.T) {
	r := newRig(t, Config{Dir: os.DevNull})
	a := r.begin(t)
	w := [2]*Worker{worker(t, a, 0), worker(t, a, 1)}
	first := sh("printf 'prompt> '; read x")
	stdin, err := first.StdinPipe()
	require.NoError(t, err)
	start(t, w[0], first)
	eventually(t, "the prompt", func() bool { return r.out.String() == "prompt> " })
	run(t, w[1], sh("echo other"))
	eventually(t, "the other line", func() bool { return r.out.String() == "prompt> \nother\n" })
	require.NoError(t, stdin.Close())
	a.Close()
}

// TestLinesOfManyRanksStayWhole: four ranks write each line in four pieces to both streams.
func TestLinesOfManyRanksStayWhole(t *testing.T) {
	const ranks, perStream = 4, 1000
	for _, console := range []string{"pipe", "file", "pty"} {
		for name, cfg := range map[string]Config{"raw": {}, "tee": {Tee: all}} {
			t.Run(console+"/"+name, func(t *testing.T) {
				check := &numbered{next: map[string]int{}, prefix: func(tag string) string {
					if cfg.Tee == nil {
						return ""
					}
					return "[default" + tag[:1] + "]:"
				}}
				for rank := range ranks { // before anybody writes
					check.next[strconv.Itoa(rank)+"o"], check.next[strconv.Itoa(rank)+"e"] = 0, 0
				}
				cfg.Dir = t.TempDir()
				con, ended := consoleFile(t, console, check)
				cfg.Stdout, cfg.Stderr = con, con
				r := newRig(t, cfg)
				a := r.begin(t)
				var cmds []*exec.Cmd
				for rank := range ranks {
					tag := strconv.Itoa(rank)
					w := worker(t, a, rank)
					cmd := helper("parts", tag, strconv.Itoa(perStream))
					start(t, w, cmd)
					cmds = append(cmds, cmd)
				}
				for _, cmd := range cmds {
					require.NoError(t, cmd.Wait())
				}
				require.NoError(t, r.Close())
				con.Close()
				ended()
				require.NoError(t, check.err)
				for tag, n := range check.next {
					require.Equal(t, perStream, n, tag)
				}
			})
		}
	}
}

// consoleFile returns a console of a kind, and what is to be called after it was closed: to gets all that was written.
func consoleFile(t *testing.T, kind string, to io.Writer) (con *os.File, ended func()) {
	t.Helper()
	if kind == "file" {
		path := filepath.Join(t.TempDir(), "console")
		f, err := os.Create(path)
		require.NoError(t, err)
		return f, func() {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			to.Write(text)
		}
	}
	r, w := io.Reader(nil), (*os.File)(nil)
	if kind == "pty" {
		r, w = terminal(t)
	} else {
		r, w = pipe(t)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		io.Copy(to, r) // of a terminal, it ends with EIO
	}()
	return w, func() { <-done }
}
