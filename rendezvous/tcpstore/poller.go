package tcpstore

import (
	"os"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// poller has the connections that wait for bytes: they cost no goroutine and no buffer. One goroutine waits for all of
// them, and starts one for each that has bytes or has ended. Few of these run at a time, as their stacks are most of
// the memory that a crowd takes: one that has to wait for its client gives its turn back before.
//
// The epoll is itself a file of the runtime's poller: no thread waits in a system call, and its end ends the wait.
type poller struct {
	mu     sync.Mutex
	epoll  *os.File // nil before the first connection
	fd     int      // of epoll
	closed bool
	parked map[connID]*conn
	turns  chan struct{} // holds one for each goroutine that has its turn
	done   sync.WaitGroup
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
	if c.raw == nil {
		return false
	}
	c.yield()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.epoll == nil && !p.openLocked() {
		return false
	}
	op := unix.EPOLL_CTL_MOD
	if !c.added {
		op = unix.EPOLL_CTL_ADD
	}
	event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLONESHOT, Fd: int32(c.id), Pad: int32(c.id >> 32)}
	var failed error
	err := c.raw.Control(func(fd uintptr) { failed = unix.EpollCtl(p.fd, op, int(fd), &event) })
	if err != nil || failed != nil { // it is closed, or the kernel is out of memory
		return false
	}
	c.added, c.resume, p.parked[c.id] = true, f, c
	return true
}

func (p *poller) openLocked() bool {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return false
	}
	_ = unix.SetNonblock(fd, true) // which has the runtime poll it
	p.epoll, p.fd, p.parked = os.NewFile(uintptr(fd), "epoll"), fd, map[connID]*conn{}
	p.turns = make(chan struct{}, 16*runtime.GOMAXPROCS(0))
	p.done.Go(func() { p.run(p.epoll) })
	return true
}

// run starts goroutines until close.
func (p *poller) run(epoll *os.File) {
	raw, err := epoll.SyscallConn()
	if err != nil {
		return
	}
	events := make([]unix.EpollEvent, 128)
	for n := 0; ; {
		err := raw.Read(func(fd uintptr) bool {
			var err error
			for n, err = unix.EpollWait(int(fd), events, 0); err == unix.EINTR; {
				n, err = unix.EpollWait(int(fd), events, 0)
			}
			return n != 0
		})
		if err != nil {
			return
		}
		for _, e := range events[:max(n, 0)] {
			if c := p.take(connID(uint32(e.Fd)) | connID(uint32(e.Pad))<<32); c != nil {
				p.turns <- struct{}{}
				c.turn = fresh
				go c.resume(c)
			}
		}
	}
}

// take ends the wait of a connection; nil: it does not wait.
func (p *poller) take(id connID) *conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.parked[id]
	delete(p.parked, id)
	return c
}

// wake has a connection go on that has no bytes.
func (p *poller) wake(id connID) {
	if c := p.take(id); c != nil {
		go c.resume(c)
	}
}

// close has all that wait go on, each in a goroutine that waits by itself.
func (p *poller) close() {
	p.mu.Lock()
	p.closed = true
	parked := p.parked
	p.parked = nil
	if p.epoll != nil {
		_ = p.epoll.Close()
	}
	p.mu.Unlock()
	for _, c := range parked {
		go c.resume(c)
	}
	p.done.Wait()
}
