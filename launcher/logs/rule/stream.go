package rule

import (
	"bytes"
	"time"
)

// maxLine is how much of a line counts, in bytes.
const maxLine = 8 << 10

// Stream makes lines of a worker's output to one of its streams. A carriage return ends a line, too: otherwise a
// progress bar, which is drawn again and again, is one line.
type Stream struct {
	w    *Worker
	pend []byte // the beginning of a line that has no end yet; at most maxLine
}

// NewStream returns a stream of w's.
func NewStream(w *Worker) *Stream { return &Stream{w: w} }

// Feed takes bytes that were read at now. It keeps nothing of b.
func (s *Stream) Feed(b []byte, now time.Duration) (found []Finding) {
	if len(s.w.rules) == 0 {
		return nil
	}
	if len(s.pend) > 0 {
		i := bytes.IndexAny(b, "\r\n")
		if i < 0 {
			s.keep(b)
			return nil
		}
		s.keep(b[:i])
		found = s.w.lines(s.pend, now, found)
		s.pend, b = s.pend[:0], b[i+1:]
	}
	whole := lastEnd(b) + 1
	s.keep(b[whole:])
	return s.w.lines(b[:whole], now, found)
}

func (s *Stream) keep(b []byte) { s.pend = append(s.pend, b[:min(len(b), maxLine-len(s.pend))]...) }

func lastEnd(b []byte) int {
	return max(bytes.LastIndexByte(b, '\n'), bytes.LastIndexByte(b, '\r'))
}

// Skip reports that a part of the stream was not read.
func (s *Stream) Skip(now time.Duration) {
	s.pend = s.pend[:0]
	s.w.Skip(now)
}

// lines takes whole lines. A rule with a literal looks at nothing but the lines that have it.
func (w *Worker) lines(text []byte, now time.Duration, found []Finding) []Finding {
	for i := range w.rules {
		s := &w.rules[i]
		for rest := text; ; {
			line, after, ok := lineWith(rest, s.literal)
			if !ok {
				break
			}
			if f, ok := w.line(s, line, now); ok {
				found = append(found, f)
			}
			rest = after
		}
	}
	return found
}
