package serve

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Sockets is l, whose connections, while nodes are expected, Go's poller hears of only when somebody has to wait for
// one: of those that the hub waits for itself it would be told of every packet, and would wake a thread for nothing.
// From then on they are *net.TCPConn with alive, as the others are. A listener that is not of TCP is returned as it is.
func (h *Hub) Sockets(l net.Listener, alive net.KeepAliveConfig) net.Listener {
	tl, ok := l.(*net.TCPListener)
	if !ok {
		return l
	}
	s := &sockets{TCPListener: tl, lot: h.lot, alive: alive}
	s.setOptions()
	return s
}

type sockets struct {
	*net.TCPListener
	lot   *lot
	alive net.KeepAliveConfig

	mu     sync.Mutex
	file   *os.File // the listener once more; nil: nobody was expected yet
	closed bool
}

// Accept implements net.Listener.
func (l *sockets) Accept() (net.Conn, error) {
	raw := l.second()
	if raw == nil {
		return l.TCPListener.Accept()
	}
	var (
		fd   int
		from unix.Sockaddr
		err  error
	)
	if raw.Read(func(listener uintptr) bool {
		fd, from, err = accept(int(listener))
		return err != unix.EAGAIN
	}) != nil {
		return nil, l.failed(net.ErrClosed)
	}
	if err != nil {
		return nil, l.failed(os.NewSyscallError("accept4", err))
	}
	return &socket{fd: fd, from: tcpAddr(from), alive: l.alive}, nil
}

// second is another descriptor of the listener while nodes are expected, or nil.
func (l *sockets) second() syscall.RawConn {
	if !l.lot.expecting() {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil && !l.closed {
		l.file, _ = l.File()
	}
	if l.file == nil {
		return nil
	}
	raw, _ := l.file.SyscallConn()
	return raw
}

// setOptions sets what sockets have from their listener, until they are *net.TCPConn. It is best effort: a host that is
// gone is found to be so when requests are not held any longer.
func (l *sockets) setOptions() {
	raw, err := l.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
		if !l.alive.Enable {
			return
		}
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(l.alive.Idle.Seconds()))
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, int(l.alive.Interval.Seconds()))
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_KEEPCNT, l.alive.Count)
	})
}

func (l *sockets) failed(err error) error {
	return &net.OpError{Op: "accept", Net: "tcp", Addr: l.Addr(), Err: err}
}

// accept passes over connections that have ended already.
func accept(listener int) (fd int, from unix.Sockaddr, err error) {
	for {
		fd, from, err = unix.Accept4(listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		if err != unix.EINTR && err != unix.ECONNABORTED {
			return fd, from, err
		}
	}
}

func tcpAddr(a unix.Sockaddr) net.Addr {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return &net.TCPAddr{IP: a.Addr[:], Port: a.Port}
	case *unix.SockaddrInet6:
		zone := ""
		if i, err := net.InterfaceByIndex(int(a.ZoneId)); a.ZoneId != 0 && err == nil {
			zone = i.Name
		}
		return &net.TCPAddr{IP: a.Addr[:], Port: a.Port, Zone: zone}
	}
	return &net.TCPAddr{}
}

// Close implements net.Listener.
func (l *sockets) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.file != nil {
		_ = l.file.Close()
	}
	return l.TCPListener.Close()
}

// socket is a connection of TCP. It is a file descriptor of its own until something is asked of it that may have to
// wait; that is when its descriptor becomes another one.
type socket struct {
	from  net.Addr
	alive net.KeepAliveConfig

	mu     sync.Mutex // held while the descriptor is used
	fd     int        // -1 when it is tcp's, or closed
	tcp    *net.TCPConn
	failed error // why there is none
}

// conn has Go's poller hear of it.
func (s *socket) conn() (*net.TCPConn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd >= 0 {
		s.tcp, s.failed = connOf(s.fd, s.alive)
		s.fd = -1
	}
	if s.tcp == nil && s.failed == nil {
		s.failed = net.ErrClosed
	}
	return s.tcp, s.failed
}

// connOf takes a descriptor over.
func connOf(fd int, alive net.KeepAliveConfig) (*net.TCPConn, error) {
	_ = unix.SetNonblock(fd, false) // or the poller would hear of this one, too
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		_ = c.Close()
		return nil, errNoSocket
	}
	_ = tcp.SetKeepAliveConfig(alive)
	return tcp, nil
}

// Read implements net.Conn. What is there already, or the end, needs no poller.
func (s *socket) Read(b []byte) (int, error) {
	switch n, err := s.readNow(b); {
	case err == unix.EAGAIN:
	case err != nil:
		return 0, &net.OpError{Op: "read", Net: "tcp", Addr: s.from, Err: os.NewSyscallError("read", err)}
	case n == 0:
		return 0, io.EOF
	default:
		return n, nil
	}
	tcp, err := s.conn()
	if err != nil {
		return 0, err
	}
	return tcp.Read(b)
}

// readNow returns EAGAIN when there is nothing, or it is for tcp to say.
func (s *socket) readNow(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 || len(b) == 0 {
		return 0, unix.EAGAIN
	}
	return unix.Read(s.fd, b)
}

// Write implements net.Conn.
func (s *socket) Write(b []byte) (int, error) {
	tcp, err := s.conn()
	if err != nil {
		return 0, err
	}
	return tcp.Write(b)
}

// Close implements net.Conn.
func (s *socket) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.tcp != nil:
		return s.tcp.Close()
	case s.fd < 0:
		return net.ErrClosed
	}
	fd := s.fd
	s.fd = -1
	return os.NewSyscallError("close", unix.Close(fd))
}

// CloseWrite ends what is sent; net/http asks for it.
func (s *socket) CloseWrite() error {
	tcp, err := s.conn()
	if err != nil {
		return err
	}
	return tcp.CloseWrite()
}

// RemoteAddr implements net.Conn.
func (s *socket) RemoteAddr() net.Addr { return s.from }

// LocalAddr implements net.Conn.
func (s *socket) LocalAddr() net.Addr {
	tcp, err := s.conn()
	if err != nil {
		return &net.TCPAddr{}
	}
	return tcp.LocalAddr()
}

// NetConn is the *net.TCPConn, or nil.
func (s *socket) NetConn() net.Conn {
	tcp, err := s.conn()
	if err != nil {
		return nil
	}
	return tcp
}

// SetDeadline implements net.Conn.
func (s *socket) SetDeadline(t time.Time) error {
	return s.set(func(c *net.TCPConn) error { return c.SetDeadline(t) })
}

// SetReadDeadline implements net.Conn.
func (s *socket) SetReadDeadline(t time.Time) error {
	return s.set(func(c *net.TCPConn) error { return c.SetReadDeadline(t) })
}

// SetWriteDeadline implements net.Conn.
func (s *socket) SetWriteDeadline(t time.Time) error {
	return s.set(func(c *net.TCPConn) error { return c.SetWriteDeadline(t) })
}

func (s *socket) set(f func(*net.TCPConn) error) error {
	tcp, err := s.conn()
	if err != nil {
		return err
	}
	return f(tcp)
}

// SyscallConn implements syscall.Conn.
func (s *socket) SyscallConn() (syscall.RawConn, error) { return rawSocket{s}, nil }

// rawSocket is the descriptor of a socket, whichever that is.
type rawSocket struct{ *socket }

// now calls f with the socket's own descriptor; false: there is none, or f has to wait.
func (s rawSocket) now(f func(fd uintptr) bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fd >= 0 && f(uintptr(s.fd))
}

// Control implements syscall.RawConn.
func (s rawSocket) Control(f func(fd uintptr)) error {
	if s.now(func(fd uintptr) bool { f(fd); return true }) {
		return nil
	}
	return s.later(func(raw syscall.RawConn) error { return raw.Control(f) })
}

// Read implements syscall.RawConn.
func (s rawSocket) Read(f func(fd uintptr) bool) error {
	if s.now(f) {
		return nil
	}
	return s.later(func(raw syscall.RawConn) error { return raw.Read(f) })
}

// Write implements syscall.RawConn.
func (s rawSocket) Write(f func(fd uintptr) bool) error {
	if s.now(f) {
		return nil
	}
	return s.later(func(raw syscall.RawConn) error { return raw.Write(f) })
}

func (s rawSocket) later(f func(syscall.RawConn) error) error {
	tcp, err := s.conn()
	if err != nil {
		return err
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return err
	}
	return f(raw)
}
