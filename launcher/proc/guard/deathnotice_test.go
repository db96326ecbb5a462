package guard

import (
	"bytes"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func newPages(t testing.TB) int {
	fd, err := newState([]string{"x"}, "", false)
	require.NoError(t, err)
	t.Cleanup(func() { syscall.Close(fd) })
	return fd
}

// A launcher that is killed before it has read its arguments has no death notice in their place.
func TestDeathNoticeIsStored(t *testing.T) {
	fd := newPages(t)
	require.Empty(t, readNotice(fd))
	require.NoError(t, syscall.Ftruncate(fd, stateSize))
	require.Empty(t, readNotice(fd))
	v4 := DeathNotice{IP: []byte{127, 0, 0, 1}, Port: 29400, Request: []byte("POST")}
	v6 := DeathNotice{IP: net.ParseIP("fe80::1"), Zone: 1 << 20, Port: 65535,
		Request: bytes.Repeat([]byte("x"), maxNotice)}
	for _, f := range []DeathNotice{v4, v6} {
		writeNotice(fd, f)
		require.Equal(t, f.IP, readNotice(fd).IP)
		require.Equal(t, f, readNotice(fd))
	}
	writeState(fd, "/cgroup", []int{1})
	require.Equal(t, v6, readNotice(fd))
	tooLong, noAddress := v6, v4
	tooLong.Request, noAddress.IP = make([]byte, maxNotice+1), nil
	for _, f := range []DeathNotice{{}, tooLong, noAddress} {
		writeNotice(fd, v4)
		writeNotice(fd, f)
		require.Empty(t, readNotice(fd))
	}
	cgroup, _ := readState(fd)
	require.Equal(t, "/cgroup", cgroup)
}

func listen(t *testing.T, addr string) (l net.Listener, f DeathNotice) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Skip("SKIPPED: A DEATH NOTICE OVER IPv6 IS NOT TESTED without its loopback:", err)
	}
	t.Cleanup(func() { l.Close() })
	at := l.Addr().(*net.TCPAddr)
	f = DeathNotice{IP: at.IP, Port: uint16(at.Port), Request: []byte("all that is to be said")}
	if v4 := at.IP.To4(); v4 != nil {
		f.IP = v4
	}
	return l, f
}

// What is said arrives, and saying it ends with the first byte of the answer, or after a while without one.
func TestSendDeathNotice(t *testing.T) {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		for _, answer := range []string{"thanks", ""} {
			t.Run(addr+answer, func(t *testing.T) {
				l, f := listen(t, addr)
				heard := make(chan string)
				go func() {
					nc, err := l.Accept()
					if err != nil {
						close(heard)
						return
					}
					defer nc.Close()
					text := make([]byte, len(f.Request))
					_, _ = io.ReadFull(nc, text)
					_, _ = nc.Write([]byte(answer))
					heard <- string(text)
					_, _ = nc.Read(text) // until the other end is closed
				}()
				began, done := time.Now(), make(chan struct{})
				go func() { defer close(done); sendNotice(f) }()
				require.Equal(t, string(f.Request), <-heard)
				<-done
				if answer == "" {
					require.GreaterOrEqual(t, time.Since(began), noticeTime)
				}
				require.Less(t, time.Since(began), 20*noticeTime, "it is bounded")
			})
		}
	}
}

// Nobody listens, nobody is there, nobody answers: nothing happens, soon.
func TestDeathNoticeWithoutReceiver(t *testing.T) {
	l, refused := listen(t, "127.0.0.1:0")
	l.Close()
	// A listener that accepts nothing, whose queue is full: the kernel drops what comes.
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer syscall.Close(fd)
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	require.NoError(t, syscall.Listen(fd, 0))
	sa, err := syscall.Getsockname(fd)
	require.NoError(t, err)
	silent := refused
	silent.Port = uint16(sa.(*syscall.SockaddrInet4).Port)
	for range 2 {
		nc, err := net.DialTimeout("tcp", (&net.TCPAddr{IP: silent.IP, Port: int(silent.Port)}).String(), noticeTime)
		if err == nil {
			defer nc.Close()
		}
	}
	for _, f := range []DeathNotice{{}, refused, silent} {
		began := time.Now()
		sendNotice(f)
		require.Less(t, time.Since(began), 20*noticeTime)
	}
}

func FuzzDeathNotice(f *testing.F) {
	f.Add([]byte{4, 1, 2, 0, 0, 0, 0, 127, 0, 0, 1})
	f.Fuzz(func(t *testing.T, head []byte) {
		page := make([]byte, stateSize)
		copy(page, head)
		got := parseNotice(page)
		require.LessOrEqual(t, len(got.Request), maxNotice)
		if len(got.Request) > 0 {
			fd := newPages(t)
			writeNotice(fd, got)
			require.Equal(t, got, readNotice(fd))
		}
	})
}
