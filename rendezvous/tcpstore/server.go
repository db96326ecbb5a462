// Package tcpstore serves the protocol of PyTorch's TCPStore, the key-value store through which the workers of a job
// find each other: generation A (PyTorch 1.8 to 2.0) and generation B (2.1 and later) on one port, distinguished by the
// first bytes of a connection.
//
// store.go is the data and wire.go the format, both without sockets; server.go, conn.go, socket.go, poller.go and
// split.go are the connections. The package must not import other packages of this module: it knows nothing of rounds
// or ranks. A Server runs a goroutine for a connection while bytes of it are under way, and one that waits for all
// others; Close waits for all of them.
package tcpstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Config limits clients. Zero, or less, means the default. A connection that breaks a limit is closed, with one line in
// the log that names limit, value and peer.
type Config struct {
	MaxKeyBytes       int   // 8 KiB, as PyTorch's own server
	MaxValueBytes     int   // 64 MiB, as PyTorch's own server without libuv
	MaxKeysPerRequest int   // 131,072, as PyTorch's own server
	MaxRequestBytes   int64 // 256 MiB: all keys and values of one request
	MaxReceivingBytes int64 // 1 GiB: received bytes of unfinished requests, beyond the first 64 KiB of each
	MaxStoreBytes     int64 // 1 GiB: keys, values and waits of all clients, and 128 bytes for each
	MaxQueuedBytes    int64 // 256 MiB: answers that one client has not read; large values are counted, not copied

	// Keep is a prefix of keys whose values outlive Reset; "" is none.
	Keep string

	// FirstByte (10 seconds) is how long a connection may be silent at first, unless its address has a place for silent
	// ones. Those stay, since the callback connection of PyTorch 1.x never sends unless a key is watched. Silent returns
	// the number of places of an address; nil is no limit.
	FirstByte time.Duration
	Silent    func(netip.Addr) int

	// WriteTimeout (1 minute) is how long a client may refuse to take a piece of an answer.
	WriteTimeout time.Duration

	// Allow reports whether a peer may use the store: nil is everyone. A refused peer is closed at once and counted.
	Allow func(netip.Addr) bool

	// Logger is silent when nil.
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	c.MaxKeyBytes = positive(c.MaxKeyBytes, 8<<10)
	c.MaxValueBytes = positive(c.MaxValueBytes, 64<<20)
	c.MaxKeysPerRequest = positive(c.MaxKeysPerRequest, 128<<10)
	c.MaxRequestBytes = positive(c.MaxRequestBytes, 256<<20)
	c.MaxReceivingBytes = positive(c.MaxReceivingBytes, 1<<30)
	c.MaxStoreBytes = positive(c.MaxStoreBytes, 1<<30)
	c.MaxQueuedBytes = positive(c.MaxQueuedBytes, 256<<20)
	c.FirstByte = positive(c.FirstByte, 10*time.Second)
	c.WriteTimeout = positive(c.WriteTimeout, time.Minute)
	c.Logger = cmp.Or(c.Logger, slog.New(slog.DiscardHandler))
	return c
}

func positive[T cmp.Ordered](v, otherwise T) T {
	var zero T
	if v > zero {
		return v
	}
	return otherwise
}

// stats is a snapshot of a server. Connections, Keys and Bytes are of the present namespace, the rest since New.
type stats struct {
	Connections int    // that speak to the store now
	Keys        int    // queues not counted
	Bytes       int64  // limited by MaxStoreBytes
	Requests    uint64 // carried out, if not yet answered
	Refused     uint64 // connections that Allow or FirstByte turned away
}

// Server is a TCPStore server. Its methods may be called at the same time.
type Server struct {
	cfg      Config
	requests atomic.Uint64
	refused  atomic.Uint64
	warned   atomic.Uint64 // of connections that broke the rules
	silent   silent
	poller   poller
	resume   func(*conn) // serve, once for all

	receiving atomic.Int64 // of MaxReceivingBytes

	mu        sync.Mutex // never held together with a space's
	closed    bool
	space     *space
	lastID    connID
	listeners map[net.Listener]struct{}

	wg sync.WaitGroup // connections and writers
}

// space is one namespace: a store and the connections that may touch it. Reset ends a space and starts another, so a
// request of an old connection cannot reach the new data.
type space struct {
	mu    sync.Mutex // held for a request's work in memory, never for I/O; taken before conn.mu
	ended bool
	store *store
	conns map[connID]*conn
	lapse *time.Timer // runs while the store keeps items for connections
}

// keepTime is how long an item of a queue is kept at least, twice that at most.
const keepTime = 500 * time.Millisecond

// New returns a server with an empty store.
func New(cfg Config) *Server {
	cfg = cfg.withDefaults()
	s := &Server{cfg: cfg, space: newSpace(cfg), listeners: make(map[net.Listener]struct{})}
	s.resume = s.serve
	return s
}

func newSpace(cfg Config) *space {
	return &space{store: newStore(cfg.MaxStoreBytes), conns: make(map[connID]*conn)}
}

// Serve accepts connections from l until Close, which makes it return nil, or until l fails. It closes l.
func (s *Server) Serve(l net.Listener) error {
	defer l.Close()
	s.mu.Lock()
	if !s.closed {
		s.listeners[l] = struct{}{}
	}
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return nil
	}
	err := acceptAll(l, s.cfg.Logger, func(nc net.Conn) {
		if c := s.newConn(nc); s.admit(c) {
			s.begin(c, s.greet)
		}
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.listeners, l)
	if s.closed {
		return nil
	}
	return fmt.Errorf("tcpstore: accept on %s: %w", l.Addr(), err)
}

// acceptAll hands connections of l to take until l fails for good. Running out of file descriptors is not for good: it
// passes when clients leave, and a job must not lose its store to it.
func acceptAll(l net.Listener, log *slog.Logger, take func(net.Conn)) error {
	for pause := time.Duration(0); ; {
		nc, err := l.Accept()
		if err == nil {
			pause = 0
			take(nc)
			continue
		}
		if !isPassing(err) {
			return err
		}
		pause = min(max(2*pause, 5*time.Millisecond), time.Second)
		log.Warn("store cannot accept a connection now", "addr", l.Addr().String(), "err", err, "retry_in", pause.String())
		time.Sleep(pause)
	}
}

func isPassing(err error) bool {
	for _, e := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// Reset starts an empty namespace, but for the keys of Config.Keep, and drops every connection of the old one. A
// connection that was accepted before Reset belongs to the old one even if it has not sent a byte; the places of silent
// ones are free again.
func (s *Server) Reset() { s.reset(s.cfg.Keep) }

// ResetAll is Reset without keeping anything.
func (s *Server) ResetAll() { s.reset("") }

func (s *Server) reset(keep string) {
	fresh := newSpace(s.cfg)
	fresh.mu.Lock() // unused before it has the kept values
	s.mu.Lock()
	old := s.space
	if !s.closed {
		s.space = fresh
	}
	s.mu.Unlock()
	fresh.store.inherit(s.end(old), keep)
	fresh.mu.Unlock()
	s.silent.evict(s.cfg.FirstByte)
}

// Close ends all listeners and connections of the server and waits for its goroutines.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	listeners := s.listeners
	s.listeners = make(map[net.Listener]struct{})
	space := s.space
	s.mu.Unlock()
	var errs []error
	for l := range listeners {
		if err := l.Close(); !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	s.end(space)
	s.poller.close()
	s.wg.Wait()
	return errors.Join(errs...)
}

// stats returns the present figures.
func (s *Server) stats() stats {
	s.mu.Lock()
	space := s.space
	s.mu.Unlock()
	space.mu.Lock()
	defer space.mu.Unlock()
	st := stats{Connections: len(space.conns), Requests: s.requests.Load(), Refused: s.refused.Load()}
	if !space.ended {
		st.Keys, st.Bytes = len(space.store.values), space.store.bytes
	}
	return st
}

// end drops all connections of a namespace and returns its store; nil: it had ended before.
func (s *Server) end(sp *space) *store {
	sp.mu.Lock()
	if sp.lapse != nil && sp.lapse.Stop() {
		s.wg.Done()
	}
	conns, store := sp.conns, sp.store
	sp.ended, sp.conns, sp.store = true, nil, nil
	sp.mu.Unlock()
	for _, c := range conns {
		c.end()
		if resume := s.poller.take(c); resume != nil {
			resume(c) // to its end, which needs no goroutine
		}
	}
	return store
}

// newConn binds a connection to the present namespace without touching it.
func (s *Server) newConn(nc net.Conn) *conn {
	c := &conn{nc: nc, peer: peerOf(nc), poller: &s.poller, dec: decoder{cfg: &s.cfg, receiving: &s.receiving}}
	for u, ok := nc.(interface{ NetConn() net.Conn }); ok; u, ok = nc.(interface{ NetConn() net.Conn }) {
		nc = u.NetConn()
	}
	if t, ok := nc.(*net.TCPConn); ok {
		c.tcp = t
		// A lost node's connections would stay for ever: generation A's callback connection never carries a byte.
		_ = t.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Minute, Interval: 15 * time.Second, Count: 4})
		_ = t.SetNoDelay(true)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastID++
	c.id, c.space = s.lastID, s.space
	return c
}

// admit makes c a connection of its namespace, or closes it: serve must follow when it returns true.
func (s *Server) admit(c *conn) bool {
	if !s.allowed(c.peer) {
		c.yield() // a log may block
		s.refuse(c, "peer is not allowed")
		return false
	}
	if !s.join(c) {
		c.nc.Close()
		return false
	}
	prove(c.nc, true)
	return true
}

func (s *Server) allowed(peer netip.AddrPort) bool {
	return s.cfg.Allow == nil || peer.IsValid() && s.cfg.Allow(peer.Addr())
}

func peerOf(nc net.Conn) netip.AddrPort {
	a, ok := nc.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	peer := a.AddrPort()
	return netip.AddrPortFrom(peer.Addr().Unmap().WithZone(""), peer.Port())
}

// refuse closes a connection that may not use the store. Such a client tries again and again: the log gets one line.
func (s *Server) refuse(c *conn, reason string, args ...any) {
	level := slog.LevelDebug
	if s.refused.Add(1) == 1 {
		level = slog.LevelWarn
	}
	args = append(args, "peer", c.peer.String(), "reason", reason)
	s.cfg.Logger.Log(context.Background(), level, "store refused a connection; further ones are only counted", args...)
	c.nc.Close()
}

func (s *Server) join(c *conn) bool {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return false
	}
	s.wg.Add(1)
	s.mu.Unlock()
	c.space.mu.Lock()
	defer c.space.mu.Unlock()
	if c.space.ended {
		s.wg.Done()
		return false
	}
	c.space.conns[c.id] = c
	return true
}

// greet serves an admitted connection from its first byte on.
func (s *Server) greet(c *conn) {
	if _, err := s.firstByte(c); err != nil {
		s.finish(c, err)
		return
	}
	c.shed()
	s.serve(c)
}

// serve carries out the requests of an admitted connection until it has to wait for the next one, or ends.
func (s *Server) serve(c *conn) {
	for {
		c.borrow()
		req, err := c.dec.next()
		if err == nil {
			err = s.handle(c, req)
		}
		c.dec.done()
		if err != nil {
			s.finish(c, err)
			return
		}
		if c.dec.r.Buffered() > 0 {
			continue
		}
		if c.rest(); s.poller.park(c, s.resume) {
			return
		}
	}
}

// finish ends an admitted connection.
func (s *Server) finish(c *conn, err error) {
	defer s.wg.Done()
	c.rest()
	s.leave(c)
	c.close()
	s.poller.forget(c)
	c.mu.Lock()
	err = cmp.Or(c.cause, err)
	c.mu.Unlock()
	s.logEnd(c, err)
}

// maxEndLines bounds the warnings about connections that break the rules: a client that opens one after the other must
// not fill the log.
const maxEndLines = 32

func (s *Server) logEnd(c *conn, err error) {
	var limit *limitError
	var network net.Error
	switch {
	case err == io.EOF || errors.Is(err, net.ErrClosed) || errors.Is(err, errEnded) || err == errSilent:
	case errors.As(err, &limit):
		s.warn(c, "store closed a connection over a limit", "what", limit.What, "value", limit.Value, "max", limit.Max)
	case err == io.ErrUnexpectedEOF || errors.As(err, &network) && !network.Timeout():
		s.cfg.Logger.Debug("store connection broke", "peer", c.peer.String(), "err", err)
	default:
		s.warn(c, "store closed a connection", "err", err)
	}
}

func (s *Server) warn(c *conn, text string, args ...any) {
	level := slog.LevelDebug
	switch n := s.warned.Add(1); {
	case n < maxEndLines:
		level = slog.LevelWarn
	case n == maxEndLines:
		level, text = slog.LevelWarn, text+"; the next ones are not reported"
	}
	s.cfg.Logger.Log(context.Background(), level, text, append(args, "peer", c.peer.String())...)
}

var errEnded = errors.New("tcpstore: namespace ended")

// handle carries out one request. The answers of one request are queued under the lock, so that the answer to a WAIT
// and the answer to its CANCEL_WAIT arrive in order; they are written after it.
func (s *Server) handle(c *conn, req request) error {
	sp := c.space
	sp.mu.Lock()
	if sp.ended {
		sp.mu.Unlock()
		return errEnded
	}
	messages, err := sp.store.apply(c.id, req)
	own, others := s.deliverLocked(sp, messages, c)
	if len(sp.store.holds) > 0 && sp.lapse == nil {
		s.wg.Add(1)
		sp.lapse = time.AfterFunc(keepTime, func() { s.lapse(sp) })
	}
	sp.mu.Unlock()
	s.requests.Add(1)
	s.flush(others)
	if own && !c.flush() {
		// The client takes the answer before its next request is read, which bounds its queue.
		c.yield()
		c.write(s.cfg.WriteTimeout)
	}
	return err
}

// flush writes to connections, and waits for none of them.
func (s *Server) flush(conns []*conn) {
	const some = 128
	for len(conns) > some {
		first := conns[:some]
		conns = conns[some:]
		s.wg.Go(func() { s.flush(first) })
	}
	for _, c := range conns {
		if !c.flush() {
			s.wg.Go(func() { c.write(s.cfg.WriteTimeout) })
		}
	}
}

// deliverLocked queues messages. It returns the connections that the caller has to flush, c apart.
func (s *Server) deliverLocked(sp *space, messages []message, c *conn) (own bool, others []*conn) {
	for _, m := range messages {
		to := sp.conns[m.to]
		if to == nil || !to.push(m.data, s.cfg.MaxQueuedBytes) {
			continue
		}
		if own = own || to == c; to != c {
			others = append(others, to)
		}
	}
	return own, others
}

// lapse gives items back that were kept for too long, and comes again while others are.
func (s *Server) lapse(sp *space) {
	sp.mu.Lock()
	if sp.ended {
		sp.mu.Unlock()
		s.wg.Done()
		return
	}
	messages, more := sp.store.lapse()
	_, others := s.deliverLocked(sp, messages, nil)
	if more {
		sp.lapse.Reset(keepTime)
	} else {
		sp.lapse = nil
		defer s.wg.Done()
	}
	sp.mu.Unlock()
	s.flush(others)
}

func (s *Server) leave(c *conn) {
	sp := c.space
	sp.mu.Lock()
	if sp.ended {
		sp.mu.Unlock()
		return
	}
	messages := sp.store.drop(c.id)
	delete(sp.conns, c.id)
	_, others := s.deliverLocked(sp, messages, nil)
	sp.mu.Unlock()
	s.flush(others)
}
