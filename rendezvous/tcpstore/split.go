package tcpstore

import (
	"bytes"
	"fmt"
	"net"
	"sync"
)

// Split serves the store traffic of l on s, and hands every other connection to the returned listener: one port
// carries the rendezvous API and the workers' store. The first byte decides: a store client begins with a byte of at
// most 8, HTTP with an upper-case letter, TLS with 22. Config.Allow applies to store traffic alone.
//
// Config.Silent and Config.FirstByte bound connections that send nothing. Store traffic on a connection accepted before
// a Reset is closed at its first byte. If the connections of l have a method Prove(bool), it is called with whether the
// peer is known: by an allowed address, or a place for a silent one. Connections that are handed on are unknown.
// Connections with a method Detach as that of conns.Conn cost less memory once they are the store's.
//
// Closing the returned listener closes l and the undecided connections and waits for the goroutines. Store connections
// last until Close or Reset of s.
func Split(l net.Listener, s *Server) net.Listener {
	sp := &splitter{
		Listener: l, s: s, others: make(chan net.Conn), done: make(chan struct{}), silent: make(map[*conn]struct{}),
	}
	sp.wg.Go(func() {
		err := acceptAll(l, s.cfg.Logger, sp.take)
		sp.stop(fmt.Errorf("tcpstore: accept on %s: %w", l.Addr(), err))
	})
	return sp
}

type splitter struct {
	net.Listener // the real one
	s            *Server
	others       chan net.Conn
	done         chan struct{} // closed by stop

	mu     sync.Mutex
	err    error // why it stopped
	silent map[*conn]struct{}

	wg sync.WaitGroup // the accept loop and the undecided connections
}

// Accept returns the next connection that is not store traffic.
func (sp *splitter) Accept() (net.Conn, error) {
	select {
	case nc := <-sp.others:
		return nc, nil
	case <-sp.done:
		sp.mu.Lock()
		defer sp.mu.Unlock()
		return nil, sp.err
	}
}

// Close stops listening; see Split.
func (sp *splitter) Close() error {
	err := sp.Listener.Close()
	sp.stop(net.ErrClosed)
	sp.wg.Wait()
	return err
}

func (sp *splitter) stop(cause error) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	if sp.err != nil {
		return
	}
	sp.err = cause
	close(sp.done)
	for c := range sp.silent {
		c.close()
	}
}

func (sp *splitter) take(nc net.Conn) {
	c := sp.s.newConn(nc)
	if !sp.add(c) {
		return
	}
	sp.wg.Add(1)
	sp.s.begin(c, sp.decide)
}

// decide serves c from its first byte on, if it is the store's.
func (sp *splitter) decide(c *conn) {
	isStore := sp.sort(c) && sp.s.admit(c)
	sp.wg.Done()
	if !isStore {
		c.rest()
		sp.s.poller.forget(c)
		return
	}
	c.shed()
	sp.s.serve(c)
}

// add notes c for stop, or closes it.
func (sp *splitter) add(c *conn) bool {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	if sp.err != nil {
		c.nc.Close()
		return false
	}
	sp.silent[c] = struct{}{}
	return true
}

// sort waits for the first byte and reports whether c is the store's; otherwise it has handed c over or closed it.
func (sp *splitter) sort(c *conn) bool {
	first, err := sp.s.firstByte(c)
	sp.mu.Lock()
	delete(sp.silent, c)
	sp.mu.Unlock()
	if err == nil && first <= lastByteA {
		return true
	}
	if err == nil {
		prove(c.nc, false)
		head, _ := c.dec.r.Peek(c.dec.r.Buffered())
		other := &peeked{c.nc, bytes.Clone(head)}
		c.rest()
		select {
		case sp.others <- other:
			return false
		case <-sp.done:
		}
	}
	c.nc.Close()
	return false
}

// peeked is a connection whose first bytes have been read.
type peeked struct {
	net.Conn
	head []byte
}

// NetConn is the connection below.
func (p *peeked) NetConn() net.Conn { return p.Conn }

// Prove passes ok to the connection below.
func (p *peeked) Prove(ok bool) { prove(p.Conn, ok) }

// Read returns the first bytes first.
func (p *peeked) Read(b []byte) (int, error) {
	if len(p.head) == 0 || len(b) == 0 {
		return p.Conn.Read(b)
	}
	n := copy(b, p.head)
	if p.head = p.head[n:]; len(p.head) == 0 {
		p.head = nil
	}
	return n, nil
}
