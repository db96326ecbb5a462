package logs

import (
	"io"
	"os"
	"sync"

	"dlrover-run/internal/openfile"
)

// tail keeps the last max bytes of a stream. It has its own lock, so that it can be read while the pump of the
// stream is blocked by the console.
type tail struct {
	mu   sync.Mutex
	buf  []byte // grows to max, then is a ring
	next int    // where the next byte goes once the buffer is full: also the oldest byte
	max  int

	id        WorkerID // whose, and
	std       Std      // which stream it is, for who follows
	followers []*following
}

func (t *tail) write(p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range t.followers {
		f.Print(t.id, t.std, p)
	}
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

func (t *tail) bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.bytesLocked()
}

func (t *tail) bytesLocked() []byte {
	return append(append(make([]byte, 0, len(t.buf)), t.buf[t.next:]...), t.buf[:t.next]...)
}

// fileTail returns the last n bytes of a file that a worker wrote itself, as far as they can be read.
func fileTail(path string, n int) []byte {
	b, _ := fileEnd(path, n)
	return b
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
