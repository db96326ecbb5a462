package serve

import (
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/netcheck"
)

// expecting is a listener of Sockets while nodes are expected.
func expecting(t *testing.T, l net.Listener, alive net.KeepAliveConfig) net.Listener {
	h := New(Config{})
	t.Cleanup(h.Close)
	h.lot.expect(1)
	return h.Sockets(l, alive)
}

// plugged are the ends of a connection through one.
func plugged(t *testing.T, addr string) (a *socket, b *net.TCPConn) {
	l, err := net.Listen("tcp", addr)
	require.NoError(t, err)
	l = expecting(t, l, net.KeepAliveConfig{Enable: true, Idle: 7 * time.Second, Interval: 3 * time.Second, Count: 2})
	defer l.Close()
	require.IsType(t, &sockets{}, l)
	c, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	nc, err := l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = c.Close(), nc.Close() })
	return nc.(*socket), c.(*net.TCPConn)
}

// bare says that Go's poller has not heard of a socket.
func (s *socket) bare() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tcp == nil
}

func within(t *testing.T, c net.Conn) {
	require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
}

func TestSocketReadsWhatIsThere(t *testing.T) {
	a, b := plugged(t, "127.0.0.1:0")
	require.Equal(t, b.LocalAddr().String(), a.RemoteAddr().String())
	_, err := b.Write([]byte("hello"))
	require.NoError(t, err)
	raw, err := a.SyscallConn()
	require.NoError(t, err)
	await(t, raw)
	buf := make([]byte, 4)
	n, err := a.Read(buf)
	require.NoError(t, err)
	require.Equal(t, "hell", string(buf[:n]))
	n, err = a.Read(nil)
	require.NoError(t, err)
	require.Zero(t, n)
}

func TestSocketEnds(t *testing.T) {
	for name, end := range map[string]func(*net.TCPConn) error{
		"EOF": (*net.TCPConn).CloseWrite,
		"connection reset by peer": func(b *net.TCPConn) error {
			_ = b.SetLinger(0)
			return b.Close()
		},
	} {
		a, b := plugged(t, "127.0.0.1:0")
		require.NoError(t, end(b))
		raw, _ := a.SyscallConn()
		await(t, raw)
		_, err := a.Read(make([]byte, 1))
		require.ErrorContains(t, err, name)
		require.True(t, a.bare())
		require.NoError(t, a.Close())
		require.ErrorIs(t, a.Close(), net.ErrClosed)
		_, err = a.Read(make([]byte, 1))
		require.ErrorIs(t, err, net.ErrClosed)
	}
}

// await polls until something can be read from a socket.
func await(t *testing.T, raw syscall.RawConn) {
	require.Eventually(t, func() bool {
		n := 0
		err := raw.Control(func(fd uintptr) {
			n, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		})
		return err == nil && n == 1
	}, 10*time.Second, time.Millisecond)
}

// What may have to wait makes it a *net.TCPConn, with the options of one.
func TestSocketThatWaits(t *testing.T) {
	for name, f := range map[string]func(a *socket, b *net.TCPConn) error{
		"read": func(a *socket, b *net.TCPConn) error {
			time.AfterFunc(20*time.Millisecond, func() { _, _ = b.Write([]byte("x")) })
			_, err := a.Read(make([]byte, 1))
			return err
		},
		"write": func(a *socket, b *net.TCPConn) error {
			_, err := a.Write([]byte("x"))
			return err
		},
		"end":     func(a *socket, _ *net.TCPConn) error { return a.CloseWrite() },
		"NetConn": func(a *socket, _ *net.TCPConn) error { a.NetConn(); return nil },
		"deadline": func(a *socket, _ *net.TCPConn) error {
			if err := a.SetReadDeadline(time.Now().Add(-time.Second)); err != nil {
				return err
			}
			if _, err := a.Read(make([]byte, 1)); !os.IsTimeout(err) {
				return fmt.Errorf("want a timeout: %w", err)
			}
			return a.SetWriteDeadline(time.Time{})
		},
		"raw read": func(a *socket, b *net.TCPConn) error {
			time.AfterFunc(20*time.Millisecond, func() { _, _ = b.Write([]byte("x")) })
			raw, _ := a.SyscallConn()
			return raw.Read(func(fd uintptr) bool {
				_, err := unix.Read(int(fd), make([]byte, 1))
				return err == nil
			})
		},
		"raw write": func(a *socket, _ *net.TCPConn) error {
			raw, _ := a.SyscallConn()
			tries := 0
			return raw.Write(func(uintptr) bool { tries++; return tries > 1 })
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := plugged(t, "127.0.0.1:0")
			raw, err := a.SyscallConn()
			require.NoError(t, err)
			keeps := func() {
				for option, want := range map[int]int{
					unix.TCP_KEEPIDLE: 7, unix.TCP_KEEPINTVL: 3, unix.TCP_KEEPCNT: 2, unix.TCP_NODELAY: 1,
				} {
					got := 0
					require.NoError(t, raw.Control(func(fd uintptr) {
						got, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, option)
					}), "it is the descriptor of now")
					require.NoError(t, err)
					require.Equal(t, want, got)
				}
			}
			keeps()
			require.True(t, a.bare())
			require.NoError(t, f(a, b))
			require.False(t, a.bare())
			tcp := a.NetConn().(*net.TCPConn)
			require.Equal(t, tcp.LocalAddr(), a.LocalAddr())
			require.Equal(t, tcp.RemoteAddr().String(), a.RemoteAddr().String())
			keeps()
			within(t, a)
			_, err = b.Write([]byte("y"))
			require.NoError(t, err)
			_, err = a.Read(make([]byte, 1))
			require.NoError(t, err)
			require.NoError(t, a.Close())
			_, err = b.Read(make([]byte, 2))
			require.True(t, err == nil || err == io.EOF, err)
		})
	}
}

func TestSocketIsClosedWhileSomebodyWaits(t *testing.T) {
	a, _ := plugged(t, "127.0.0.1:0")
	done := make(chan error)
	go func() {
		_, err := a.Read(make([]byte, 1))
		done <- err
	}()
	require.Eventually(t, func() bool { return !a.bare() }, 10*time.Second, time.Millisecond)
	require.NoError(t, a.Close())
	require.ErrorIs(t, <-done, net.ErrClosed)
}

func TestSocketThatIsClosed(t *testing.T) {
	a, _ := plugged(t, "127.0.0.1:0")
	raw, err := a.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, a.Close())
	_, err = a.Write([]byte("x"))
	require.ErrorIs(t, err, net.ErrClosed)
	require.ErrorIs(t, a.SetDeadline(time.Time{}), net.ErrClosed)
	require.ErrorIs(t, a.CloseWrite(), net.ErrClosed)
	require.ErrorIs(t, raw.Control(func(uintptr) { require.Fail(t, "called") }), net.ErrClosed)
	require.ErrorIs(t, raw.Read(func(uintptr) bool { return true }), net.ErrClosed)
	require.Nil(t, a.NetConn())
	require.NotNil(t, a.LocalAddr())
}

func TestSocketOfIPv6(t *testing.T) {
	if l, err := net.Listen("tcp", "[::1]:0"); err != nil {
		t.Skip("SOCKETS ARE NOT TESTED WITH IPv6: there is none here")
	} else {
		_ = l.Close()
	}
	a, b := plugged(t, "[::1]:0")
	require.Equal(t, b.LocalAddr().String(), a.RemoteAddr().String())
	require.Equal(t, b.RemoteAddr().String(), a.LocalAddr().String())
}

func TestSocketsEnd(t *testing.T) {
	var err error
	for range 5 { // another process may take the port
		var tl net.Listener
		tl, err = net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		l := expecting(t, tl, net.KeepAliveConfig{})
		require.Equal(t, tl.Addr(), l.Addr())
		done := make(chan error)
		go func() {
			_, err := l.Accept()
			done <- err
		}()
		time.Sleep(20 * time.Millisecond) // it waits by then, mostly; else it does not begin
		require.NoError(t, l.Close())
		require.ErrorIs(t, <-done, net.ErrClosed)
		if tl, err = net.Listen("tcp", tl.Addr().String()); err == nil {
			_ = tl.Close()
			return
		}
	}
	require.NoError(t, err, "the port is not free")
}

// A server waits when there are no descriptors, and does not end.
func TestSocketsWithoutDescriptors(t *testing.T) {
	tl, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer tl.Close()
	err = (&sockets{TCPListener: tl.(*net.TCPListener)}).failed(os.NewSyscallError("accept4", unix.EMFILE))
	var temporary interface{ Temporary() bool }
	require.ErrorAs(t, err, &temporary)
	require.True(t, temporary.Temporary())
}

type otherListener struct{ net.Listener }

func TestSocketsOfOtherListeners(t *testing.T) {
	l := otherListener{}
	require.Equal(t, l, New(Config{}).Sockets(l, net.KeepAliveConfig{}))
}

// The server has never had the connection of the second node, which gets an answer that it does not take at once, and
// then the next one.
func TestALargeAnswerOnABareSocket(t *testing.T) {
	f := newFront(t)
	f.expect()
	require.Equal(t, 200, f.arrives("a").status())
	k := f.arrives("b")
	require.Equal(t, 200, k.status())
	r := f.find("r")
	assign := func(reason string) {
		r.mu.Lock()
		defer r.mu.Unlock()
		v := netcheck.Verdict{State: netcheck.StateOK, Reason: reason}
		r.assignLocked(time.Now(), "b", netcheck.Assignment{Duty: netcheck.Decided, Verdict: &v})
	}
	require.Equal(t, 1, f.bare(), "b's; who was expected is known after the first of them has come")
	const size = 16 << 20
	assign(strings.Repeat("x", size))
	for range 2 {
		k.say(k.next("b"))
		_, n := k.answer()
		require.Greater(t, n, size)
	}
	require.Zero(t, f.bare())
	assign("short")
	k.say(k.next("b"))
	_, n := k.answer()
	require.Less(t, n, 1000)
	require.EqualValues(t, 1, f.asked.Load())
}

// next asks for an assignment.
func (k *keeper) next(id string) string {
	body := text(ask(id, 0))
	return fmt.Sprintf("%s\r\nHost: h\r\nContent-Length: %d\r\n%s\r\n%s", theLine, len(body), theToken, body)
}

// bare is how many of the connections Go's poller has not heard of.
func (f *front) bare() (n int) {
	f.lot.mu.Lock()
	defer f.lot.mu.Unlock()
	for _, p := range f.lot.conns {
		if s, ok := p.Conn.(*provable).Conn.(*socket); ok && s.bare() {
			n++
		}
	}
	return n
}

// While nobody is expected, sockets are as they always were.
func TestSocketsOfStrangers(t *testing.T) {
	tl, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	h := New(Config{})
	defer h.Close()
	l := h.Sockets(tl, net.KeepAliveConfig{})
	defer l.Close()
	took := func() net.Conn {
		c, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		nc, err := l.Accept()
		require.NoError(t, err)
		t.Cleanup(func() { _ = nc.Close() })
		return nc
	}
	require.IsType(t, &net.TCPConn{}, took())
	require.Nil(t, l.(*sockets).file)
	h.lot.expect(1)
	require.IsType(t, &socket{}, took())
	h.lot.until.Store(1)
	require.IsType(t, &net.TCPConn{}, took())
	require.NoError(t, l.Close())
	h.lot.expect(1)
	_, err = l.Accept()
	require.ErrorIs(t, err, net.ErrClosed)
}

// Nodes that wait are no strangers, however many of those there are.
func TestWhoIsWaitedForIsSpared(t *testing.T) {
	f := newFront(t)
	f.expect()
	f.silent()
	require.EqualValues(t, 1, f.spared.Load())
	require.EqualValues(t, 6, f.lot.most.Load(), "twice as many as are expected")
	f.lot.expect(maxFirsts)
	require.EqualValues(t, maxFirsts, f.lot.most.Load())
	f.lot.mu.Lock()
	f.lot.counting = f.lot.counting.Add(-2 * expectTime)
	f.lot.mu.Unlock()
	f.lot.expect(1)
	require.EqualValues(t, 2, f.lot.most.Load())
}
