package streams

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func FuzzFrames(f *testing.F) {
	f.Add(Frame{Kind: KindOutput, Std: 2, Node: 7, Rank: -1, Data: []byte("x\n")}.Append(nil))
	f.Add(Frame{Kind: KindDropped, Data: Count(12)}.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, again := NewReader(bytes.NewReader(b)), []byte(nil)
		for {
			frame, err := r.Next()
			if err != nil {
				break
			}
			_ = frame.Count()
			_ = frame.Decode(&Request{})
			again = frame.Append(again)
		}
		require.True(t, bytes.HasPrefix(b, again), "what is read is what was sent")
	})
}

func TestFramesThatAreNone(t *testing.T) {
	good := Frame{Kind: KindExit, Rank: 3, Data: JSON(Exit{Code: 7})}.Append(nil)
	f, err := NewReader(bytes.NewReader(good)).Next()
	require.NoError(t, err)
	var e Exit
	require.NoError(t, f.Decode(&e))
	require.Equal(t, Exit{Code: 7}, e)
	_, err = NewReader(bytes.NewReader(good[:len(good)-1])).Next()
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	_, err = NewReader(strings.NewReader("HTTP/1.1 400 Bad Request")).Next()
	require.ErrorIs(t, err, errFrame)
	require.ErrorIs(t, Frame{Data: []byte("{")}.Decode(&e), errFrame)
}

func TestCheckArgs(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"good":      {[]string{"ls", ""}, ""},
		"none":      {nil, "no command"},
		"empty":     {[]string{""}, "no command"},
		"zero byte": {[]string{"ls", "a\x00b"}, "zero byte"},
		"long":      {[]string{strings.Repeat("x", maxArgs)}, "at most"},
		"escaped":   {[]string{strings.Repeat("\x01", maxArgs/2)}, "at most"},
	} {
		t.Run(name, func(t *testing.T) {
			err := Request{Args: c.args}.CheckArgs()
			if c.want == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.want)
			}
		})
	}
}

// shown collects lines.
func shown() (*Lines, func() []string) {
	var got []string
	l := &Lines{Emit: func(s Source, line []byte) { got = append(got, fmt.Sprintf("%d:%s", s.Rank, line)) }}
	return l, func() []string { out := got; got = nil; return out }
}

func TestLines(t *testing.T) {
	l, got := shown()
	at := time.Unix(0, 0)
	a, b := Source{Rank: 1}, Source{Rank: 2}
	l.Write(a, []byte("one\ntw"), at)
	l.Write(b, []byte("x\r\n\n"), at)
	require.Equal(t, []string{"1:one", "2:x", "2:"}, got())
	l.Quiet(at.Add(showAfter / 2))
	require.Empty(t, got())
	l.Write(a, []byte("o\n"), at)
	require.Equal(t, []string{"1:two"}, got(), "the line was waited for")
	l.Write(a, []byte("prompt> "), at)
	l.Quiet(at.Add(showAfter))
	require.Equal(t, []string{"1:prompt> "}, got())
	l.Write(a, []byte("rest"), at)
	l.Finish()
	require.Equal(t, []string{"1:rest"}, got())
	require.Empty(t, l.open, "nothing is kept of what is quiet")
}

func TestLinesOfProgressBars(t *testing.T) {
	l, got := shown()
	at := time.Unix(1, 0)
	for i := range 30 {
		l.Write(Source{}, fmt.Appendf(nil, "\r%d%%", i), at.Add(time.Duration(i)*100*time.Millisecond))
	}
	l.Write(Source{}, []byte("\rdone\n"), at.Add(3*time.Second))
	require.Equal(t, []string{"0:0%", "0:10%", "0:20%", "0:done"}, got())
}

func TestLinesWithGaps(t *testing.T) {
	l, got := shown()
	at := time.Unix(0, 0)
	l.Write(Source{}, []byte("whole\nhal"), at)
	l.Cut(Source{}, at)
	l.Write(Source{}, []byte("f a line\nnext\n"), at)
	require.Equal(t, []string{"0:whole", "0:hal", "0:next"}, got())
	long := strings.Repeat("x", 3*maxLine)
	l.Write(Source{}, []byte(long), at)
	l.Finish()
	parts := got()
	require.Len(t, parts, 3)
	for _, p := range parts {
		require.LessOrEqual(t, len(p), maxLine+2)
	}
}

func FuzzLines(f *testing.F) {
	f.Add([]byte("a\r\nb\rc\n\r\r\n"), uint8(3))
	f.Fuzz(func(t *testing.T, b []byte, cut uint8) {
		size := 0
		l := &Lines{Emit: func(_ Source, line []byte) {
			require.False(t, bytes.ContainsAny(line, "\r\n"))
			size += len(line)
		}}
		n := min(int(cut), len(b))
		l.Write(Source{}, b[:n], time.Unix(0, 0))
		l.Write(Source{}, b[n:], time.Unix(9, 0))
		l.Finish()
		require.LessOrEqual(t, size, len(b))
		require.LessOrEqual(t, len(l.open), 1)
	})
}

func TestLastLines(t *testing.T) {
	for _, c := range []struct {
		text string
		n    int
		want string
	}{
		{"a\nb\nc\n", 2, "b\nc\n"}, {"a\nb\nc", 2, "b\nc"}, {"a\nb\n", 9, "a\nb\n"}, {"a\nb\n", 0, ""}, {"a\nb\n", -1,
			"a\nb\n"},
		{"", 3, ""}, {"\n\n\n", 1, "\n"}, {"a", 1, "a"},
	} {
		require.Equal(t, c.want, string(LastLines([]byte(c.text), c.n)), "%q %d", c.text, c.n)
	}
}
