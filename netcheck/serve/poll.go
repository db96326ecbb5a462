package serve

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// poller tells which of many sockets there is news of. Go's own poller needs a goroutine for each socket that is waited
// for; here any number of goroutines may wait, and each piece of news is told to one of them.
//
// Go's poller watches the bell alone, which rings only when somebody waits: while all are busy, or rest so that more
// comes at the next look, no thread is woken for what comes.
type poller struct {
	epoll, bell       *os.File // the bell is an epoll of the other one
	sockets, bellConn syscall.RawConn
}

// news is what has happened at a socket: something has come, or it has ended.
type news struct {
	socket uint64 // as it was called in add
	ended  bool   // by the other end, or by an error: a read does not wait
}

// newsAtOnce is how much of it wait returns at a time. The rest is for others.
const newsAtOnce = 256

func newPoller() (p *poller, err error) {
	p = &poller{}
	if p.epoll, p.sockets, err = newEpoll(false); err != nil {
		return nil, err
	}
	if p.bell, p.bellConn, err = newEpoll(true); err != nil {
		_ = p.epoll.Close()
		return nil, err
	}
	if err = p.ring(unix.EPOLL_CTL_ADD, 0); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func newEpoll(watched bool) (*os.File, syscall.RawConn, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := unix.SetNonblock(fd, watched); err != nil { // Go's poller watches such files alone
		_ = unix.Close(fd)
		return nil, nil, os.NewSyscallError("fcntl", err)
	}
	file := os.NewFile(uintptr(fd), "epoll")
	raw, err := file.SyscallConn()
	return file, raw, err
}

// ring sets for what the bell rings.
func (p *poller) ring(op int, events uint32) error {
	return control(p.bellConn, op, p.sockets, unix.EpollEvent{Events: events})
}

// add has the news of a socket told from now on; of what there is already, at once. They end when it is closed.
func (p *poller) add(socket syscall.RawConn, id uint64) error {
	return p.control(unix.EPOLL_CTL_ADD, socket, id)
}

// again tells what was told before, if it still is so.
func (p *poller) again(socket syscall.RawConn, id uint64) error {
	return p.control(unix.EPOLL_CTL_MOD, socket, id)
}

func (p *poller) remove(socket syscall.RawConn) error {
	return p.control(unix.EPOLL_CTL_DEL, socket, 0)
}

func (p *poller) control(op int, socket syscall.RawConn, id uint64) error {
	// Each piece of news is told once: what is not read now need not be asked for again.
	const events = unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET
	return control(p.sockets, op, socket, unix.EpollEvent{Events: events, Fd: int32(id), Pad: int32(id >> 32)})
}

func control(epoll syscall.RawConn, op int, what syscall.RawConn, event unix.EpollEvent) (err error) {
	var inner error
	outer := epoll.Control(func(e uintptr) {
		inner = what.Control(func(fd uintptr) {
			err = unix.EpollCtl(int(e), op, int(fd), &event)
		})
	})
	for _, e := range []error{outer, inner} {
		if e != nil {
			return e
		}
	}
	return os.NewSyscallError("epoll_ctl", err)
}

// waiting is the memory of one who waits.
type waiting struct {
	events [newsAtOnce]unix.EpollEvent
	news   [newsAtOnce]news
}

// wait returns what is new, and an error only after close.
func (p *poller) wait(w *waiting) ([]news, error) {
	n, err := p.look(w)
	if err != nil || n > 0 {
		return w.told(n), err
	}
	err = p.bellConn.Read(func(bell uintptr) bool {
		_, _ = unix.EpollWait(int(bell), w.events[:1], 0) // it has rung, and does not again before it is asked to
		if n, _ = p.look(w); n == 0 {
			_ = p.ring(unix.EPOLL_CTL_MOD, unix.EPOLLIN|unix.EPOLLONESHOT) // now, if something came meanwhile
		}
		return n > 0
	})
	return w.told(n), err
}

// look returns how much is new.
func (p *poller) look(w *waiting) (n int, err error) {
	err = p.sockets.Control(func(fd uintptr) { n, _ = unix.EpollWait(int(fd), w.events[:], 0) })
	return max(n, 0), err
}

// told is what the first n events say.
func (w *waiting) told(n int) []news {
	for i := range n {
		e := &w.events[i]
		w.news[i] = news{
			socket: uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32,
			ended:  e.Events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0,
		}
	}
	return w.news[:n]
}

// close ends all waits.
func (p *poller) close() { _, _ = p.bell.Close(), p.epoll.Close() }
