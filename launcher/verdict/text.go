package verdict

import (
	"bytes"
	"strings"

	"dlrover-run/internal/text"
)

const ellipsis = "…"

// clean makes s fit on a terminal's line, in at most limit bytes. Output of a worker may hold terminal commands and
// text that reverses the direction of writing.
func clean(s string, limit int) string { return text.Head(text.EscapeLine(s), limit) }

// Plain is the output of a program as a terminal would show it. It has no escape sequences, of a line that was
// overwritten with \r only the last state, and U+FFFD for bytes that are no UTF-8.
func Plain(output []byte) string {
	var b strings.Builder
	b.Grow(len(output))
	for line := range bytes.Lines(output) {
		content, ended := bytes.CutSuffix(line, []byte("\n"))
		content = bytes.TrimRight(unescaped(content), "\r")
		b.Write(content[bytes.LastIndexByte(content, '\r')+1:])
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

// escapeLen is the length of the escape sequence (ECMA-48) that begins with an ESC before s. A string such as a window
// title that does not end in its line is none: the text after it could be the error.
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
