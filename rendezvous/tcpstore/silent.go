package tcpstore

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"
)

// silent are the connections that may stay silent for ever, each in a place of its address.
type silent struct {
	mu    sync.Mutex
	conns map[*conn]netip.Addr
	taken map[netip.Addr]int
}

// errSilent has been logged.
var errSilent = errors.New("tcpstore: nothing was sent")

// begin has f called for a new connection: when it may be read, or is closed, or at once if its time is limited.
func (s *Server) begin(c *conn, f func(*conn)) {
	if limited := s.silent.enter(c, &s.cfg); limited || !s.poller.park(c, f) {
		go f(c)
	}
}

// firstByte waits for the first byte of c: for Config.FirstByte, or for ever in a place for silent connections.
func (s *Server) firstByte(c *conn) (byte, error) {
	defer s.silent.leave(c)
	c.borrow()
	head, err := c.dec.r.Peek(1)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		s.refuse(c, "nothing was sent", "within", s.cfg.FirstByte.String())
		return 0, errSilent
	}
	if err != nil {
		return 0, err
	}
	return head[0], nil
}

// enter gives c a place, or the time that is left to it.
func (q *silent) enter(c *conn, cfg *Config) (limited bool) {
	if cfg.Silent == nil {
		prove(c.nc, true)
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	peer := c.peer.Addr()
	if !peer.IsValid() || q.taken[peer] >= cfg.Silent(peer) {
		_ = c.nc.SetReadDeadline(time.Now().Add(cfg.FirstByte))
		return true
	}
	if q.conns == nil {
		q.conns, q.taken = map[*conn]netip.Addr{}, map[netip.Addr]int{}
	}
	q.conns[c] = peer
	q.taken[peer]++
	prove(c.nc, true)
	return false
}

// leave takes the place of c back.
func (q *silent) leave(c *conn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if peer, ok := q.conns[c]; ok {
		delete(q.conns, c)
		if q.taken[peer]--; q.taken[peer] == 0 {
			delete(q.taken, peer)
		}
	}
	_ = c.nc.SetReadDeadline(time.Time{})
}

// evict frees all places: the connections that have them get rest.
func (q *silent) evict(rest time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for c := range q.conns {
		_ = c.nc.SetReadDeadline(time.Now().Add(rest))
		prove(c.nc, false)
		c.poller.wake(c)
	}
	clear(q.conns)
	clear(q.taken)
}

// prove reports to the counter of connections whether the peer of nc is known.
func prove(nc net.Conn, ok bool) {
	if p, is := nc.(interface{ Prove(bool) }); is {
		p.Prove(ok)
	}
}
