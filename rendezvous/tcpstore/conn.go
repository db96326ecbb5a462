package tcpstore

import (
	"bufio"
	"cmp"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// conn is one client connection. The goroutine that reads from it, if there is one, owns dec, added, resume and turn.
type conn struct {
	nc     net.Conn
	raw    syscall.RawConn // of its socket; nil: a goroutine reads from it all the time
	id     connID
	space  *space
	poller *poller
	dec    decoder // its reader is borrowed
	resume func(*conn)
	added  bool // to the epoll of poller
	turn   turn

	writing bool // a goroutine writes the queue; this and the rest are guarded by mu
	mu      sync.Mutex
	queue   [][]byte // answers not yet written
	queued  int64    // their bytes
	cause   error    // why the server gave the connection up
}

// readers are lent to connections with bytes under way.
var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 4<<10) }}

// borrow gives c a reader.
func (c *conn) borrow() {
	if c.dec.r == nil {
		c.dec.r = readers.Get().(*bufio.Reader)
		c.dec.r.Reset(c)
	}
}

// rest gives back what a connection without bytes does not need.
func (c *conn) rest() {
	if c.dec.r != nil {
		c.dec.r.Reset(nil)
		readers.Put(c.dec.r)
		c.dec.r = nil
	}
	c.yield()
}

// Read reads from the client. Only at the first time its bytes are known to be there.
func (c *conn) Read(b []byte) (int, error) {
	if c.turn == used {
		c.yield()
	} else if c.turn == fresh {
		c.turn = used
	}
	return c.nc.Read(b)
}

// yield gives the turn of the goroutine back.
func (c *conn) yield() {
	if c.turn != none {
		c.turn = none
		<-c.poller.turns
	}
}

// close closes the connection, and has it go on to its end.
func (c *conn) close() {
	c.nc.Close()
	c.poller.wake(c.id)
}

// push queues an answer. The caller must see to flush, and then write, when it returns true.
func (c *conn) push(data []byte, most int64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cause != nil {
		return false
	}
	if c.queued += int64(len(data)); c.queued > most {
		c.giveUpLocked(&limitError{"bytes of answers that were not read", uint64(c.queued), uint64(most)})
		return false
	}
	c.queue = append(c.queue, data)
	start := !c.writing
	c.writing = true
	return start
}

// giveUpLocked closes the connection, which also ends its reading.
func (c *conn) giveUpLocked(cause error) {
	c.cause = cmp.Or(c.cause, cause)
	c.queue = nil
	c.close()
}

// piece is how much is written at a time, so that a timeout means no progress instead of a slow network.
const piece = 256 << 10

// next is the next piece to write; nil: there is none, and whoever is next to push has to write.
func (c *conn) next() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queue) == 0 {
		c.writing, c.queue = false, nil
		return nil
	}
	return c.queue[0][:min(len(c.queue[0]), piece)]
}

// wrote takes n bytes off the queue.
func (c *conn) wrote(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cause != nil {
		return
	}
	c.queued -= int64(n)
	if c.queue[0] = c.queue[0][n:]; len(c.queue[0]) == 0 {
		c.queue[0] = nil
		c.queue = c.queue[1:]
	}
}

// flush writes of the queue what the socket takes at once, and reports whether that is all. Only one goroutine at a
// time runs flush and write: the one for which push returned true.
func (c *conn) flush() bool {
	for b := c.next(); b != nil; b = c.next() {
		n := 0
		if c.raw != nil {
			_ = c.raw.Control(func(fd uintptr) { n, _ = unix.Write(int(fd), b) })
		}
		if n = max(n, 0); n > 0 {
			c.wrote(n)
		}
		if n < len(b) {
			return false // write meets the error, if there is one
		}
	}
	return true
}

// write sends the queue until it is empty.
func (c *conn) write(timeout time.Duration) {
	for !c.flush() {
		b := c.next()
		if b == nil {
			return
		}
		err := c.nc.SetWriteDeadline(time.Now().Add(timeout))
		n := 0
		if err == nil {
			n, err = c.nc.Write(b)
		}
		c.wrote(n)
		if err != nil {
			c.mu.Lock()
			c.giveUpLocked(fmt.Errorf("tcpstore: write an answer (nothing was read for %s): %w", timeout, err))
			c.mu.Unlock()
		}
	}
}
