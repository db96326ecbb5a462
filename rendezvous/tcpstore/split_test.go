package tcpstore

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// split listens on loopback for both kinds of traffic.
func split(t *testing.T, cfg Config) (*Server, net.Listener) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := New(cfg)
	other := Split(l, s)
	t.Cleanup(func() {
		_ = other.Close() // some tests close it
		require.NoError(t, s.Close())
	})
	return s, other
}

func TestSplitServesStoreAndHTTP(t *testing.T) {
	ctx := testContext(t)
	_, l := split(t, Config{Allow: func(netip.Addr) bool { return true }})
	web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, _ = io.WriteString(w, r.Method+" "+r.URL.Path+" "+string(body))
	})}
	served := make(chan error, 1)
	go func() { served <- web.Serve(l) }()

	addr := l.Addr().String()
	silent := dialRaw(t, addr)
	transport := &http.Transport{}
	for range 3 {
		c := dial(t, addr)
		require.NoError(t, c.Set(ctx, "/k", []byte("v")))
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, "http://"+addr+"/v1/x", http.NoBody)
		require.NoError(t, err)
		resp, err := transport.RoundTrip(req)
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, "PUT /v1/x ", string(body))
	}
	transport.CloseIdleConnections()
	send(t, silent, "\x02"+str("/k"))
	got := make([]byte, len(str("v")))
	_, err := io.ReadFull(silent, got)
	require.NoError(t, err)
	require.Equal(t, str("v"), string(got), "generation A, after a long silence")
	require.NoError(t, web.Close())
	require.ErrorIs(t, <-served, http.ErrServerClosed)
}

func TestSplitFirstBytes(t *testing.T) {
	_, l := split(t, Config{})
	for name, data := range map[string]string{"HTTP": "GET / HTTP/1.1\r\n\r\n", "TLS": "\x16\x03\x01", "one byte": "P"} {
		nc := dialRaw(t, l.Addr().String())
		send(t, nc, data)
		got, err := l.Accept()
		require.NoError(t, err, name)
		buf := make([]byte, len(data)+1)
		_, err = io.ReadFull(got, buf[:1])
		require.NoError(t, err, name)
		_, err = io.ReadFull(got, buf[1:len(data)])
		require.NoError(t, err, name)
		require.Equal(t, data, string(buf[:len(data)]), name)
		send(t, nc, "!")
		_, err = io.ReadFull(got, buf[len(data):])
		require.NoError(t, err, name)
		require.Equal(t, byte('!'), buf[len(data)], name)
		require.NoError(t, got.Close())
	}
}

func TestSplitAllowIsForTheStore(t *testing.T) {
	s, l := split(t, Config{Allow: func(netip.Addr) bool { return false }})
	store := dialRaw(t, l.Addr().String())
	send(t, store, greeting)
	_, err := store.Read(make([]byte, 1))
	require.Error(t, err)
	require.Equal(t, uint64(1), s.stats().Refused)
	send(t, dialRaw(t, l.Addr().String()), "GET ")
	got, err := l.Accept()
	require.NoError(t, err)
	require.NoError(t, got.Close())
}

func TestSplitConnectionOfBeforeReset(t *testing.T) {
	s, l := split(t, Config{})
	old := dialRaw(t, l.Addr().String())
	require.Eventually(t, func() bool { return l.(*splitter).silentCount() == 1 }, 10*time.Second, time.Millisecond)
	s.Reset()
	send(t, old, "\x03"+str("/k")+u64(1))
	_, err := old.Read(make([]byte, 1))
	require.Error(t, err)
	require.Zero(t, s.stats().Keys)
}

func (sp *splitter) silentCount() int {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	return len(sp.silent)
}

func TestSplitClose(t *testing.T) {
	ctx := testContext(t)
	_, l := split(t, Config{})
	addr := l.Addr().String()
	store, silent, unaccepted := dial(t, addr), dialRaw(t, addr), dialRaw(t, addr)
	require.NoError(t, store.Ping(ctx))
	send(t, unaccepted, "GET ")
	require.Eventually(t, func() bool { return l.(*splitter).silentCount() == 1 }, 10*time.Second, time.Millisecond)
	accepted := make(chan error, 1)
	require.NoError(t, l.Close())
	go func() {
		_, err := l.Accept()
		accepted <- err
	}()
	require.ErrorIs(t, <-accepted, net.ErrClosed)
	for name, nc := range map[string]net.Conn{"silent": silent, "unaccepted": unaccepted} {
		_, err := nc.Read(make([]byte, 1))
		require.Error(t, err, name)
	}
	require.NoError(t, store.Ping(ctx), "the server decides when its connections end")
	_, err := net.Dial("tcp", addr)
	require.Error(t, err)
}

func TestSplitReportsListenerError(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	boom := errors.New("boom")
	s := New(Config{})
	other := Split(failing{l, boom}, s)
	_, err = other.Accept()
	require.ErrorIs(t, err, boom)
	require.NoError(t, other.Close())
	require.NoError(t, s.Close())
}

type failing struct {
	net.Listener
	err error
}

func (f failing) Accept() (net.Conn, error) { return nil, f.err }
