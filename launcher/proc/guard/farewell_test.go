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
	fd, err := newWill([]string{"x"}, "", false)
	require.NoError(t, err)
	t.Cleanup(func() { syscall.Close(fd) })
	return fd
}

// A launcher that is killed before it has read its arguments has no farewell in their place.
func TestFarewellIsWhatWasSet(t *testing.T) {
	fd := newPages(t)
	require.Empty(t, readFarewell(fd))
	require.NoError(t, syscall.Ftruncate(fd, willSize))
	require.Empty(t, readFarewell(fd))
	v4 := Farewell{IP: []byte{127, 0, 0, 1}, Port: 29400, Request: []byte("POST")}
	v6 := Farewell{IP: net.ParseIP("fe80::1"), Zone: 1 << 20, Port: 65535, Request: bytes.Repeat([]byte("x"), maxFarewell)}
	for _, f := range []Farewell{v4, v6} {
		writeFarewell(fd, f)
		require.Equal(t, f.IP, readFarewell(fd).IP)
		require.Equal(t, f, readFarewell(fd))
	}
	writeWill(fd, "/cgroup", []int{1})
	require.Equal(t, v6, readFarewell(fd))
	tooLong, noAddress := v6, v4
	tooLong.Request, noAddress.IP = make([]byte, maxFarewell+1), nil
	for _, f := range []Farewell{{}, tooLong, noAddress} {
		writeFarewell(fd, v4)
		writeFarewell(fd, f)
		require.Empty(t, readFarewell(fd))
	}
	cgroup, _ := readWill(fd)
	require.Equal(t, "/cgroup", cgroup)
}

func listen(t *testing.T, addr string) (l net.Listener, f Farewell) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Skip("SKIPPED: A FAREWELL OVER IPv6 IS NOT TESTED without its loopback:", err)
	}
	t.Cleanup(func() { l.Close() })
	at := l.Addr().(*net.TCPAddr)
	f = Farewell{IP: at.IP, Port: uint16(at.Port), Request: []byte("all that is to be said")}
	if v4 := at.IP.To4(); v4 != nil {
		f.IP = v4
	}
	return l, f
}

// What is said arrives, and saying it ends with the first byte of the answer, or after a while without one.
func TestSayFarewell(t *testing.T) {
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
				go func() { defer close(done); say(f) }()
				require.Equal(t, string(f.Request), <-heard)
				<-done
				if answer == "" {
					require.GreaterOrEqual(t, time.Since(began), farewellTime)
				}
				require.Less(t, time.Since(began), 20*farewellTime, "it is bounded")
			})
		}
	}
}

// Nobody listens, nobody is there, nobody answers: nothing happens, soon.
func TestFarewellToNobody(t *testing.T) {
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
		nc, err := net.DialTimeout("tcp", (&net.TCPAddr{IP: silent.IP, Port: int(silent.Port)}).String(), farewellTime)
		if err == nil {
			defer nc.Close()
		}
	}
	for _, f := range []Farewell{{}, refused, silent} {
		began := time.Now()
		say(f)
		require.Less(t, time.Since(began), 20*farewellTime)
	}
}

func FuzzFarewell(f *testing.F) {
	f.Add([]byte{4, 1, 2, 0, 0, 0, 0, 127, 0, 0, 1})
	f.Fuzz(func(t *testing.T, head []byte) {
		page := make([]byte, willSize)
		copy(page, head)
		got := parseFarewell(page)
		require.LessOrEqual(t, len(got.Request), maxFarewell)
		if len(got.Request) > 0 {
			fd := newPages(t)
			writeFarewell(fd, got)
			require.Equal(t, got, readFarewell(fd))
		}
	})
}
