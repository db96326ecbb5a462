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
var Stderr = NewRelay(os.Stderr)

const (
	// room is how many bytes wait for a reader that reads nothing.
	room = 256 << 10
	// patience is how long one write may take before nobody waits for writes.
	patience = 100 * time.Millisecond
	// flushGrace is how long Flush waits for a reader that takes nothing, and flushLimit for one that is slow.
	flushGrace = 2 * time.Second
	flushLimit = 10 * time.Second
)

// Relay is a file that somebody else may write to, too, who then has to see to it that lines do not mix. A reader that
// has stopped, such as a terminal after ctrl-S, holds up nobody who writes: some of it is kept, and the rest is dropped
// and counted until all that was kept is written.
//
// Every write is a goroutine's, which is waited for: the flag that keeps writes from blocking would be that of all
// programs with the same terminal or pipe.
type Relay struct {
	file *os.File

	mu      sync.Mutex
	through io.Writer     // nil: the file
	kept    [][]byte      // not written yet
	size    int           // of kept, in bytes
	dropped int           // writes
	written int           // writes
	idle    chan struct{} // closed when nothing is left to be written; nil: it is so
	behind  bool          // nobody waits until then
	log     *slog.Logger  // is told what was dropped; nil: nobody is
}

// NewRelay returns f.
func NewRelay(f *os.File) *Relay { return &Relay{file: f} }

// Through makes w write to the file from now on; nil: the relay itself.
func (r *Relay) Through(w io.Writer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.through = w
}

// tells makes log say what was dropped.
func (r *Relay) tells(log *slog.Logger) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.log = log
}

// Fd returns the descriptor of the file.
func (r *Relay) Fd() uintptr { return r.file.Fd() }

// Write writes p to the file, or leaves it to be written. What cannot be written is no error of the writer's.
func (r *Relay) Write(p []byte) (int, error) {
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

// keep returns what to wait for; nil: nothing.
func (r *Relay) keep(p []byte) (idle chan struct{}) {
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
func (r *Relay) writeAll() {
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

// tell says how much was dropped, behind what was kept.
func (r *Relay) tell() {
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

// next is what is written next, and to what; nil: nothing is.
func (r *Relay) next() (w io.Writer, p []byte) {
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
func (r *Relay) Flush() {
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
