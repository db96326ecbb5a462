package serve

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// poller tells which of many sockets there is news of. Go's own poller needs a goroutine for each socket that is waited
// for; this one is itself a file that Go's poller watches. Any number of goroutines may wait, and each piece of news is
// told to one of them.
type poller struct {
	file *os.File
	raw  syscall.RawConn
}

// news is what has happened at a socket: something has come, or it has ended.
type news struct {
	socket uint64 // as it was called in add
	ended  bool   // by the other end, or by an error: a read does not wait
}

// newsAtOnce is how much of it wait returns at a time. The rest is for others.
const newsAtOnce = 256

func newPoller() (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // os.NewFile gives only such files to Go's poller
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	file := os.NewFile(uintptr(fd), "epoll")
	raw, err := file.SyscallConn()
	return &poller{file, raw}, err
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

func (p *poller) control(op int, socket syscall.RawConn, id uint64) (err error) {
	// Each piece of news is told once: what is not read now need not be asked for again.
	event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET, Fd: int32(id), Pad: int32(id >> 32)}
	var inner error
	outer := p.raw.Control(func(epoll uintptr) {
		inner = socket.Control(func(fd uintptr) {
			err = unix.EpollCtl(int(epoll), op, int(fd), &event)
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
	n := 0
	err := p.raw.Read(func(fd uintptr) bool {
		n, _ = unix.EpollWait(int(fd), w.events[:], 0)
		return n > 0
	})
	for i := range n {
		e := &w.events[i]
		w.news[i] = news{
			socket: uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32,
			ended:  e.Events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0,
		}
	}
	return w.news[:max(n, 0)], err
}

// close ends all waits.
func (p *poller) close() { _ = p.file.Close() }
