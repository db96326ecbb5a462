package tcpstore

import (
	"cmp"
	"fmt"
	"net"
	"sync"
	"time"
)

// conn is one client connection.
type conn struct {
	nc    net.Conn
	id    connID
	space *space
	dec   decoder

	mu      sync.Mutex
	queue   [][]byte // answers not yet written
	queued  int64    // bytes of queue and of the write in progress
	writing bool     // a goroutine writes the queue
	cause   error    // why the server gave the connection up
}

// push queues an answer. The caller must see to write when it returns true.
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
	c.nc.Close()
}

// write sends the queue until it is empty. Only one goroutine at a time runs it: the one for which push returned true.
func (c *conn) write(timeout time.Duration) {
	for {
		c.mu.Lock()
		queue := c.queue
		c.queue = nil
		c.writing = len(queue) > 0
		c.mu.Unlock()
		if len(queue) == 0 {
			return
		}
		var sent int64
		var err error
		for _, b := range queue {
			sent += int64(len(b))
			if err = c.send(b, timeout); err != nil {
				break
			}
		}
		c.mu.Lock()
		c.queued -= sent
		if err != nil {
			c.giveUpLocked(fmt.Errorf("tcpstore: write an answer (nothing was read for %s): %w", timeout, err))
		}
		c.mu.Unlock()
	}
}

// send writes in pieces, so that the timeout means no progress instead of a slow network.
func (c *conn) send(b []byte, timeout time.Duration) error {
	const piece = 256 << 10
	for len(b) > 0 {
		n := min(len(b), piece)
		if err := c.nc.SetWriteDeadline(time.Now().Add(timeout)); err != nil {
			return err
		}
		if _, err := c.nc.Write(b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}
