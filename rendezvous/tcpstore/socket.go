package tcpstore

import (
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/epoll"
)

// socket is a TCP connection without what package net and the runtime keep for one: 0.8 kB. Its methods may be called
// at the same time, and never wait: read and write return EAGAIN. A number that is closed is soon another file's, so no
// system call has it without mu.
type socket struct {
	mu sync.Mutex
	fd int // -1: closed
}

// socketOf returns another descriptor of a connection, which stays open when nc is closed; nil: there is none left.
func socketOf(nc *net.TCPConn) *socket {
	s := &socket{fd: -1}
	_ = epoll.Control(nc, func(fd int) (err error) {
		s.fd, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		return err
	})
	if s.fd < 0 {
		return nil
	}
	return s
}

func (s *socket) control(f func(fd int) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return net.ErrClosed
	}
	for {
		if err := f(s.fd); err != unix.EINTR {
			return err
		}
	}
}

func (s *socket) read(b []byte) (n int, err error) {
	err = s.control(func(fd int) (err error) {
		n, err = unix.Read(fd, b)
		return err
	})
	switch {
	case err == unix.EAGAIN || err == net.ErrClosed:
		return 0, err
	case err != nil:
		return 0, os.NewSyscallError("read", err)
	case n == 0 && len(b) > 0:
		return 0, io.EOF
	}
	return n, nil
}

func (s *socket) write(b []byte) (n int, err error) {
	err = s.control(func(fd int) (err error) {
		n, err = unix.Write(fd, b)
		return err
	})
	return max(n, 0), err
}

func (s *socket) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd >= 0 {
		_ = unix.Close(s.fd)
		s.fd = -1
	}
}
