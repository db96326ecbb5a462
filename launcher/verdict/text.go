package verdict

import (
	"bytes"
	"strconv"
	"strings"
	"unicode/utf8"
)

const ellipsis = "…"

// clean makes s fit on a terminal's line: whatever does not print is escaped as in Go source, and at most limit bytes
// are left. Output of a worker may hold terminal commands and text that reverses the direction of writing.
func clean(s string, limit int) string {
	var b strings.Builder
	cut := 0 // where b ends if an ellipsis must follow
	for i, r := range s {
		piece := string(r)
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(s[i:], piece): // a byte that is no UTF-8
			piece = `\x` + strconv.FormatUint(uint64(s[i]), 16)
		case !strconv.IsPrint(r):
			piece = strings.Trim(strconv.QuoteRune(r), "'")
		}
		if b.Len()+len(piece) > limit {
			return b.String()[:cut] + ellipsis
		}
		b.WriteString(piece)
		if b.Len() <= limit-len(ellipsis) {
			cut = b.Len()
		}
	}
	return b.String()
}

// head is the beginning of s, cut to limit bytes.
func head(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit-len(ellipsis)], "") + ellipsis
}

// ends are the beginning and the end of s, cut to limit bytes together.
func ends(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return head(s, limit-limit/4) + strings.TrimPrefix(tail(s, limit/4), ellipsis)
}

// tail is the end of s, cut to limit bytes.
func tail(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return ellipsis + strings.ToValidUTF8(s[len(s)-limit+len(ellipsis):], "")
}

// Plain is what a person reads of the output of a program that may have written for a terminal: without escape
// sequences, of a line that was overwritten with \r the last state, and U+FFFD for what is no UTF-8.
func Plain(output []byte) string {
	var b strings.Builder
	b.Grow(len(output))
	for line := range bytes.Lines(output) {
		text, ended := bytes.CutSuffix(line, []byte("\n"))
		text = bytes.TrimRight(unescaped(text), "\r")
		b.Write(text[bytes.LastIndexByte(text, '\r')+1:])
		if ended {
			b.WriteByte('\n')
		}
	}
	return strings.ToValidUTF8(b.String(), "\uFFFD")
}

// unescaped returns line without terminal commands.
func unescaped(line []byte) []byte {
	i := bytes.IndexByte(line, esc)
	if i < 0 {
		return line
	}
	var out []byte
	for ; i >= 0; i = bytes.IndexByte(line, esc) {
		out = append(out, line[:i]...)
		line = line[i+1:]
		line = line[escapeLen(line):]
	}
	return append(out, line...)
}

const esc = '\x1b'

// escapeLen is the length of the escape sequence (ECMA-48) whose ESC was before s. A string such as a window title that
// does not end in its line was none: what looks like it could be the error.
func escapeLen(s []byte) int {
	if len(s) == 0 {
		return 0
	}
	switch s[0] {
	case '[':
		i := 1 + span(s[1:], '0', '?')
		i += span(s[i:], ' ', '/')
		return i + min(1, span(s[i:], '@', '~'))
	case ']', 'P', 'X', '^', '_':
		end := bytes.IndexAny(s, "\x1b\a")
		switch {
		case end < 0:
			return 1
		case s[end] == esc: // of the sequence ESC \ that ends the string, or of another one
			return end
		}
		return end + 1
	}
	i := span(s, ' ', '/')
	return i + min(1, span(s[i:], '0', '~'))
}

// span is how many bytes at the beginning of s are in first to last.
func span(s []byte, first, last byte) (n int) {
	for n < len(s) && s[n] >= first && s[n] <= last {
		n++
	}
	return n
}
