package console

import (
	"bytes"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"
)

// Stderr is this program's standard error. Flush it before the end.
var Stderr = newRelay(os.Stderr)

const (
	// room is how many bytes wait for a reader that reads nothing.
	room = 256 << 10
	// patience limits one write; after that, no caller waits for writes.
	patience = 100 * time.Millisecond
	// flushGrace is how long Flush waits for a reader that takes nothing, and flushLimit for one that is slow.
	flushGrace = 2 * time.Second
	flushLimit = 10 * time.Second
)

// relay is a file that other processes may write to, too; they have to see to it that lines do not mix. A reader
// that has stopped, such as a terminal after ctrl-S, does not block writers: the relay keeps
// some of the output. It drops and counts the rest until it has written all that it kept.
//
// A goroutine does every write, and the caller waits for it. A non-blocking descriptor would not do: O_NONBLOCK
// belongs to the open file description, and other programs share that of the terminal or pipe. See
// https://man7.org/linux/man-pages/man2/fcntl.2.html.
type relay struct {
	file *os.File

	mu      sync.Mutex
	through io.Writer     // nil: the file
	kept    [][]byte      // not written yet
	size    int           // of kept, in bytes
	dropped int           // writes
	written int           // writes
	idle    chan struct{} // closed when nothing is left to be written; nil: it is so
	behind  bool          // no caller waits until then
	log     *slog.Logger  // gets the number of dropped lines; may be nil
}

// newRelay returns f.
func newRelay(f *os.File) *relay { return &relay{file: f} }

// Through makes w write to the file from now on; nil: the relay itself.
func (r *relay) Through(w io.Writer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.through = w
}

// tells makes log report dropped lines.
func (r *relay) tells(log *slog.Logger) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.log = log
}

// Fd returns the descriptor of the file.
func (r *relay) Fd() uintptr { return r.file.Fd() }

// Write writes p to the file, or leaves it to be written. A failed write is no error for the caller.
func (r *relay) Write(p []byte) (int, error) {
	idle := r.keep(p)
	if idle == nil {
		return len(p), nil
	}
	select {
	case <-idle:
	case <-time.After(patience):
		r.mu.Lock()
		r.behind = r.idle == idle
		r.mu.Unlock()
	}
	return len(p), nil
}

// keep returns the channel to wait for; nil for none.
func (r *relay) keep(p []byte) (idle chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dropped > 0 || r.size > 0 && r.size+len(p) > room {
		r.dropped++
		return nil
	}
	r.kept, r.size = append(r.kept, bytes.Clone(p)), r.size+len(p)
	if r.idle == nil {
		r.idle = make(chan struct{})
		go r.writeAll()
	}
	if r.behind {
		return nil
	}
	return r.idle
}

// writeAll ends when nothing is left.
func (r *relay) writeAll() {
	for {
		r.tell()
		w, p := r.next()
		if w == nil {
			return
		}
		_, _ = w.Write(p) // a reader that is gone misses it
		r.mu.Lock()
		r.written, r.size = r.written+1, r.size-len(p)
		r.mu.Unlock()
	}
}

// tell logs the number of dropped lines, after the kept ones are written.
func (r *relay) tell() {
	r.mu.Lock()
	n, log := r.dropped, r.log
	if len(r.kept) > 0 {
		n = 0
	}
	r.dropped -= n
	tells := n > 0 && log != nil
	r.behind = r.behind || tells // this goroutine, which writes, must not wait for itself
	r.mu.Unlock()
	if tells {
		log.Warn("standard error took nothing for a while: lines were dropped", "lines", n)
	}
}

// next returns the next bytes to write, and their writer; nil if there are none.
func (r *relay) next() (w io.Writer, p []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.kept) == 0 {
		close(r.idle)
		r.idle, r.behind = nil, false
		return nil, nil
	}
	p, r.kept = r.kept[0], r.kept[1:]
	if r.through != nil {
		return r.through, p
	}
	return r.file, p
}

// Flush waits until everything is written, for as long as something is.
func (r *relay) Flush() {
	for end, last := time.Now().Add(flushLimit), -1; time.Now().Before(end); {
		r.mu.Lock()
		idle, written := r.idle, r.written
		r.mu.Unlock()
		if idle == nil || written == last {
			return
		}
		last = written
		select {
		case <-idle:
		case <-time.After(flushGrace):
		}
	}
}
