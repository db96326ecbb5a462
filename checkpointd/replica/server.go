package replica

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/conns"
	"dlrover-run/internal/retry"
	"dlrover-run/internal/secure"
)

const (
	serverConns = 128 // connections at once
	freshConns  = 32  // of them without proof yet; a further one takes the place of the oldest
	// acceptPause is the pause after an error of Accept, such as no free file descriptor.
	acceptPause = 100 * time.Millisecond
	// strangerPause is the time between two log lines about failed handshakes.
	strangerPause = 10 * time.Second
)

// Store keeps the copies of a Server. Its methods are called concurrently, but for one rank there is only one copy
// between Incoming and Published. It may stay without Published: then the transfer failed, and the file is aborted.
type Store interface {
	// Incoming makes room for a copy. An error refuses it: no memory, or the store has something newer.
	Incoming(m shm.Meta, size int64) (*shm.Incoming, error)
	// Published hands over a copy that is complete.
	Published(*shm.Segment)
	// Copy pins the copy of a rank's save, for a peer that fetches it.
	Copy(rank int, save string) (*shm.Pinned, error)
}

// Server accepts copies from other nodes, and gives them back. Safe for concurrent use.
type Server struct {
	// Accepted are the tokens that are right now, where that changes; nil: NewServer's alone is. It is set before Serve.
	Accepted func() []string
	// TLS is what connections speak; nil: none. It is set before Serve.
	TLS    *secure.Layer
	token  string
	store  Store
	log    *slog.Logger
	ctx    context.Context // ends with Close
	cancel context.CancelCauseFunc

	mu        sync.Mutex
	wg        sync.WaitGroup       // connections; grows under mu and before ctx ends only
	stranger  time.Time            // time of the last log line about one
	transfers map[string]*transfer // by id: those that further connections may join
	receiving map[int]*receiving   // by rank
}

// receiving is a push in progress.
type receiving struct {
	t     *transfer
	ended chan struct{}
}

// NewServer returns a server that does nothing yet. The token may be empty if it serves a loopback address.
func NewServer(token string, s Store, log *slog.Logger) *Server {
	srv := &Server{token: token, store: s, log: log, transfers: map[string]*transfer{}, receiving: map[int]*receiving{}}
	srv.ctx, srv.cancel = context.WithCancelCause(context.Background())
	return srv
}

// Close ends all transfers, and returns when nothing of the server runs any more. Copies that were half received are
// aborted.
func (s *Server) Close() {
	s.mu.Lock()
	s.cancel(errClosed)
	s.mu.Unlock()
	s.wg.Wait()
}

// Serve accepts connections until Close, and then returns nil. It closes ln.
func (s *Server) Serve(ln net.Listener) error {
	ln = conns.Listen(ln, conns.Limits{Total: serverConns, Unproven: freshConns}, s.log)
	defer ln.Close()
	if s.token == "" && !loopback(ln.Addr()) {
		return fmt.Errorf("serve replicas at %v: a token is needed beyond this machine: give the job one", ln.Addr())
	}
	defer context.AfterFunc(s.ctx, func() { ln.Close() })()
	for {
		nc, err := ln.Accept()
		if err == nil {
			s.accepted(nc)
			continue
		}
		if s.ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, net.ErrClosed) {
			return fmt.Errorf("serve replicas at %v: %w", ln.Addr(), err)
		}
		s.log.Warn("cannot accept a replica connection", "err", err)
		retry.Sleep(s.ctx, acceptPause)
	}
}

func (s *Server) accepted(nc net.Conn) {
	s.mu.Lock()
	ok := s.ctx.Err() == nil
	if ok {
		s.wg.Add(1)
	}
	s.mu.Unlock()
	if !ok {
		nc.Close()
		return
	}
	go func() {
		defer s.wg.Done()
		s.serve(nc)
		nc.Close()
	}()
}

func (s *Server) serve(nc net.Conn) {
	tokens := []string{s.token}
	if s.Accepted != nil {
		tokens = s.Accepted()
	}
	sc := s.TLS.Server(nc)
	err := handshake(s.ctx, sc, func(rw io.ReadWriter) error { return welcome(rw, tokens) })
	if err == nil {
		err = secure.Check(sc)
	}
	if err != nil {
		s.strange(nc, err)
		return
	}
	nc.(*conns.Conn).Prove(true)
	c := newConn(s.ctx, sc)
	defer c.Close()
	m, err := c.receive()
	if errors.Is(err, io.EOF) {
		return // without a request
	}
	if err == nil {
		err = s.do(c, m)
	}
	if err == nil || s.ctx.Err() != nil {
		return
	}
	c.refuse(err)
	s.log.Warn("replica transfer failed", "op", m.Op, "peer", nc.RemoteAddr().String(), "err", err)
}

// strange logs a connection without proof, at most once in strangerPause.
func (s *Server) strange(nc net.Conn, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now(); s.ctx.Err() == nil && now.Sub(s.stranger) >= strangerPause {
		s.stranger = now
		s.log.Warn("replica handshake failed", "peer", nc.RemoteAddr().String(), "err", err)
	}
}

func (s *Server) do(c *conn, m message) error {
	switch m.Op {
	case "push":
		return s.push(c, m)
	case "fetch":
		return s.fetch(c, m)
	case "join":
		return s.join(c, m.ID)
	}
	return fmt.Errorf("unknown request %q", m.Op)
}

func (s *Server) push(c *conn, m message) error {
	o, err := readOffer(c, m)
	if err != nil {
		return err
	}
	t := newTransfer(s.ctx)
	var file *shm.Incoming
	err = c.during(func() (err error) {
		s.begin(o.meta.Rank, t)
		if file, err = s.store.Incoming(o.meta, o.size); err != nil {
			err = fmt.Errorf("%w: %w", ErrRefused, err)
		}
		return err
	})
	defer s.ended(o.meta.Rank)
	if err != nil {
		return t.end(err)
	}
	err = t.end(s.fill(c, t, file, o))
	if err != nil {
		file.Abort()
		return err
	}
	c.bind(s.ctx, &t.moved) // the transfer's context has ended
	return c.send(message{OK: true})
}

// fill receives the chunks of a push. On an error other connections may still use the file.
func (s *Server) fill(c *conn, t *transfer, file *shm.Incoming, o offer) error {
	in, err := newIncoming(file, o)
	if err != nil {
		return err
	}
	t.part = func(c *conn) error {
		if err := in.receive(c); err != nil {
			return err
		}
		return c.send(message{OK: true})
	}
	id := s.open(t)
	defer s.shut(id)
	c.bind(t.ctx, &t.moved)
	if err := c.send(message{OK: true, ID: id}); err != nil {
		return err
	}
	if err := in.receive(c); err != nil {
		return err
	}
	if err := t.wait(); err != nil {
		return err
	}
	return c.during(func() error {
		seg, err := in.publish()
		if err == nil {
			s.store.Published(seg)
		}
		return err
	})
}

func (s *Server) fetch(c *conn, m message) error {
	var p *shm.Pinned
	if err := c.during(func() (err error) { p, err = s.store.Copy(m.Rank, m.Save); return err }); err != nil {
		return fmt.Errorf("%w: %w", ErrMissing, err)
	}
	defer p.Release()
	o, err := offerOf(p)
	if err != nil {
		return err
	}
	t := newTransfer(s.ctx)
	out := newOutgoing(t.ctx, p)
	defer out.close()
	t.part = func(c *conn) error {
		if err := out.send(c); err != nil {
			return err
		}
		return sendEnd(c)
	}
	id := s.open(t)
	defer s.shut(id)
	return t.end(s.give(c, t, out, o, id))
}

// give sends the chunks of a fetch.
func (s *Server) give(c *conn, t *transfer, out *outgoing, o offer, id string) error {
	if err := o.write(c, message{OK: true, ID: id}); err != nil {
		return err
	}
	m, err := c.receive()
	if err != nil {
		return err
	}
	if m.Op != "go" {
		return fmt.Errorf("request %q instead of go", m.Op)
	}
	c.bind(t.ctx, &t.moved)
	if err := out.send(c); err != nil {
		return err
	}
	if err := t.wait(); err != nil {
		return err
	}
	return sendEnd(c)
}

// join makes a connection part of a transfer.
func (s *Server) join(c *conn, id string) error {
	s.mu.Lock()
	t := s.transfers[id]
	s.mu.Unlock()
	if t == nil || !t.join() {
		c.refuse(errOver)
		return nil // the transfer does without
	}
	if err := c.send(message{OK: true}); err != nil {
		t.wg.Done()
		return err
	}
	return t.help(c)
}

// open lets further connections join a transfer, by an id that cannot be guessed.
func (s *Server) open(t *transfer) (id string) {
	id = rand.Text()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.transfers[id] = t
	return id
}

func (s *Server) shut(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.transfers, id)
}

// begin makes t the push of a rank. A push that is still running belongs to a connection that the owner has closed: it
// ends, and its memory is free, before begin returns.
func (s *Server) begin(rank int, t *transfer) {
	for {
		s.mu.Lock()
		old := s.receiving[rank]
		if old == nil {
			s.receiving[rank] = &receiving{t, make(chan struct{})}
		}
		s.mu.Unlock()
		if old == nil {
			return
		}
		old.t.cancel(errSuperseded)
		<-old.ended
	}
}

func (s *Server) ended(rank int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.receiving[rank].ended)
	delete(s.receiving, rank)
}
