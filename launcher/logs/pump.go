package logs

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// pipeSize is requested from the kernel: fewer wake-ups, and room for a burst while the console is slow. It is also
	// fs.pipe-max-size, the most that a user may have.
	pipeSize = 1 << 20
	readSize = 64 << 10
	// moreSoon is how long the rest of a line is waited for after a read that filled the buffer.
	moreSoon = 10 * time.Millisecond
	// pace is the shortest time between two reads that do not fill the buffer. A worker that prints lines in a loop would
	// otherwise wake the pump for each of them. A millisecond is too short to see, and the pipe has room for it.
	pace = time.Millisecond
)

// pump is the one goroutine that reads the pipe or pseudo-terminal of a stream. Tail, file, tap and console are fed in
// this order, so that a blocked console, which blocks the worker as an inherited one would, hides nothing from the
// others.
type pump struct {
	r        *os.File
	conn     syscall.RawConn
	terminal *os.File // the console, when r is a pseudo-terminal
	buf      []byte
	tail     *tail
	file     *file  // nil: none
	tap      Tap    // nil: none
	filter   *lines // nil: none
	console  *lines // nil: none
	done     chan struct{}

	mu     sync.Mutex // guards the fields below, and the deadline of r
	armed  time.Time  // the deadline of r; may be earlier than needed
	stop   bool
	synced chan struct{} // closed once the pipe was found empty and unfinished lines are shown
}

// newPipe returns a pump without a consumer, and the write end for the worker. That end stays in blocking mode: the
// flag belongs to the open pipe, so a worker would see EAGAIN on its stdout.
func newPipe(tailBytes int) (*pump, *os.File, error) {
	var fd [2]int
	if err := unix.Pipe2(fd[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, os.NewSyscallError("pipe2", err)
	}
	unix.FcntlInt(uintptr(fd[0]), unix.F_SETPIPE_SZ, pipeSize) // refused over pipe-user-pages-soft: the default will do
	if err := unix.SetNonblock(fd[0], true); err != nil {
		unix.Close(fd[0])
		unix.Close(fd[1])
		return nil, nil, os.NewSyscallError("fcntl", err)
	}
	return newPump(fd[0], fd[1], tailBytes)
}

// newPump returns a pump that reads the non-blocking descriptor in, and the worker's end. It owns both, in any case.
func newPump(in, out, tailBytes int) (*pump, *os.File, error) {
	// Being non-blocking, the read end is in the netpoller: it has deadlines, and takes no thread.
	r, w := os.NewFile(uintptr(in), "worker output"), os.NewFile(uintptr(out), "worker output")
	conn, err := r.SyscallConn()
	if err != nil {
		r.Close()
		w.Close()
		return nil, nil, err
	}
	return &pump{
		r:    r,
		conn: conn,
		buf:  make([]byte, readSize),
		tail: &tail{max: tailBytes},
		done: make(chan struct{}),
	}, w, nil
}

// run reads until every writer has closed the pipe (of a terminal, that is EIO), or until a stop.
func (p *pump) run() {
	defer close(p.done)
	var last time.Time
	for {
		n, err := p.r.Read(p.buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if p.woken() {
				break
			}
			continue
		}
		if p.terminal != nil && err == nil {
			n = p.fill(n)
		}
		now := time.Now()
		p.consume(p.buf[:n], now)
		if err != nil {
			break
		}
		if n < len(p.buf) && now.Sub(last) < 2*pace {
			time.Sleep(pace)
		}
		last = now
	}
	now := time.Now()
	if p.filter != nil {
		p.filter.finish(now)
	}
	if p.console != nil {
		p.console.finish(now)
	}
	p.r.Close()
}

func (p *pump) consume(b []byte, now time.Time) {
	p.tail.write(b)
	if p.file != nil {
		p.file.write(b)
	}
	if p.tap != nil {
		p.tap.Feed(b, now)
	}
	if p.filter != nil {
		p.filter.feed(b, now)
		p.filter.flush()
	}
	if p.console == nil {
		return
	}
	p.console.feed(b, now)
	due := p.console.due()
	switch {
	case due.IsZero():
	case len(b) == len(p.buf): // cut by the buffer, not by the worker
		p.arm(later(due, now.Add(moreSoon)))
	case due.After(now):
		p.arm(due)
	default:
		p.console.partial(now)
	}
	p.console.flush()
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// arm makes Read return at t, or before: moving a deadline at every read would cost more than a needless wake-up.
func (p *pump) arm(t time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.armed.IsZero() || t.Before(p.armed) {
		p.armed = t
		p.r.SetReadDeadline(t)
	}
}

// ask wakes the pump. The channel is closed once the pipe has been read and unfinished lines are shown.
func (p *pump) ask(stop bool) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stop = p.stop || stop
	if p.synced == nil {
		p.synced = make(chan struct{})
	}
	p.armed = time.Now()
	p.r.SetReadDeadline(p.armed) // fails when the pump has ended; done is closed then
	return p.synced
}

// close waits for the end that ask(true) started, and closes the file. False: ctx was faster.
func (p *pump) close(ctx context.Context, log *slog.Logger) bool {
	select {
	case <-p.done:
	case <-ctx.Done():
		select {
		case <-p.done: // both
		default:
			return false
		}
	}
	if p.file != nil {
		p.file.close(log)
	}
	return true
}

// woken handles a deadline: a timer of arm, or ask. It reports whether the pump is to end.
func (p *pump) woken() bool {
	p.mu.Lock()
	stop, synced := p.stop, p.synced
	p.synced, p.armed = nil, time.Time{}
	p.r.SetReadDeadline(time.Time{})
	p.mu.Unlock()

	asked := synced != nil
	// A process that goes on writing must not keep a sweep alive: the pipe held at most one pipe size at the request.
	for left := pipeSize; left > 0; {
		n := p.poll()
		if n <= 0 {
			break
		}
		p.consume(p.buf[:n], time.Now())
		if !asked {
			return false // the rest of the line may have come
		}
		left -= n
	}
	now := time.Now()
	if c := p.console; c != nil {
		if due := c.due(); asked || !due.After(now) {
			c.partial(now)
			c.flush()
		} else {
			p.arm(due)
		}
	}
	if asked {
		close(synced)
	}
	return stop
}

// poll reads the present content of the pipe; 0 or less: nothing, or the end, which the next Read sees. Control, unlike
// Read, does not look at the deadline, which may have been set again.
func (p *pump) poll() (n int) {
	p.conn.Control(func(fd uintptr) { n, _ = unix.Read(int(fd), p.buf) })
	return n
}
