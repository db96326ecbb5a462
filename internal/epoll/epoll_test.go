package epoll

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair are both ends of a connection.
func pair(t *testing.T) (ours, theirs *net.TCPConn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	s, err := l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { c.Close(); s.Close() })
	return s.(*net.TCPConn), c.(*net.TCPConn)
}

func TestSet(t *testing.T) {
	const id = uint64(0xfedcba9876543210) // all bits of it come back
	got := make(chan unix.EpollEvent, 10)
	s, err := Open(func(events []unix.EpollEvent) {
		for _, e := range events {
			got <- e
		}
	})
	require.NoError(t, err)
	defer s.Close()
	ours, theirs := pair(t)
	happens := func(events uint32) {
		t.Helper()
		select {
		case e := <-got:
			require.Equal(t, id, ID(e))
			require.Equal(t, events, e.Events)
		case <-time.After(time.Minute):
			require.Fail(t, "nothing has happened")
		}
	}
	nothing := func() {
		t.Helper()
		time.Sleep(20 * time.Millisecond)
		require.Empty(t, got)
	}
	await := func(call func(int, uint64, uint32) error) {
		require.NoError(t, Control(ours, func(fd int) error { return call(fd, id, unix.EPOLLIN) }))
	}

	await(s.Add)
	nothing()
	_, err = theirs.Write([]byte("x"))
	require.NoError(t, err)
	happens(unix.EPOLLIN)
	nothing() // it is reported once
	await(s.Await)
	happens(unix.EPOLLIN)

	require.NoError(t, Control(ours, s.Remove))
	require.Error(t, Control(ours, func(fd int) error { return s.Await(fd, id, unix.EPOLLIN) }))
	await(s.Add)
	happens(unix.EPOLLIN)

	require.NoError(t, Control(ours, func(fd int) error { return s.Await(fd, id, 0) }))
	nothing()
	require.NoError(t, theirs.SetLinger(0))
	require.NoError(t, theirs.Close()) // resets the connection
	e := <-got
	require.NotZero(t, e.Events&End)

	require.NoError(t, ours.Close())
	require.ErrorIs(t, Control(ours, s.Remove), net.ErrClosed)
}

func TestCloseWaitsForWhatHappens(t *testing.T) {
	begun, ends := make(chan struct{}), false
	s, err := Open(func([]unix.EpollEvent) {
		close(begun)
		time.Sleep(50 * time.Millisecond)
		ends = true
	})
	require.NoError(t, err)
	ours, theirs := pair(t)
	_, err = theirs.Write([]byte("x"))
	require.NoError(t, err)
	require.NoError(t, Control(ours, func(fd int) error { return s.Add(fd, 1, unix.EPOLLIN) }))
	<-begun
	s.Close()
	require.True(t, ends)
}
