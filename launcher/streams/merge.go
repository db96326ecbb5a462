package streams

import (
	"bytes"
	"time"
)

// Source is one stream of a worker.
type Source struct {
	Node uint16
	Rank int32
	Std  uint8
}

// Bounds of an unfinished line.
const (
	maxLine   = 16 << 10    // bytes; a longer one is shown in parts
	showAfter = time.Second // an unfinished one is shown that has not grown for so long
	barEvery  = time.Second // how often the state of a progress bar is shown
)

// Lines makes whole lines of the output of many workers, in the order in which the lines end. A line that is
// overwritten, as progress bars do by a carriage return, is shown once a second and as it is at last.
type Lines struct {
	// Emit gets a line without its end, which holds until Emit returns.
	Emit func(s Source, line []byte)

	open map[Source]*openLine
}

// openLine is a line without an end so far.
type openLine struct {
	text    []byte
	cr      bool      // the last byte was a carriage return
	cut     bool      // bytes are missing: the text up to the next end of a line is incomplete
	changed time.Time // when text last grew
	shown   time.Time // when a state of the bar was last shown
}

// Write takes output of a worker.
func (l *Lines) Write(s Source, b []byte, now time.Time) {
	if l.open == nil {
		l.open = map[Source]*openLine{}
	}
	o := l.open[s]
	if o == nil {
		o = &openLine{}
		l.open[s] = o
	}
	for len(b) > 0 {
		i := bytes.IndexAny(b, "\r\n")
		if i < 0 {
			l.add(s, o, b, now)
			break
		}
		l.add(s, o, b[:i], now)
		if b[i] == '\n' {
			l.end(s, o)
		} else {
			o.cr = true
		}
		b = b[i+1:]
	}
	if len(o.text) == 0 && !o.cut && o.shown.IsZero() {
		delete(l.open, s)
	}
}

func (l *Lines) add(s Source, o *openLine, b []byte, now time.Time) {
	if len(b) == 0 || o.cut {
		return
	}
	if o.cr {
		l.overwrite(s, o, now)
	}
	o.changed = now
	for len(o.text)+len(b) > maxLine {
		n := maxLine - len(o.text)
		l.Emit(s, append(o.text, b[:n]...))
		o.text, b = o.text[:0], b[n:]
	}
	o.text = append(o.text, b...)
}

// overwrite begins the line again.
func (l *Lines) overwrite(s Source, o *openLine, now time.Time) {
	if len(o.text) > 0 && now.Sub(o.shown) >= barEvery {
		l.Emit(s, o.text)
		o.shown = now
	}
	o.text, o.cr = o.text[:0], false
}

func (l *Lines) end(s Source, o *openLine) {
	if !o.cut && (len(o.text) > 0 || o.shown.IsZero()) {
		l.Emit(s, o.text)
	}
	*o = openLine{text: o.text[:0]}
}

// Cut reports that bytes are missing at this point: the open line is shown as it is, and the following bytes are
// dropped up to the end of their line.
func (l *Lines) Cut(s Source, now time.Time) {
	l.Write(s, nil, now)
	o := &openLine{cut: true}
	if old := l.open[s]; old != nil && len(old.text) > 0 {
		l.Emit(s, old.text)
	}
	l.open[s] = o
}

// Quiet shows the unfinished lines that have not grown for a second. Later additions to them are lines of their own.
func (l *Lines) Quiet(now time.Time) {
	l.flush(func(o *openLine) bool { return now.Sub(o.changed) >= showAfter })
}

// Finish shows all unfinished lines.
func (l *Lines) Finish() { l.flush(func(*openLine) bool { return true }) }

func (l *Lines) flush(due func(*openLine) bool) {
	for s, o := range l.open {
		if due(o) && len(o.text) > 0 {
			l.Emit(s, o.text)
		}
		if due(o) && !o.cut {
			delete(l.open, s)
		}
	}
}

// LastLines is the end of b: its last n lines, and the last one may be unfinished; all for a negative n.
func LastLines(b []byte, n int) []byte {
	if n < 0 {
		return b
	}
	if n == 0 {
		return nil
	}
	end := len(b)
	if end > 0 && b[end-1] == '\n' {
		end--
	}
	for ; n > 0; n-- {
		i := bytes.LastIndexByte(b[:end], '\n')
		if i < 0 {
			return b
		}
		if n == 1 {
			return b[i+1:]
		}
		end = i
	}
	return b
}
