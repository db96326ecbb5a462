package rule

import (
	"bytes"
	"fmt"
	"regexp"
)

// Pattern finds the lines that match an expression.
type Pattern struct {
	expr    *regexp.Regexp
	literal []byte // every line that matches has it; empty: unknown
}

// NewPattern reads an expression in Go's syntax (RE2).
func NewPattern(expr string) (Pattern, error) {
	re, err := regexp.Compile(expr)
	if err != nil {
		return Pattern{}, fmt.Errorf("the expression cannot be used: %w; Go's syntax (RE2) is at "+
			"https://golang.org/s/re2syntax", err)
	}
	return Pattern{re, required(expr)}, nil
}

// String is the expression.
func (p Pattern) String() string { return p.expr.String() }

// Find is the first line of text that matches; nil if none does. Of a line the first 8 KiB count.
func (p Pattern) Find(text []byte) (line []byte) {
	for rest := text; ; {
		one, after, ok := lineWith(rest, p.literal)
		switch {
		case !ok:
			return nil
		case p.expr.Match(one):
			return one
		}
		rest = after
	}
}

// lineWith returns the first line that has the literal, at most maxLine of it, and the text after the line; false if
// there is none.
func lineWith(text, literal []byte) (line, after []byte, ok bool) {
	at := bytes.Index(text, literal)
	if at < 0 || len(text) == 0 {
		return nil, nil, false
	}
	from, to := lastEnd(text[:at])+1, len(text)
	if n := bytes.IndexAny(text[at:], "\r\n"); n >= 0 {
		to = at + n
	}
	return text[from:min(to, from+maxLine)], text[min(to+1, len(text)):], true
}
