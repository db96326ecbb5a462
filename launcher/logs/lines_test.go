package logs

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// scope runs lines through an output, as a pump does, and collects what is written.
type scope struct {
	*lines
	got  strings.Builder
	sent int // the longest write
	now  time.Time
}

func newScope(l lines) *scope {
	s := &scope{now: time.Unix(1e9, 0)}
	out := &output{now: func() time.Time { return s.now }, write: func(p []byte) (int, error) {
		s.sent = max(s.sent, len(p))
		return s.got.Write(p)
	}}
	s.lines = out.tee(l)
	return s
}

func teeScope() *scope {
	return newScope(lines{prefix: []byte("[p]:"), fold: true, hold: partialDelay})
}

func (s *scope) say(text string) {
	s.feed([]byte(text), s.now)
	if due := s.due(); !due.IsZero() && !due.After(s.now) {
		s.partial(s.now)
	}
	s.flush()
}

// after lets time pass, with the timer of the pump.
func (s *scope) after(d time.Duration) {
	end := s.now.Add(d)
	if due := s.due(); !due.IsZero() && !due.After(end) {
		s.partial(due)
		s.flush()
	}
	s.now = end
}

func TestLines(t *testing.T) {
	tee := lines{prefix: []byte("[p]:"), fold: true, hold: partialDelay}
	rawPipe := lines{raw: true, fold: true, hold: rawDelay}
	rawTerminal := lines{raw: true, hold: rawDelay}
	type step struct {
		text  string
		after time.Duration
	}
	say := func(texts ...string) (steps []step) {
		for _, s := range texts {
			steps = append(steps, step{text: s})
		}
		return steps
	}
	for _, tc := range []struct {
		name  string
		lines lines
		steps []step
		want  string
	}{
		{"lines", tee, say("a\nb\n"), "[p]:a\n[p]:b\n"},
		{"empty lines", tee, say("\n\na\n"), "[p]:\n[p]:\n[p]:a\n"},
		{"line in pieces", tee, say("a", "b", "c\nd\n"), "[p]:abc\n[p]:d\n"},
		{"last line without its end", tee, say("a\nb"), "[p]:a\n[p]:b\n"},
		{"invalid UTF-8", tee, say("\xff\xfe\x00\n"), "[p]:\xff\xfe\x00\n"},
		{"prompt after the delay, then its answer", tee, []step{{"(Pdb) ", time.Second}, {"1\nx\n", 0}},
			"[p]:(Pdb) 1\n[p]:x\n"},
		{"CRLF", tee, say("a\r\nb\r\n"), "[p]:a\n[p]:b\n"},
		{"CRLF cut in the middle", tee, say("a\r", "\nb\n"), "[p]:a\n[p]:b\n"},
		{"CR CR LF", tee, say("a\r\r", "\r\nb\n"), "[p]:a\n[p]:b\n"},
		{"bar with leading CR", tee, say("\r 0%", "\r50%", "\r100%\ndone\n"), "[p]:100%\n[p]:done\n"},
		{"bar with trailing CR", tee, say("0%\r", "50%\r", "100%\r", "\ndone\n"), "[p]:100%\n[p]:done\n"},
		{"bar in one write", tee, say("\r0%\r50%\r100%\n"), "[p]:100%\n"},
		{"bar erased at its end", tee, say("\r0%\r   \rdone\n"), "[p]:done\n"},
		{"bar at the end of the stream", tee, say("\r0%\r50%"), "[p]:50%\n"},
		{"slow bar shows a state each 5 s", tee, []step{
			{"\r0%", 3 * time.Second}, {"\r20%", 3 * time.Second}, {"\r40%", 3 * time.Second},
			{"\r60%", 3 * time.Second}, {"\r80%", 500 * time.Millisecond}, {"\r100%\n", 0},
		}, "[p]:20%\n[p]:60%\n[p]:100%\n"},
		{"fast bar shows a state each 5 s", tee, slices.Concat(slices.Repeat([]step{{"\rbar", 100 * time.Millisecond}}, 120),
			say("\rend\n")), "[p]:bar\n[p]:bar\n[p]:end\n"},
		{"bar that stops shows its state", tee, []step{{"\r0%\r50%", 6 * time.Second}, {"\n", 0}}, "[p]:50%\n"},
		{"text, a prompt, then a bar over it", tee,
			[]step{{"wait", 2 * time.Second}, {"\r1%\r2%\n", 0}}, "[p]:wait\n[p]:2%\n"},

		{"raw to a pipe", rawPipe, say("a", "b\n", "c"), "ab\nc"},
		{"raw bar to a pipe", rawPipe, say("\r0%", "\r50%", "\r100%", "\nend"), "100%\nend"},
		{"raw text, then a bar over it, to a pipe", rawPipe,
			[]step{{"run ", time.Second}, {"\r1%", 0}, {"\r2%\n", 0}}, "run \n2%\n"},
		{"raw to a terminal", rawTerminal, say("a", "\r0%", "\r50%", "\r\n"), "a\r0%\r50%\r\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newScope(tc.lines)
			for _, st := range tc.steps {
				s.say(st.text)
				s.after(st.after)
			}
			s.finish(s.now)
			require.Equal(t, tc.want, s.got.String())
		})
	}
}

func TestLinesAreHeldBack(t *testing.T) {
	s := teeScope()
	s.say("no end yet")
	require.Empty(t, s.got.String(), "a line in pieces must not be cut at once")
	s.after(partialDelay)
	require.Equal(t, "[p]:no end yet", s.got.String())

	s = newScope(lines{raw: true, fold: true, hold: rawDelay})
	s.say("(Pdb) ")
	require.Empty(t, s.got.String())
	s.after(rawDelay)
	require.Equal(t, "(Pdb) ", s.got.String(), "raw output is prompt")

	s = newScope(lines{raw: true, hold: rawDelay})
	s.say("\r 10%|#")
	require.Equal(t, "\r 10%|#", s.got.String(), "a bar on a terminal at once")
}

func TestRawKeepsLinesTogetherInAFlood(t *testing.T) {
	s := newScope(lines{raw: true, hold: rawDelay})
	s.feed([]byte("one\ntw"), s.now) // a read that filled the buffer: the pump does not ask for the rest at once
	s.flush()
	require.Equal(t, "one\n", s.got.String())
	s.say("o\n")
	require.Equal(t, "one\ntwo\n", s.got.String())
}

func TestLongLine(t *testing.T) {
	for _, tc := range []struct {
		name  string
		lines lines
		want  func(string) string
	}{
		{"tee", lines{prefix: []byte("[p]:"), fold: true, hold: partialDelay},
			func(s string) string { return "[p]:" + s + "\n" }},
		{"raw", lines{raw: true, hold: rawDelay}, func(s string) string { return s }},
		{"raw folded", lines{raw: true, fold: true, hold: rawDelay}, func(s string) string { return s }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newScope(tc.lines)
			long := strings.Repeat("0123456789abcdef", 1<<16)
			for piece := range slices.Chunk([]byte(long), 1000) {
				s.feed(piece, s.now)
				s.flush()
			}
			require.Greater(t, s.got.Len(), len(long)-maxLine, "what does not fit is out")
			require.LessOrEqual(t, s.sent, 2*maxLine)
			require.LessOrEqual(t, cap(s.pend), 2*maxLine)
			s.finish(s.now)
			require.Equal(t, tc.want(long), s.got.String())
		})
	}
}

func TestMatch(t *testing.T) {
	for _, tc := range []struct{ name, in, want string }{
		{"some", "a ERROR\nb\nERROR c\n", "[p]:a ERROR\n[p]:ERROR c\n"},
		{"either", "x warn y\nz\n", "[p]:x warn y\n"},
		{"the last line", "a\nERROR", "[p]:ERROR\n"},
		{"a folded line", "ERROR\rfine\nfine\rERROR\n", "[p]:ERROR\n"},
		{"long line goes on to its end", "ERROR" + strings.Repeat("x", maxLine) + "y\nz\n",
			"[p]:ERROR" + strings.Repeat("x", maxLine) + "y\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, size := range []int{1, 7, 1 << 20} {
				s := newScope(lines{
					prefix: []byte("[p]:"), fold: true, hold: partialDelay, match: [][]byte{[]byte("ERROR"), []byte("warn")},
				})
				for piece := range slices.Chunk([]byte(tc.in), size) {
					s.feed(piece, s.now)
				}
				s.finish(s.now)
				require.Equal(t, tc.want, s.got.String(), "pieces of %d", size)
			}
		})
	}
}

// foldAll is what a reader of whole lines sees: the state after the last \r of each.
func foldAll(in string) string {
	var want strings.Builder
	state := func(s string) string {
		s = strings.TrimRight(s, "\r")
		return s[strings.LastIndexByte(s, '\r')+1:]
	}
	for line := range strings.Lines(in) {
		text, ended := strings.CutSuffix(line, "\n")
		if text = state(text); ended || text != "" {
			want.WriteString("[p]:" + text + "\n")
		}
	}
	return want.String()
}

func FuzzLines(f *testing.F) {
	f.Add([]byte("one\ntwo\n\nthree"), uint16(3), false)
	f.Add([]byte("\r0%\r50%\r\r\n\rx\r"), uint16(1), false)
	f.Add(bytes.Repeat([]byte("long"), maxLine/4+9), uint16(999), true)
	f.Add([]byte("a\xff\r\nb\r\n\r\n"), uint16(2), true)
	f.Fuzz(func(t *testing.T, in []byte, size uint16, pauses bool) {
		s := teeScope()
		for piece := range slices.Chunk(in, max(1, int(size), len(in)/500)) {
			s.say(string(piece))
			if pauses {
				s.after(2 * time.Second)
			}
			if cap(s.pend) > 4*maxLine || cap(s.out) > 4*(maxOut+2*maxLine) {
				t.Fatalf("unbounded: %d and %d bytes", cap(s.pend), cap(s.out))
			}
		}
		s.finish(s.now)
		got := s.got.String()
		if bytes.IndexByte(in, '\r') < 0 {
			want := string(in)
			if want != "" && !strings.HasSuffix(want, "\n") {
				want += "\n"
			}
			stripped := strings.ReplaceAll("\n"+got, "\n[p]:", "\n")[1:]
			if !strings.Contains(want, "[p]:") {
				require.Equal(t, want, stripped)
			}
			return
		}
		for line := range strings.Lines(got) {
			require.True(t, strings.HasPrefix(line, "[p]:"), "%q", line)
		}
		if !pauses && len(in) < maxLine {
			require.Equal(t, foldAll(string(in)), got)
		}
	})
}
