package tcpstore

import (
	"bufio"
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/epoll"
)

// conn is one client connection. The goroutine that reads from it, if there is one, owns dec and turn.
type conn struct {
	nc     net.Conn       // once there is a socket, only for its Close
	tcp    *net.TCPConn   // the one below nc; nil: there is none, or there is a socket
	sock   *socket        // which took its place, under the lock of space; see shed
	peer   netip.AddrPort // IPv4 is never mapped to IPv6; the zero value if it has no address of IP
	id     connID
	space  *space
	poller *poller
	dec    decoder // its reader is borrowed
	turn   turn

	resume func(*conn)   // waits until c can be read; this and room are guarded by poller.mu
	room   chan struct{} // waits until c takes bytes

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
	if c.sock != nil {
		for {
			n, err := c.sock.read(b)
			if err == unix.EAGAIN && c.poller.await(c) {
				continue
			}
			return n, err
		}
	}
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

// control calls f with the descriptor of the connection.
func (c *conn) control(f func(fd int) error) error {
	if c.sock != nil {
		return c.sock.control(f)
	}
	return epoll.Control(c.tcp, f)
}

// shed has a socket take the place of the connection of package net. Where that cannot be, everything stays as it is.
func (c *conn) shed() {
	detach := detacher(c.nc, c.tcp)
	if detach == nil {
		return
	}
	sock := socketOf(c.tcp)
	if sock == nil {
		return
	}
	if !c.poller.replace(c, sock) || !c.take(sock, detach) {
		sock.close()
		return
	}
	_ = c.tcp.Close()
	c.tcp = nil
}

// detacher returns the function that takes tcp out of nc, which is tcp or counts it. It returns nil if there is none.
func detacher(nc net.Conn, tcp *net.TCPConn) func() bool {
	if tcp == nil {
		return nil
	}
	if nc == net.Conn(tcp) {
		return func() bool { return true }
	}
	d, ok := nc.(interface {
		NetConn() net.Conn
		Detach() bool
	})
	if !ok || d.NetConn() != net.Conn(tcp) {
		return nil
	}
	return d.Detach
}

// take is the part of shed that does not run beside the end of the space.
func (c *conn) take(sock *socket, detach func() bool) bool {
	c.space.mu.Lock()
	defer c.space.mu.Unlock()
	if c.space.ended || !detach() {
		return false
	}
	c.sock = sock
	return true
}

// end closes the connection.
func (c *conn) end() {
	if c.sock != nil {
		c.sock.close()
	}
	c.nc.Close()
}

// close closes the connection, and has it go on to its end.
func (c *conn) close() {
	c.end()
	c.poller.wake(c)
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
		if c.sock == nil {
			return false
		}
		n, err := c.sock.write(b)
		c.wrote(n)
		if err != nil && err != unix.EAGAIN {
			c.giveUp(fmt.Errorf("tcpstore: write an answer: %w", os.NewSyscallError("write", err)))
		} else if n < len(b) {
			return false
		}
	}
	return true
}

// write sends the queue until it is empty.
func (c *conn) write(timeout time.Duration) {
	for !c.flush() {
		err := c.writeSome(timeout)
		if err != nil {
			c.giveUp(fmt.Errorf("tcpstore: write an answer (nothing was read for %s): %w", timeout, err))
		}
	}
}

// writeSome waits until the client takes more of the queue.
func (c *conn) writeSome(timeout time.Duration) error {
	if c.sock != nil {
		return c.poller.awaitRoom(c, timeout)
	}
	b := c.next()
	if b == nil {
		return nil
	}
	if err := c.nc.SetWriteDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	n, err := c.nc.Write(b)
	c.wrote(n)
	return err
}

func (c *conn) giveUp(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.giveUpLocked(cause)
}
