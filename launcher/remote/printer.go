package remote

import (
	"io"
	"strings"
	"sync"
)

// chunk bounds a line; a longer one becomes several.
const chunk = 64 << 10

// buffered is how many bytes of a stream are read at a time.
const buffered = 16 << 10

// Printer prints whole lines of many hosts to one file.
type Printer struct {
	mu sync.Mutex
	w  io.Writer
}

// NewPrinter returns a Printer that writes to w, and drops text that cannot be written.
func NewPrinter(w io.Writer) *Printer { return &Printer{w: w} }

// Write writes lines without a host.
func (p *Printer) Write(text []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.w.Write(text)
}

// of is for the lines of a host.
func (p *Printer) of(host string) *stream { return &stream{to: p, prefix: host + ": "} }

// stream gathers the lines of one host.
type stream struct {
	to     *Printer
	prefix string
	line   string // that has no end yet
	lines  strings.Builder
}

// add takes a line with its end, or a part of one.
func (s *stream) add(text string) {
	s.line += text
	if !strings.HasSuffix(text, "\n") && len(s.line) < chunk {
		return
	}
	s.end()
	if s.lines.Len() >= chunk {
		s.flush()
	}
}

// end ends the line.
func (s *stream) end() {
	if s.line == "" {
		return
	}
	s.lines.WriteString(s.prefix + strings.TrimSuffix(s.line, "\n") + "\n")
	s.line = ""
}

// close prints all.
func (s *stream) close() {
	s.end()
	s.flush()
}

// flush prints the lines that have an end.
func (s *stream) flush() {
	if s.lines.Len() > 0 {
		_, _ = io.WriteString(s.to, s.lines.String())
		s.lines.Reset()
	}
}
