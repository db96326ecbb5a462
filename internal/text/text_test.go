package text

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// hostile is raw text and what becomes of it on a line.
var hostile = map[string]string{
	"\x1b[2J\x1b]0;title\a":   `\x1b[2J\x1b]0;title\a`,
	"a\rb\bc\x00d":            `a\rb\bc\x00d`,
	"del\x7f":                 `del\x7f`,
	"c1\u009b31m\u0085":       `c1\u009b31m\u0085`,
	"bidi\u202egnp\u202c":     `bidi\u202egnp\u202c`,
	"isolate\u2066x\u2069":    `isolate\u2066x\u2069`,
	"marks\u200e\u200f\u061c": `marks\u200e\u200f\u061c`,
	"line\u2028par\u2029":     `line\u2028par\u2029`,
	"bad\xff\xc0utf8\x9b":     `bad\xff\xc0utf8\x9b`,
}

var harmless = []string{
	"", "job-7", `back\slash "quoted" 'it'`, "größe 训练 עבודה 🚀👩\u200d💻", "non\u00a0breaking", "\ufffd", "\ufeff",
}

func TestEscapes(t *testing.T) {
	for raw, want := range hostile {
		require.Equal(t, want, EscapeLine(raw))
		require.Equal(t, "x\n\t"+want+"\n", Escape("x\n\t"+raw+"\n"))
		require.Equal(t, `x\n\t`+want, EscapeLine("x\n\t"+raw))
		require.False(t, Printable(raw), "%q", raw)
	}
	for _, s := range harmless {
		require.Equal(t, s, EscapeLine(s))
		require.Equal(t, s+"\n\t", Escape(s+"\n\t"))
		require.True(t, Printable(s), "%q", s)
	}
	require.False(t, Printable("two\nlines"))
	require.False(t, Printable("a\ttab"))
}

func TestJSON(t *testing.T) {
	for raw := range hostile {
		var b bytes.Buffer
		slog.New(slog.NewJSONHandler(JSON(&b), nil)).Info(raw, "key"+raw, raw)
		require.True(t, Printable(b.String()[:b.Len()-1]), "%q", b.String())
		var got map[string]any
		require.NoError(t, json.Unmarshal(b.Bytes(), &got))
		require.Equal(t, string([]rune(raw)), got["msg"])

		b.Reset()
		slog.New(slog.NewTextHandler(JSON(&b), nil)).Info(raw, "key", raw)
		require.True(t, Printable(b.String()[:b.Len()-1]), "%q", b.String())
	}
	var b bytes.Buffer
	n, err := JSON(&b).Write([]byte("\"größe 🚀\"\n"))
	require.NoError(t, err)
	require.Equal(t, b.Len(), n)
	n, err = JSON(&b).Write([]byte("\u009b"))
	require.NoError(t, err)
	require.Equal(t, 2, n, "of what was given")
	_, err = JSON(broken{}).Write([]byte("\x7f"))
	require.ErrorIs(t, err, errBroken)
}

var errBroken = errors.New("broken")

type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, errBroken }

func TestCut(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{Clip("größe", 10), "größe"},
		{Clip("größe", 6), "größ"},
		{Clip("größe", 5), "gr\u00f6"},
		{Clip("größe", 3), "gr"},
		{Clip("größe", 0), ""},
		{Clip("a\xffb", 9), "ab"},
		{Head("größe", 7), "größe"},
		{Head("größe", 6), "gr…"},
		{Head("größe", 3), "…"},
		{Head("a\xffb", 9), "ab"},
		{tail("größe", 7), "größe"},
		{tail("größe", 6), "…ße"},
		{tail("größe", 5), "…e"},
		{tail("größe", 3), "…"},
		{Ends("0123456789abcdef", 16), "0123456789abcdef"},
		{Ends("0123456789abcdefg", 16), "012345678…g"},
	} {
		require.Equal(t, c.want, c.got)
	}
}

func TestClean(t *testing.T) {
	for s, want := range map[string]string{
		"größe":                  "größe",
		"a\x1b[2Jb\u202ec\u2028": "a_[2Jb_c_",
		"a\xff\xfeb\n":           "a\uFFFDb_",
		"a\tb":                   "a_b",
	} {
		require.Equal(t, want, Clean(s, '_'))
	}
	require.Equal(t, "a b c�", Line("a\nb\tc\xff", 9))
	require.Equal(t, "a b …", Line("a\nb\tc\xff", 7))
	require.Equal(t, "a\nb\tc ", Lines("a\nb\tc\x1b", 9))
}

// No limit is too small for an answer.
func TestTinyLimits(t *testing.T) {
	for limit := -1; limit < 12; limit++ {
		for _, cut := range []func(string, int) string{Clip, Head, tail, Ends, Line, Lines} {
			require.LessOrEqual(t, len(cut("größe 训练 🚀 and more", limit)), max(limit, 6))
		}
	}
}

// Whatever is in a text, what is made of it keeps its limit, is valid UTF-8, and acts on no terminal.
func FuzzText(f *testing.F) {
	for raw := range hostile {
		f.Add(raw, 5)
		f.Add("größe 训练"+raw+"🚀", 12)
	}
	f.Fuzz(func(t *testing.T, s string, limit int) {
		if limit < 6 || limit > 1<<20 {
			limit = 6
		}
		for name, cut := range map[string]func(string, int) string{
			"clip": Clip, "head": Head, "tail": tail, "ends": Ends, "line": Line, "lines": Lines,
		} {
			got := cut(s, limit)
			require.LessOrEqual(t, len(got), limit, name)
			require.True(t, utf8.ValidString(got), "%s: %q", name, got)
			if len(s) <= limit && Printable(s) {
				require.Equal(t, s, got, name)
			}
		}
		require.True(t, Printable(Line(s, limit)))
		require.True(t, Printable(Clean(s, '_')))
		require.True(t, Printable(EscapeLine(s)))
		require.True(t, Printable(strings.NewReplacer("\n", "", "\t", "").Replace(Lines(s, limit))))
		require.Equal(t, Printable(s), EscapeLine(s) == s)
	})
}
