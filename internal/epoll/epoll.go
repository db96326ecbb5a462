// Package epoll waits for many connections with one goroutine. Each costs nothing but what the kernel keeps of it.
package epoll

import (
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// End are the events that a Set always reports: the connection has failed or is closed, by both sides.
const End = unix.EPOLLERR | unix.EPOLLHUP

// Set is an epoll of the kernel, see https://man7.org/linux/man-pages/man7/epoll.7.html. It is itself a file of the
// runtime's poller: no thread waits in a system call, and Close ends the wait.
type Set struct {
	file *os.File
	fd   int
	done sync.WaitGroup
}

// Open begins a Set. The caller closes it. One goroutine calls happened with at most 128 events at a time. Their memory
// is the Set's.
func Open(happened func([]unix.EpollEvent)) (*Set, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	_ = unix.SetNonblock(fd, true) // the runtime polls it then
	s := &Set{file: os.NewFile(uintptr(fd), "epoll"), fd: fd}
	s.done.Go(func() { s.run(happened) })
	return s, nil
}

// ID is the id of an Add.
func ID(e unix.EpollEvent) uint64 { return uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32 }

// Add has the next of these events of a descriptor reported once, as those of id. To close it removes it. Neither Add
// nor another method may run beside Close or after it.
func (s *Set) Add(fd int, id uint64, events uint32) error {
	return s.control(unix.EPOLL_CTL_ADD, fd, id, events)
}

// Await is Add for a descriptor that was added before.
func (s *Set) Await(fd int, id uint64, events uint32) error {
	return s.control(unix.EPOLL_CTL_MOD, fd, id, events)
}

// Remove is for a descriptor that stays open.
func (s *Set) Remove(fd int) error { return unix.EpollCtl(s.fd, unix.EPOLL_CTL_DEL, fd, nil) }

func (s *Set) control(op, fd int, id uint64, events uint32) error {
	e := unix.EpollEvent{Events: events | unix.EPOLLONESHOT, Fd: int32(uint32(id)), Pad: int32(uint32(id >> 32))}
	return unix.EpollCtl(s.fd, op, fd, &e)
}

func (s *Set) run(happened func([]unix.EpollEvent)) {
	raw, err := s.file.SyscallConn()
	if err != nil {
		return
	}
	events := make([]unix.EpollEvent, 128)
	for n := 0; err == nil; {
		err = raw.Read(func(fd uintptr) bool {
			var err error
			for n, err = unix.EpollWait(int(fd), events, 0); err == unix.EINTR; {
				n, err = unix.EpollWait(int(fd), events, 0)
			}
			return n != 0
		})
		if err == nil {
			happened(events[:max(n, 0)])
		}
	}
}

// Close waits until happened has returned.
func (s *Set) Close() {
	_ = s.file.Close()
	s.done.Wait()
}

// Control calls f with the descriptor of a connection. It returns the error of f, or net.ErrClosed and the like.
func Control(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = f(int(fd)) }); err != nil {
		return err
	}
	return failed
}
