package tcpstore

import (
	"net"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/epoll"
)

// poller has the connections that wait for bytes: they cost no goroutine and no buffer. One goroutine waits for all of
// them, and starts one for each that has bytes or has ended. Few of these run at a time, as their stacks are most of
// the memory that a crowd takes: one that has to wait for its client gives its turn back before.
type poller struct {
	mu     sync.Mutex
	epoll  *epoll.Set // nil before the first connection
	closed bool
	conns  map[connID]*conn // all that are in the epoll, waiting or not
	turns  chan struct{}    // holds one for each goroutine that has its turn
}

// turn is that of the goroutine of a connection.
type turn byte

const (
	none  turn = iota
	fresh      // it was started for bytes that are there
	used       // it has read them
)

// park has f called in a goroutine once c can be read, or is closed by its method. It reports false if that cannot be.
// Otherwise c is no longer the caller's.
func (p *poller) park(c *conn, f func(*conn)) bool {
	if c.tcp == nil && c.sock == nil {
		return false
	}
	c.yield()
	p.mu.Lock()
	defer p.mu.Unlock()
	c.resume = f
	if p.armLocked(c) != nil { // it is closed, or the kernel is out of memory
		c.resume = nil
		return false
	}
	return true
}

// await waits until c can be read. It reports false if it never can.
func (p *poller) await(c *conn) bool {
	readable := make(chan struct{})
	if !p.park(c, func(*conn) { close(readable) }) {
		return false
	}
	<-readable
	return true
}

// awaitRoom waits until c takes bytes, or is closed.
func (p *poller) awaitRoom(c *conn, timeout time.Duration) error {
	room := make(chan struct{})
	p.mu.Lock()
	c.room = room
	err := p.armLocked(c)
	p.mu.Unlock()
	if err != nil {
		return err
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-room:
		return nil
	case <-timer.C:
		return os.ErrDeadlineExceeded
	}
}

// armLocked has the epoll report the events for which c waits, once.
func (p *poller) armLocked(c *conn) error {
	if p.closed || p.epoll == nil && !p.openLocked() {
		return net.ErrClosed
	}
	events := uint32(0)
	if c.resume != nil {
		events |= unix.EPOLLIN
	}
	if c.room != nil {
		events |= unix.EPOLLOUT
	}
	await := p.epoll.Await
	if p.conns[c.id] == nil {
		await = p.epoll.Add
	}
	err := c.control(func(fd int) error { return await(fd, uint64(c.id), events) })
	if err == nil {
		p.conns[c.id] = c
	}
	return err
}

// replace has the epoll watch s in place of c's connection of package net. It reports false if that cannot be.
func (p *poller) replace(c *conn, s *socket) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.epoll == nil && !p.openLocked() {
		return false
	}
	if s.control(func(fd int) error { return p.epoll.Add(fd, uint64(c.id), 0) }) != nil {
		return false
	}
	if p.conns[c.id] != nil { // closing would not do: the socket stays open
		_ = epoll.Control(c.tcp, p.epoll.Remove)
	}
	p.conns[c.id] = c
	return true
}

func (p *poller) openLocked() bool {
	set, err := epoll.Open(p.start)
	if err != nil {
		return false
	}
	p.epoll, p.conns, p.turns = set, map[connID]*conn{}, make(chan struct{}, 16*runtime.GOMAXPROCS(0))
	return true
}

// start starts goroutines for events.
func (p *poller) start(events []unix.EpollEvent) {
	for _, e := range events {
		if c, resume := p.happened(e); resume != nil {
			p.turns <- struct{}{}
			c.turn = fresh
			go resume(c)
		}
	}
}

// happened ends the waits for a reported event, and returns the function that was parked for it.
func (p *poller) happened(e unix.EpollEvent) (*conn, func(*conn)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.conns[connID(epoll.ID(e))]
	if c == nil {
		return nil, nil
	}
	if e.Events&(unix.EPOLLOUT|epoll.End) != 0 {
		c.roomLocked()
	}
	var resume func(*conn)
	if e.Events&(unix.EPOLLIN|epoll.End) != 0 {
		resume, c.resume = c.resume, nil
	}
	if c.resume != nil || c.room != nil {
		_ = p.armLocked(c)
	}
	return c, resume
}

// roomLocked ends awaitRoom.
func (c *conn) roomLocked() {
	if c.room != nil {
		close(c.room)
		c.room = nil
	}
}

// take ends all waits of c, and returns the function that was parked; nil: none was.
func (p *poller) take(c *conn) func(*conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c.roomLocked()
	resume := c.resume
	c.resume = nil
	return resume
}

// wake has a connection go on that has no bytes.
func (p *poller) wake(c *conn) {
	if resume := p.take(c); resume != nil {
		go resume(c)
	}
}

// forget is for a connection that will not wait again.
func (p *poller) forget(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c.id)
}

// close has all that wait go on, each in a goroutine that waits by itself.
func (p *poller) close() {
	p.mu.Lock()
	p.closed = true
	conns := p.conns
	p.conns = nil
	p.mu.Unlock()
	for _, c := range conns {
		p.wake(c)
	}
	if p.epoll != nil {
		p.epoll.Close()
	}
}
