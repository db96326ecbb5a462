package tcpstore

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/testkit"
)

func TestMain(m *testing.M) {
	if addr := os.Getenv(crowdEnv); addr != "" {
		if err := runCrowd(addr, os.Getenv(crowdSizeEnv)); err != nil {
			fmt.Fprintln(os.Stderr, "crowd:", err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// The wire form, written down a second time: the tests must not lean on the encoder.

func u64(n int64) string {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(n))
	return string(b[:])
}

func str(s string) string { return u64(int64(len(s))) + s }

func strs(keys ...string) string {
	out := u64(int64(len(keys)))
	for _, k := range keys {
		out += str(k)
	}
	return out
}

// logBuffer is a log that tests read.
type logBuffer struct{ testkit.Buffer }

func (l *logBuffer) logger() *slog.Logger { return slog.New(slog.NewJSONHandler(l, nil)) }

// start serves a store on loopback until the test ends.
func start(t testing.TB, cfg Config) (*Server, string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := New(cfg)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.NoError(t, <-done)
	})
	return s, l.Addr().String()
}

func testContext(t testing.TB) context.Context {
	// The largest values take 10 s of CPU under the race detector, and were seen to take 85 s at a load of 8 per CPU.
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func dial(t testing.TB, addr string) *Client {
	c, err := Dial(testContext(t), addr)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// dialRaw connects and gives every read and write of the test a limit.
func dialRaw(t testing.TB, addr string) *net.TCPConn {
	nc, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	require.NoError(t, nc.SetDeadline(time.Now().Add(30*time.Second)))
	t.Cleanup(func() { nc.Close() })
	return nc.(*net.TCPConn)
}

func send(t testing.TB, nc net.Conn, data string) {
	_, err := nc.Write([]byte(data))
	require.NoError(t, err)
}

// serveConn serves one connection until it ends, and closes it.
func (s *Server) serveConn(nc net.Conn) {
	if c := s.newConn(nc); s.admit(c) {
		s.silent.enter(c, &s.cfg)
		s.greet(c)
	}
}

// pipe connects an in-memory client to s: for tests inside a synctest bubble.
func pipe(t testing.TB, s *Server) net.Conn {
	client, server := net.Pipe()
	go s.serveConn(server)
	t.Cleanup(func() { client.Close() })
	return client
}

// recorder collects what a connection receives.
type recorder struct {
	nc     net.Conn
	mu     sync.Mutex
	got    []byte
	closed bool
}

func record(nc net.Conn) *recorder {
	r := &recorder{nc: nc}
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := nc.Read(buf)
			r.mu.Lock()
			r.got = append(r.got, buf[:n]...)
			r.closed = err != nil
			r.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return r
}

// take returns what came since the last take.
func (r *recorder) take() (got string, closed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	got, r.got = string(r.got), nil
	return got, r.closed
}
