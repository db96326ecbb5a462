// Package text makes the text of others fit to be shown, kept and sent. Names, arguments and messages may hold escape
// sequences, characters that reverse the direction of writing, invalid UTF-8, and megabytes. Limits are bytes.
package text

import (
	"bytes"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// unfit reports whether r acts on a terminal. Such are the C0 and C1 controls and DEL, marks and overrides of the
// direction of writing, and the separators that some take for the end of a line.
func unfit(r rune) bool {
	return unicode.In(r, unicode.Cc, unicode.Zl, unicode.Zp, unicode.Bidi_Control)
}

// Printable reports whether s can be the name of something: valid UTF-8 that acts on no terminal.
func Printable(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return utf8.ValidString(s) && !strings.ContainsFunc(s, unfit)
		}
	}
	return true
}

// PrintableRule is Printable's rule, for error messages.
const PrintableRule = "need UTF-8 without control characters and without marks of the direction of writing"

// Escape replaces unprintable characters of s as in Go source, except tabs and the ends of lines.
func Escape(s string) string { return escape(s, "\t\n") }

// EscapeLine is Escape onto one line.
func EscapeLine(s string) string { return escape(s, "") }

// Clean replaces each character of s that acts on a terminal by instead, and bytes that are no UTF-8 by U+FFFD.
func Clean(s string, instead rune) string { return clean(s, instead, "") }

// Line is s as one line of valid UTF-8 of at most limit bytes, which are at least three. It ends in … if it is cut.
func Line(s string, limit int) string { return Head(clean(s, ' ', ""), limit) }

// Lines is Line with the tabs and the ends of lines in s.
func Lines(s string, limit int) string { return Head(clean(s, ' ', "\t\n"), limit) }

func clean(s string, instead rune, keep string) string {
	if Printable(s) {
		return s
	}
	return strings.Map(func(r rune) rune {
		if unfit(r) && !strings.ContainsRune(keep, r) {
			return instead
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}

// Clip is the beginning of s in at most limit bytes. Like Head and tail it leaves out bytes that are not UTF-8, so that
// no part of a character stays.
func Clip(s string, limit int) string { return strings.ToValidUTF8(s[:min(len(s), max(limit, 0))], "") }

const more = "…"

// Head is the beginning of s, and … if it is cut, in at most limit bytes, or three.
func Head(s string, limit int) string {
	if len(s) <= limit {
		return Clip(s, limit)
	}
	return Clip(s, limit-len(more)) + more
}

// tail is … if s is cut, and its end, in at most limit bytes, or three.
func tail(s string, limit int) string {
	if len(s) <= limit {
		return Clip(s, limit)
	}
	return more + strings.ToValidUTF8(s[len(s)-max(limit-len(more), 0):], "")
}

// Ends is the beginning and the end of s, and … between them if it is cut, in at most limit bytes, or
// six. Three quarters are the beginning's.
func Ends(s string, limit int) string {
	if len(s) <= limit {
		return Clip(s, limit)
	}
	return Head(s, limit-limit/4) + strings.TrimPrefix(tail(s, limit/4), more)
}

func escape(s, keep string) string {
	if Printable(s) {
		return s
	}
	var b strings.Builder
	for i, r := range s {
		switch n := utf8.RuneLen(r); {
		case r == utf8.RuneError && !strings.HasPrefix(s[i:], string(r)): // a byte that is no UTF-8
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case unfit(r) && !strings.ContainsRune(keep, r):
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		default:
			b.WriteString(s[i : i+n])
		}
	}
	return b.String()
}

// JSON returns a writer that escapes the unfit characters that encoding/json and log/slog leave as they are. Every
// Write must hold whole characters of JSON, or of slog's text, where the ends of lines stay.
func JSON(w io.Writer) io.Writer { return jsonWriter{w} }

type jsonWriter struct{ w io.Writer }

func (j jsonWriter) Write(p []byte) (int, error) {
	raw := func(r rune) bool { return r >= 0x7f && unfit(r) }
	if !bytes.ContainsFunc(p, raw) {
		return j.w.Write(p)
	}
	out := make([]byte, 0, len(p)+32)
	for rest := p; len(rest) > 0; {
		r, n := utf8.DecodeRune(rest)
		if raw(r) {
			out = fmt.Appendf(out, `\u%04x`, r)
		} else {
			out = append(out, rest[:n]...)
		}
		rest = rest[n:]
	}
	if _, err := j.w.Write(out); err != nil {
		return 0, err
	}
	return len(p), nil
}
