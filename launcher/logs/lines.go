package logs

import (
	"bytes"
	"time"
)

const (
	// maxLine is the longest piece of a line that is held back for the rest.
	maxLine = 64 << 10
	// maxOut is when collected output is sent before the end of the input.
	maxOut = 128 << 10
	// partialDelay is how long a tee'd line without its end is held back: prompts appear, ordinary lines stay whole.
	partialDelay = time.Second
	// rawDelay is how long a raw line without its end is held back when no other stream writes. A line that is written in
	// pieces stays whole, and a prompt's delay is too short to see.
	rawDelay = 20 * time.Millisecond
	// foldEvery is how often a progress bar shows a state that is overwritten later.
	foldEvery = 5 * time.Second
)

// lines turns the bytes of one stream into output for a reader of many streams: whole lines with a prefix. Of a line
// that is overwritten with \r (a progress bar) it sends only the last state, and one state each foldEvery. It has no
// clock and does no I/O; it passes collected output to send.
type lines struct {
	prefix []byte
	fold   bool
	raw    bool             // a last line without its end stays without
	match  [][]byte         // when not nil: only lines that contain one of these
	hold   time.Duration    // how long an unfinished line is held back
	by     owner            // see output.put
	quiet  func() time.Time // see output.quiet
	send   func(piece, time.Time)
	leave  func() // nothing follows

	now time.Time // of the last call

	out  []byte // a gap and the prefix as scratch space for send, then the output
	cont bool   // out continues a line sent before

	pend   []byte    // the part of the current line that is not in out yet; no \r in it when folding
	shown  bool      // the beginning of the current line is in out, or sent
	cr     bool      // the last byte was \r: a newline makes it a line end, anything else overwrites the line
	over   bool      // a \r was seen on this line
	born   time.Time // of the first byte of pend
	stated time.Time // when over: of the first \r, or of the last state put out
}

// feed takes the next bytes of the stream.
func (l *lines) feed(b []byte, now time.Time) {
	l.now = now
	if len(l.prefix) == 0 && !l.fold && l.match == nil {
		l.pass(b, now)
		return
	}
	folding := l.fold && (l.cr || bytes.IndexByte(b, '\r') >= 0)
	for len(b) > 0 {
		i := bytes.IndexByte(b, '\n')
		text := b
		if i >= 0 {
			text = b[:i]
		}
		if folding {
			text = l.overwrite(text, now)
		}
		if i < 0 {
			l.add(text, now)
			return
		}
		l.end(text)
		b = b[i+1:]
	}
}

// pass is feed for a stream that needs no change: lines are only kept whole.
func (l *lines) pass(b []byte, now time.Time) {
	if i := bytes.LastIndexByte(b, '\n'); i >= 0 {
		l.end(b[:i])
		b = b[i+1:]
	}
	l.add(b, now)
}

// add keeps text of a line with an unknown end.
func (l *lines) add(text []byte, now time.Time) {
	if len(l.pend) == 0 {
		l.born = now
	}
	for len(l.pend)+len(text) >= maxLine {
		n := maxLine - len(l.pend)
		l.pend = append(l.pend, text[:n]...)
		l.show()
		text = text[n:]
	}
	l.pend = append(l.pend, text...)
}

// end puts out the current line; text is its last part.
func (l *lines) end(text []byte) {
	if l.match != nil {
		l.pend = append(l.pend, text...) // a needle may lie across the two
		text = nil
	}
	if l.wanted() {
		l.begin()
		l.out = append(l.out, l.pend...)
		l.out = append(l.out, text...)
		l.out = append(l.out, '\n')
	}
	l.pend = l.pend[:0]
	l.shown, l.cr, l.over = false, false, false
	if len(l.out) >= maxOut {
		l.flush()
	}
}

// show puts out the current line so far, and leaves it open.
func (l *lines) show() {
	if l.wanted() {
		l.begin()
		l.out = append(l.out, l.pend...)
		l.shown = true
	}
	l.pend = l.pend[:0]
	if len(l.out) >= maxOut {
		l.flush()
	}
}

func (l *lines) begin() {
	if len(l.out) == 0 {
		l.out = append(append(l.out, eraseLine...), l.prefix...)
		l.cont = l.shown
	}
	if !l.shown {
		l.out = append(l.out, l.prefix...)
	}
}

// wanted reports whether the line is sent; once its beginning was, the rest is.
func (l *lines) wanted() bool {
	if l.match == nil || l.shown {
		return true
	}
	for _, m := range l.match {
		if bytes.Contains(l.pend, m) {
			return true
		}
	}
	return false
}

// overwrite handles the \r in text, which has no newline, and returns the rest after the last one.
func (l *lines) overwrite(text []byte, now time.Time) []byte {
	for {
		if l.cr {
			text = bytes.TrimLeft(text, "\r") // a terminal in between makes \r\r\n of \r\n
			if len(text) == 0 {
				return nil
			}
			l.supersede(now)
		}
		i := bytes.IndexByte(text, '\r')
		if i < 0 {
			return text
		}
		l.add(text[:i], now)
		l.cr = true
		if !l.over {
			l.over, l.stated = true, now
		}
		text = text[i+1:]
	}
}

// supersede drops the current state of an overwritten line, unless it is time to show one.
func (l *lines) supersede(now time.Time) {
	due := len(l.pend) > 0 && now.Sub(l.stated) >= foldEvery
	if due {
		l.stated = now
	}
	if due || l.shown {
		l.end(nil)
		l.over = true
	}
	l.pend, l.cr = l.pend[:0], false
}

// due returns when the unfinished line is to be shown; zero when there is none.
func (l *lines) due() time.Time {
	if len(l.pend) == 0 {
		return time.Time{}
	}
	if !l.fold && bytes.IndexByte(l.pend[:len(l.pend)-1], '\r') >= 0 {
		return l.born // a bar, drawn as a whole
	}
	due := later(l.born.Add(l.hold), earlier(l.quiet(), l.born.Add(partialDelay)))
	if l.over {
		due = later(due, l.stated.Add(foldEvery))
	}
	return due
}

// partial shows the unfinished line.
func (l *lines) partial(now time.Time) {
	l.now = now
	if len(l.pend) > 0 {
		l.show()
		l.stated = now
	}
}

// finish is the end of the stream. A last line without its end gets one, except in raw output.
func (l *lines) finish(now time.Time) {
	l.partial(now)
	if l.shown && !l.raw {
		l.end(nil)
	}
	l.flush()
	l.leave()
}

// flush sends the collected output.
func (l *lines) flush() {
	if len(l.out) > 0 {
		l.send(piece{l.by, l.out, gap + len(l.prefix), l.cont}, l.now)
		l.out = l.out[:0]
	}
}
