package logs

import (
	"bytes"
	"io"
	"os"
	"slices"
	"sync"

	"dlrover-run/internal/openfile"
)

// tail keeps the last max bytes of a stream, and the beginning of the line that they begin in, if that is long. It has
// its own lock, so that it can be read while the pump of the stream is blocked by the console.
type tail struct {
	mu   sync.Mutex
	buf  []byte // grows to max, then is a ring
	next int    // index of the next byte once the buffer is full: also of the oldest byte
	max  int

	written int64  // bytes in all
	line    int64  // of them, after the last newline
	head    []byte // the lines before the newest long line, and its beginning; nil: there has been none
	from    int64  // where that line begins
	until   int64  // where it ends; -1: it goes on

	id        WorkerID // the worker and
	std       Std      // the stream, for followers
	followers []*following
}

func (t *tail) write(p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range t.followers {
		f.Print(t.id, t.std, p)
	}
	for len(p) > 0 {
		piece := p[:min(len(p), longLine)]
		t.keep(piece)
		t.measure(piece)
		p = p[len(piece):]
	}
}

func (t *tail) keep(p []byte) {
	if len(p) >= t.max {
		t.buf, t.next = append(t.buf[:0], p[len(p)-t.max:]...), 0
		return
	}
	if room := t.max - len(t.buf); room > 0 {
		n := min(room, len(p))
		t.buf = append(t.buf, p[:n]...)
		p = p[n:]
	}
	for len(p) > 0 {
		n := copy(t.buf[t.next:], p)
		p = p[n:]
		t.next = (t.next + n) % t.max
	}
}

// An exception's message can be longer than all that is kept, and its class is at its beginning.
const (
	longLine = 8 << 10                  // is kept of the beginning of a line that is longer
	leading  = 4 << 10                  // kept of the text before such a line
	omitted  = "…"                      // stands for dropped text
	longTail = 2 * (leading + longLine) // as much has to be kept of the end for that
)

// measure notices the beginning of a long line while it is still there.
func (t *tail) measure(p []byte) {
	t.written += int64(len(p))
	end := bytes.IndexByte(p, '\n')
	if end >= 0 && t.until < 0 {
		t.until = t.written - int64(len(p)-end)
	}
	if t.line += int64(len(p)); end >= 0 {
		t.line = int64(len(p) - bytes.LastIndexByte(p, '\n') - 1)
	}
	if t.until < 0 && t.head != nil || t.line < longLine || t.max < longTail {
		return
	}
	t.from, t.until = t.written-t.line, -1
	all := t.bytesLocked()
	start := len(all) - int(t.line)
	t.head = bytes.Clone(all[max(0, start-leading) : start+longLine])
}

// withHead puts the head of the line before all if only the end of the line is left.
func (t *tail) withHead(all []byte) []byte {
	first := t.written - int64(len(all))
	if t.head == nil || first <= t.from || t.until >= 0 && first > t.until {
		return all
	}
	if both := t.from + longLine - first; both >= 0 {
		return slices.Concat(t.head[:len(t.head)-int(both)], all)
	}
	return slices.Concat(t.head, []byte(omitted), all)
}

func (t *tail) bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.withHead(t.bytesLocked())
}

func (t *tail) bytesLocked() []byte {
	return append(append(make([]byte, 0, len(t.buf)), t.buf[t.next:]...), t.buf[:t.next]...)
}

// fileTail returns the last n bytes of a file that a worker wrote itself, as far as they can be read.
func fileTail(path string, n int) []byte {
	b, size := fileEnd(path, n)
	if end := bytes.IndexByte(b, '\n'); int64(len(b)) == size || end >= 0 && end < longLine || n < longTail {
		return b
	}
	return slices.Concat(fileHead(path, size-int64(len(b))), b)
}

// mostBack is how far the beginning of a line is looked for in a file.
const mostBack = 16 << 20

// fileHead returns the lines before the line with at in it, and its beginning; nil if that is not before at.
func fileHead(path string, at int64) []byte {
	f, err := openfile.Open(path, os.O_RDONLY, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	from, block := at, make([]byte, 64<<10)
	for from > max(0, at-mostBack) {
		part := block[:min(from, int64(len(block)))]
		from -= int64(len(part))
		if _, err := f.ReadAt(part, from); err != nil {
			return nil
		}
		if i := bytes.LastIndexByte(part, '\n'); i >= 0 {
			from += int64(i) + 1
			break
		}
	}
	start := max(0, from-leading)
	head := make([]byte, min(from+longLine, at)-start)
	if _, err := f.ReadAt(head, start); err != nil {
		return nil
	}
	if from+longLine < at {
		head = append(head, omitted...)
	}
	return head
}

// fileEnd is fileTail, and where those bytes end.
func fileEnd(path string, n int) (b []byte, size int64) {
	f, err := openfile.Open(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, 0
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, 0
	}
	from := max(0, info.Size()-int64(n))
	b = make([]byte, min(info.Size(), int64(n)))
	got, _ := io.ReadFull(io.NewSectionReader(f, from, int64(n)), b) // shorter when the file was cut meanwhile
	return b[:got], info.Size()
}
