package replica

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/secure"
)

// conn is a connection whose deadlines move with the bytes. It ends with its context. One goroutine uses it.
type conn struct {
	net.Conn
	ctx   context.Context
	stop  func()        // ends the binding to ctx
	moved *atomic.Int64 // when a byte moved last, ns since 1970; shared by the connections of a transfer
	bulk  bool          // this end is sending chunks: a message would be taken for one
}

func newConn(ctx context.Context, nc net.Conn) *conn {
	unpace(nc)
	c := &conn{Conn: nc, stop: func() {}}
	c.bind(ctx, new(atomic.Int64))
	return c
}

// unpace gives a connection within this machine a congestion control that does not pace: there is nothing to congest,
// and pacing, as BBR does it, costs a timer for every 64 KiB. Between machines the system's choice stays.
func unpace(nc net.Conn) {
	t := secure.TCP(nc)
	if t == nil || !sameHost(t.LocalAddr(), t.RemoteAddr()) {
		return
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) { // only for speed; every kernel has reno, and needs no privilege for it
		_ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno")
	})
}

func sameHost(a, b net.Addr) bool {
	x, ok := a.(*net.TCPAddr)
	y, both := b.(*net.TCPAddr)
	return ok && both && x.IP.Equal(y.IP)
}

// bind makes the connection end with ctx from now on, and live as long as bytes move anywhere in the transfer.
func (c *conn) bind(ctx context.Context, moved *atomic.Int64) {
	c.stop()
	moved.Store(time.Now().UnixNano())
	c.ctx, c.moved = ctx, moved
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(ended)
		c.SetDeadline(time.Unix(1, 0))
	})
	c.stop = sync.OnceFunc(func() {
		if !stop() {
			<-ended // or it would end a later Write, which TLS does not survive
		}
	})
}

func (c *conn) Close() error {
	c.stop()
	return c.Conn.Close()
}

// Read fills all of b. Not one byte of it is io.EOF, less than all is io.ErrUnexpectedEOF.
func (c *conn) Read(b []byte) (int, error) {
	return c.move(len(b), func(done int) (int, error) { return c.Conn.Read(b[done:]) })
}

// Write writes all of b.
func (c *conn) Write(b []byte) (int, error) {
	return c.move(len(b), func(done int) (int, error) { return c.Conn.Write(b[done:]) })
}

// writeChunk writes both, and begins with one packet, not two.
func (c *conn) writeChunk(head, data []byte) error {
	parts := net.Buffers{head, data}
	_, err := c.move(len(head)+len(data), func(int) (int, error) {
		n, err := parts.WriteTo(c.Conn) // it removes the written bytes from parts
		return int(n), err
	})
	return err
}

// move repeats op, with the number of bytes done so far, until all are done. It fails when nothing has moved for
// idleTime, or when the context ends.
func (c *conn) move(all int, op func(done int) (int, error)) (done int, err error) {
	for done < all {
		c.SetDeadline(time.Now().Add(idleTime))
		if c.ctx.Err() != nil { // after SetDeadline: the context may have set its own before
			return done, context.Cause(c.ctx)
		}
		n, err := op(done)
		if done += n; n > 0 {
			c.moved.Store(time.Now().UnixNano())
		}
		if err = c.fatal(err); err != nil && done < all {
			if err == io.EOF && done > 0 {
				err = io.ErrUnexpectedEOF
			}
			return done, err
		}
	}
	return done, nil
}

// fatal returns nil for a deadline that passed while bytes moved elsewhere in the transfer. TLS does not survive one in
// a Write.
func (c *conn) fatal(err error) error {
	if err != nil && c.ctx.Err() != nil {
		return context.Cause(c.ctx)
	}
	if e, ok := errors.AsType[net.Error](err); !ok || !errors.Is(err, os.ErrDeadlineExceeded) || !e.Temporary() {
		return err
	}
	if time.Since(time.Unix(0, c.moved.Load())) < idleTime {
		return nil
	}
	return fmt.Errorf("peer has been silent for %v: %w", idleTime, err)
}

func (c *conn) send(m message) error {
	b, err := m.bytes()
	if err != nil {
		return err
	}
	_, err = c.Write(b)
	return err
}

// receive returns the next message that is more than a sign of life.
func (c *conn) receive() (message, error) {
	for {
		m, err := readMessage(c)
		if err != nil || !m.Busy {
			return m, err
		}
	}
}

// answer is the reply to a request; an error of the peer is our error.
func (c *conn) answer() (message, error) {
	m, err := c.receive()
	if err != nil || m.OK {
		return m, err
	}
	said := &peerError{text: m.Error}
	for _, k := range codes {
		if k.code == m.Code {
			said.kind = k.err
		}
	}
	return m, said
}

// refuse sends the peer the reason for the end of the transfer.
func (c *conn) refuse(err error) {
	if c.bulk {
		return
	}
	m := message{Error: fmt.Sprintf("%.1000v", err)}
	for _, k := range codes {
		if errors.Is(err, k.err) {
			m.Code = k.code
			break
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), lastWordTime)
	defer cancel()
	c.bind(ctx, c.moved)
	c.send(m) // the peer may be gone
}

// reason is err, or the peer's own error if it still arrives: the peer may have ended the transfer for that.
func (c *conn) reason(err error) error {
	ctx, cancel := context.WithTimeout(context.Background(), lastWordTime)
	defer cancel()
	c.bind(ctx, c.moved)
	var said *peerError
	if _, last := c.answer(); errors.As(last, &said) {
		return said
	}
	return err
}

// during runs f, which may take long, and keeps telling the peer that this end is alive.
func (c *conn) during(f func() error) error {
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(beat)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				if c.send(message{Busy: true}) != nil {
					return // the next use of the connection returns the error
				}
			}
		}
	})
	err := f()
	close(done)
	wg.Wait()
	return err
}
