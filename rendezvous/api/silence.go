package api

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http/httptrace"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/internal/secure"
	"dlrover-run/rendezvous"
)

// watchAlive is for connections that carry a Watch, at both ends. With the bound below the kernel gives up a host after
// rendezvous.SuspectAfter without a sign of life, even if nothing was sent to it.
var watchAlive = net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 3}

// tcpUserTimeout is the socket option TCP_USER_TIMEOUT of Linux, in milliseconds.
const tcpUserTimeout = 18

// notice makes the kernel notice that the other host has fallen silent. It is best effort: without it, detection takes
// longer.
func notice(nc net.Conn) {
	if t := secure.TCP(nc); t != nil {
		_ = t.SetKeepAliveConfig(watchAlive)
		setUserTimeout(t, rendezvous.SuspectAfter)
	}
}

// setUserTimeout bounds how long sent data may stay unacknowledged, or unread in a full buffer; 0 is no bound. See
// TCP_USER_TIMEOUT in https://man7.org/linux/man-pages/man7/tcp.7.html.
func setUserTimeout(t *net.TCPConn, d time.Duration) {
	raw, err := t.SyscallConn()
	if err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(d.Milliseconds()))
		})
	}
}

// noticing is ctx for a Watch over a connection that notices a silent host.
func noticing(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(i httptrace.GotConnInfo) { notice(i.Conn) },
	})
}

// patiently is ctx for a request whose reader may be slow; its connection may have carried a Watch.
func patiently(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		if t := secure.TCP(i.Conn); t != nil && i.Reused {
			setUserTimeout(t, 0)
		}
	}})
}

// Watchful has a Hub that is served on l hear of hosts that have fallen silent. Their connections end all the same.
func Watchful(l net.Listener) net.Listener { return watchful{l} }

type watchful struct{ net.Listener }

func (l watchful) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &line{Conn: nc}, nil
}

// line is a connection over which nodes may watch.
type line struct {
	net.Conn
	fallen atomic.Bool // its host was given up as silent
	closed atomic.Bool // by the other end
	over   atomic.Bool // it has ended
	peer   atomic.Bool // its host is one of the job's
	last   atomic.Pointer[lineWatcher]
	home   atomic.Pointer[home] // of the last node; nil: not proven
	life   atomic.Pointer[lineLife]
	unread []byte
}

// lineLife ends with its line. A line has one if somebody has asked for it.
type lineLife struct {
	ctx context.Context
	end context.CancelFunc
}

// Connection returns a context that ends when the connection of a request does, from the request's own: the other end
// has closed it, or its host has fallen silent. Nil: that is not known.
func Connection(ctx context.Context) context.Context {
	c := lineOf(ctx)
	if c == nil {
		return nil
	}
	if c.life.Load() == nil {
		life := &lineLife{}
		life.ctx, life.end = context.WithCancel(context.Background())
		if c.life.CompareAndSwap(nil, life) {
			notice(c.Conn)
		}
		if c.over.Load() {
			c.ended()
		}
	}
	return c.life.Load().ctx
}

func (c *line) ended() {
	c.over.Store(true)
	if life := c.life.Load(); life != nil {
		life.end()
	}
}

// Close implements net.Conn.
func (c *line) Close() error {
	c.ended()
	return c.Conn.Close()
}

// lineWatcher is the node that watched last over a line, or joined and will watch.
type lineWatcher struct {
	hub       *Hub
	run, node string
}

type lineKey struct{}

// lineOf is the line of a request's context, or nil.
func lineOf(ctx context.Context) *line {
	c, _ := ctx.Value(lineKey{}).(*line)
	return c
}

// watched records the node whose Watch the connection carries, or will. Requests of one connection come one after the
// other.
func (c *line) watched(h *Hub, run, node string) {
	if c == nil {
		return
	}
	old := c.last.Load()
	if old == nil {
		notice(c.Conn)
	}
	if old == nil || old.run != run || old.node != node {
		c.home.Store(nil)
		c.last.Store(&lineWatcher{h, run, node})
		h.lives.prove(c, h.lifeOf(run, node), node)
	}
	c.recheck()
}

// recheck is for a peer that has hung up before the connection's node was known, or while its request was open.
func (c *line) recheck() {
	if c != nil && c.closed.Load() {
		s := c.last.Load()
		s.hub.hungUp(c, s)
	}
}

// silent reports whether the connection has ended because its host has fallen silent.
func (c *line) silent() bool { return c != nil && c.fallen.Load() }

// Read notifies the hub of a silent host, and of a peer that has hung up. No request need be under way, as when its
// last answer was never received.
func (c *line) Read(b []byte) (int, error) {
	if len(c.unread) > 0 {
		n := copy(b, c.unread)
		c.unread = c.unread[n:]
		return n, nil
	}
	c.unread = nil
	n, err := c.Conn.Read(b)
	if err == nil {
		return n, err
	}
	if IsSilence(err) || isHangUp(err) {
		c.ended()
	}
	s := c.last.Load()
	switch {
	case IsSilence(err) && !c.fallen.Swap(true) && s != nil:
		s.hub.silent(c, s)
	case isHangUp(err) && !c.closed.Swap(true) && s != nil:
		s.hub.hungUp(c, s)
	}
	return n, err
}

// IsSilence reports whether the kernel got no answer, or routers have reported that they do not reach the host.
func IsSilence(err error) bool {
	return errors.Is(err, syscall.ETIMEDOUT) || errors.Is(err, syscall.EHOSTUNREACH) ||
		errors.Is(err, syscall.ENETUNREACH)
}

func isHangUp(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) }

// Prove passes ok to the connection below.
func (c *line) Prove(ok bool) {
	if p, can := c.Conn.(prover); can {
		p.Prove(ok)
	}
}

// Unread has the next reads return b, which c keeps. It serves a caller that takes a connection out of its server and
// returns it: a wrapper would hide that it is a line. No Read may run meanwhile.
func (c *line) Unread(b []byte) { c.unread = append(b, c.unread...) }

// NetConn is the connection below.
func (c *line) NetConn() net.Conn { return c.Conn }

// silent reports to the run that a node's host no longer answers, and finds out whether it answers a new connection. A
// run, or a node, that is gone ignores it.
func (h *Hub) silent(c *line, s *lineWatcher) {
	r, err := h.member(s.run)
	if err != nil {
		return
	}
	_ = r.step(rendezvous.Silence{ID: s.node})
	if at := c.home.Load(); at != nil && at.node == s.node {
		h.lives.examine(at.addr, func() { _ = r.step(rendezvous.Unreachable{ID: s.node}) })
	}
}

// hungUp reports to the run that a node's connection has closed, and checks whether its launcher is alive.
func (h *Hub) hungUp(c *line, s *lineWatcher) {
	if r, err := h.member(s.run); err == nil && r.hungUp(s.node) {
		h.confirm(c, r, s.node)
	}
}
