package text

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"testing"

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
