package tcpstore

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// counted is a connection of TCP that is counted, and its socket taken out of it.
type counted struct {
	net.Conn
	detached atomic.Bool
	closed   atomic.Int64
}

func (c *counted) NetConn() net.Conn { return c.Conn }
func (c *counted) Detach() bool      { return !c.detached.Swap(true) }
func (c *counted) Close() error      { c.closed.Add(1); return c.Conn.Close() }

// counter is a listener of such connections.
type counter struct {
	net.Listener
	mu    sync.Mutex
	conns []*counted
}

func (l *counter) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conns = append(l.conns, &counted{Conn: nc})
	return l.conns[len(l.conns)-1], nil
}

// serveCounted serves a store, beside another protocol, on connections that are counted.
func serveCounted(t *testing.T, cfg Config) (*Server, *counter, net.Listener) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s, l := New(cfg), &counter{Listener: inner}
	others := Split(l, s)
	t.Cleanup(func() {
		require.NoError(t, others.Close())
		require.NoError(t, s.Close())
	})
	return s, l, others
}

func ask(t *testing.T, nc net.Conn, delta int64) (sum string) {
	send(t, nc, "\x03"+str("/n")+u64(delta))
	got := make([]byte, 8)
	_, err := io.ReadFull(nc, got)
	require.NoError(t, err)
	return string(got)
}

func TestOnlyStoreConnectionsAreDetached(t *testing.T) {
	s, l, others := serveCounted(t, Config{})
	store, web := dialRaw(t, l.Addr().String()), dialRaw(t, l.Addr().String())
	require.Equal(t, u64(1), ask(t, store, 1))
	send(t, web, "GET")
	other, err := others.Accept()
	require.NoError(t, err)
	got := make([]byte, 3)
	_, err = io.ReadFull(other, got)
	require.NoError(t, err)
	require.Equal(t, "GET", string(got))
	require.NoError(t, other.Close())
	require.NoError(t, store.Close())
	require.Eventually(t, func() bool { return s.stats().Connections == 0 }, time.Minute, time.Millisecond)
	detached := 0
	for _, c := range l.conns {
		if c.detached.Load() {
			detached++
		}
		require.Eventually(t, func() bool { return c.closed.Load() > 0 }, time.Minute, time.Millisecond)
	}
	require.Equal(t, 1, detached)
}

// A client that does not take what it watches is served all the same: it waits for bytes both ways at once.
func TestAWatcherThatDoesNotReadMayWrite(t *testing.T) {
	_, l, _ := serveCounted(t, Config{})
	setter, watcher := dialRaw(t, l.Addr().String()), dialRaw(t, l.Addr().String())
	send(t, watcher, "\x07"+str("/w"))
	registered := make([]byte, 1)
	_, err := io.ReadFull(watcher, registered)
	require.NoError(t, err)
	value, want := strings.Repeat("v", 1<<20), ""
	for i := range 16 { // more than the sockets take
		send(t, setter, "\x00"+str("/w")+str(value))
		if i == 0 {
			want += "\x01" + str("/w") + str("") + str(value)
		} else {
			want += "\x00" + str("/w") + str(value) + str(value)
		}
	}
	require.Equal(t, u64(1), ask(t, setter, 1))
	for range 3 {
		send(t, watcher, "\x03"+str("/n")+u64(1))
		require.Eventually(t, func() bool { return ask(t, setter, 0) > u64(1) }, time.Minute, time.Millisecond)
	}
	got := make([]byte, len(want)+3*8)
	_, err = io.ReadFull(watcher, got)
	require.NoError(t, err)
	require.True(t, want == string(got[:len(want)]), "the notes come whole, and first")
	require.Equal(t, u64(2)+u64(3)+u64(4), string(got[len(want):]))
}

// Whatever a connection waits for, the end of its namespace and of the server ends it, and its goroutines.
func TestTheEndOfConnectionsThatWait(t *testing.T) {
	s, l, _ := serveCounted(t, Config{})
	for i := range 2 {
		var clients []*net.TCPConn
		for _, part := range []string{"", "\x05" + strs("/never"), "\x00" + str("/half") + u64(5) + "v"} {
			nc := dialRaw(t, l.Addr().String())
			ask(t, nc, 1)
			send(t, nc, part)
			clients = append(clients, nc)
		}
		full := dialRaw(t, l.Addr().String())
		send(t, full, "\x00"+str("/large")+str(strings.Repeat("v", 16<<20))+"\x02"+str("/large"))
		_, err := io.ReadFull(full, make([]byte, 1))
		require.NoError(t, err)
		if i == 0 {
			s.Reset()
		} else {
			require.NoError(t, s.Close())
		}
		for _, nc := range append(clients, full) {
			_, err := io.Copy(io.Discard, nc)
			if err != nil {
				require.ErrorIs(t, err, syscall.ECONNRESET)
			}
		}
	}
}

func TestAClientThatTakesNothingIsGivenUp(t *testing.T) {
	log := &logBuffer{}
	s, l, _ := serveCounted(t, Config{WriteTimeout: 50 * time.Millisecond, Logger: log.logger()})
	nc := dialRaw(t, l.Addr().String())
	send(t, nc, "\x00"+str("/large")+str(strings.Repeat("v", 16<<20))+"\x02"+str("/large"))
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "nothing was read for 50ms") }, time.Minute,
		time.Millisecond)
	require.Eventually(t, func() bool { return s.stats().Connections == 0 }, time.Minute, time.Millisecond)
}

// Without a free descriptor a connection stays as package net has it, and is served.
func TestConnectionsWithoutASocketOfTheirOwn(t *testing.T) {
	s, l, _ := serveCounted(t, Config{})
	first := dialRaw(t, l.Addr().String())
	require.Equal(t, u64(1), ask(t, first, 1)) // the epoll is open
	var clients []*net.TCPConn
	for range 8 {
		clients = append(clients, dialRaw(t, l.Addr().String()))
	}
	require.Eventually(t, func() bool { l.mu.Lock(); defer l.mu.Unlock(); return len(l.conns) == 9 }, time.Minute,
		time.Millisecond)
	var files syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files))
	none := files
	none.Cur = 3
	require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &none))
	defer func() { require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &files)) }()
	for i, nc := range clients {
		require.Equal(t, u64(int64(2+i)), ask(t, nc, 1))
	}
	send(t, clients[0], "\x05"+strs("/go"))
	require.Eventually(t, func() bool { return len(s.Waits()) == 1 }, time.Minute, time.Millisecond)
	send(t, clients[1], "\x00"+str("/go")+str(""))
	_, err := io.ReadFull(clients[0], make([]byte, 1))
	require.NoError(t, err)
	for _, c := range l.conns[1:] {
		require.False(t, c.detached.Load())
	}
}

// Descriptors are used again at once: no byte of a connection may reach the next one.
func TestBytesStayInTheirConnection(t *testing.T) {
	s, l, _ := serveCounted(t, Config{})
	over := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ { // wakes those that wait, whether they have gone or not
			select {
			case <-over:
				return
			default:
			}
			nc, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				continue
			}
			_, _ = fmt.Fprintf(nc, "\x00%s%s", str("/go"), str(""))
			_, _ = fmt.Fprintf(nc, "\x08%s", str("/go"))
			nc.Close()
			if i%50 == 49 {
				s.Reset()
			}
		}
	})
	for i := range 8 {
		wg.Go(func() {
			for j := range 200 {
				nc, err := net.Dial("tcp", l.Addr().String())
				if err != nil {
					continue
				}
				_ = nc.SetDeadline(time.Now().Add(time.Minute))
				key := fmt.Sprint("/", i, "/", j)
				_, _ = io.WriteString(nc, "\x00"+str(key)+str(key)+"\x02"+str(key))
				got := make([]byte, len(str(key)))
				if n, _ := io.ReadFull(nc, got); !strings.HasPrefix(str(key), string(got[:n])) {
					t.Errorf("%q instead of %q", got[:n], str(key))
				}
				_, _ = io.WriteString(nc, "\x05"+strs("/go"))
				nc.Close()
			}
			if i == 0 {
				close(over)
			}
		})
	}
	wg.Wait()
}
