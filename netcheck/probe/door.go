package probe

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/netcheck"
)

// The doors of one test together have at most maxStrangers connections whose peer has not proved itself yet, unless
// there are many doors, and each fewStrangers. A further one replaces one at random, so that a crowd cannot keep the
// real peer out by predicting the next victim. The replaced connection is reset, and the real peer tries again; a peer
// without a proof is closed in order.
const (
	maxStrangers = 256
	fewStrangers = 32
)

// door is the listener of one rail. It lets in exactly one control connection and its streams, each once, from the
// peer's addresses only, and is closed when they are all in.
type door struct {
	ln     *net.TCPListener
	rail   rail
	ticket ticket
	limit  time.Time
	room   int // for strangers

	greeters sync.WaitGroup
	in       chan struct{} // closed when all are in

	mu        sync.Mutex
	closed    bool
	taken     bool // conns belong to the test
	strangers []*net.TCPConn
	conns     [1 + streams]*net.TCPConn
	proved    int    // of conns: those that know it
	key       []byte // of the session, once the control connection is in
	wrong     bool   // a peer at the right address had a wrong proof
	own       error  // why connections could not be accepted
}

func openDoor(ln *net.TCPListener, r rail, t ticket, limit time.Time, room int) *door {
	d := &door{ln: ln, rail: r, ticket: t, limit: limit, room: room, in: make(chan struct{})}
	d.greeters.Go(d.accept)
	return d
}

func (d *door) addr() string { return d.ln.Addr().String() }

func (d *door) accept() {
	for {
		c, err := d.ln.AcceptTCP()
		switch {
		case err == nil:
			d.admit(c)
		case errors.Is(err, net.ErrClosed):
			return
		default:
			d.mu.Lock()
			d.own = err
			d.mu.Unlock()
			time.Sleep(5 * time.Millisecond) // no descriptor is free: one may be soon
		}
	}
}

// admit begins the handshake of a connection, unless it comes from elsewhere.
func (d *door) admit(c *net.TCPConn) {
	from, _ := netip.ParseAddrPort(c.RemoteAddr().String())
	if !slices.Contains(d.rail.allow, from.Addr().Unmap().WithZone("")) {
		discard(c)
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		discard(c)
		return
	}
	if len(d.strangers) == d.room {
		i := rand.IntN(d.room)
		discard(d.strangers[i])
		d.strangers = slices.Delete(d.strangers, i, i+1)
	}
	d.strangers = append(d.strangers, c)
	d.greeters.Go(func() { d.greet(c) })
}

func (d *door) greet(c *net.TCPConn) {
	_ = c.SetDeadline(earlier(time.Now().Add(d.rail.limits.proof), d.limit))
	err := d.ticket.proveAsServer(c, streams, d.keyOf, func(i int, n nonces) bool { return d.claim(c, i, n) })
	d.mu.Lock()
	defer d.mu.Unlock()
	if i := slices.Index(d.strangers, c); i >= 0 {
		d.strangers = slices.Delete(d.strangers, i, i+1)
	}
	d.wrong = d.wrong || errors.Is(err, errProof)
	if err != nil {
		d.release(c)
		_ = c.Close()
		return
	}
	_ = c.SetDeadline(d.limit)
	if d.proved++; d.proved == len(d.conns) {
		close(d.in)
	}
}

// keyOf is the key that stream i is to be proved with, nil while it cannot come yet.
func (d *door) keyOf(i int) []byte {
	if i == 0 {
		return d.ticket.key
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.key
}

// release forgets a connection that broke before its dialer knew that it was let in: the dialer tries again.
func (d *door) release(c *net.TCPConn) {
	if i := slices.Index(d.conns[:], c); i >= 0 {
		d.conns[i] = nil
	}
}

// claim gives stream i to c, once, unless c had to make room meanwhile.
func (d *door) claim(c *net.TCPConn, i int, n nonces) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || d.conns[i] != nil || !slices.Contains(d.strangers, c) {
		return false
	}
	if i == 0 {
		d.key = d.ticket.sessionKey(n)
	}
	d.conns[i] = c
	d.strangers = slices.DeleteFunc(d.strangers, func(s *net.TCPConn) bool { return s == c })
	return true
}

// wait returns the control connection, the streams and their key once all are in.
func (d *door) wait(ctx context.Context) ([]*net.TCPConn, []byte, *fault) {
	defer d.close()
	select {
	case <-d.in:
		d.mu.Lock()
		defer d.mu.Unlock()
		d.taken = true
		return d.conns[:], d.key, nil
	case <-ctx.Done():
		d.mu.Lock()
		defer d.mu.Unlock()
		return nil, nil, d.nobody(ctx)
	}
}

// nobody explains why the test could not begin.
func (d *door) nobody(ctx context.Context) *fault {
	switch {
	case !errors.Is(context.Cause(ctx), context.DeadlineExceeded):
		return ended(ctx, nil)
	case d.conns[0] != nil:
		return faultf(netcheck.Stalled, "the other end proved itself, and did not open all its connections")
	case d.own != nil && isOneOf(d.own, []error{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOBUFS}):
		return faultf(netcheck.Own, "accepting connections at %s: %v", d.addr(), d.own)
	case d.wrong:
		return faultf(netcheck.Auth, "whoever came from the other node's address did not prove the key of this test")
	}
	return faultf(netcheck.Unreachable, "nobody connected to %s", d.addr())
}

// close closes the listener, the connections without a proof, and accepted ones that no test has taken yet.
func (d *door) close() {
	_ = d.ln.Close()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for _, c := range d.strangers {
		discard(c)
	}
	for _, c := range d.conns {
		if c != nil && !d.taken {
			discard(c)
		}
	}
}
