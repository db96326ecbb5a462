package tcpstore

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestResetIsolatesNamespaces(t *testing.T) {
	ctx := testContext(t)
	s, addr := start(t, Config{})
	old := dial(t, addr)
	require.NoError(t, old.Set(ctx, "/k", []byte("old")))
	require.NoError(t, old.QueuePush(ctx, "/q", []byte("old")))
	waiting := make(chan error, 1)
	waiter := dial(t, addr)
	go func() { waiting <- waiter.Wait(ctx, "/later") }()
	silent := dialRaw(t, addr)
	require.Eventually(t, func() bool {
		st := s.stats()
		return st.Requests == 3 && st.Connections == 3
	}, 10*time.Second, time.Millisecond)

	s.Reset()
	require.Zero(t, s.stats().Keys)
	require.Error(t, <-waiting)
	_, err := silent.Read(make([]byte, 1))
	require.Error(t, err, "a connection that has not sent anything is dropped, too")
	_, err = old.Add(ctx, "/late", 1)
	require.Error(t, err)

	c := dial(t, addr)
	n, err := c.NumKeys(ctx)
	require.NoError(t, err)
	require.Zero(t, n)
	n, err = c.QueueLen(ctx, "/q")
	require.NoError(t, err)
	require.Zero(t, n)
	require.Equal(t, 1, s.stats().Connections)
}

func TestResetKeepsWhatHasThePrefix(t *testing.T) {
	ctx := testContext(t)
	s, addr := start(t, Config{Keep: "/shards/", MaxStoreBytes: 1000})
	for range 20 { // what is kept is charged once
		c := dial(t, addr)
		n, err := c.Add(ctx, "/shards/next", 1)
		require.NoError(t, err)
		require.NoError(t, c.Set(ctx, "/k", make([]byte, 500)))
		s.Reset()
		require.Equal(t, 1, s.stats().Keys)
		again, err := dial(t, addr).Add(ctx, "/shards/next", 0)
		require.NoError(t, err)
		require.Equal(t, n, again)
	}
	s.ResetAll()
	require.Zero(t, s.stats().Keys)
	require.NoError(t, dial(t, addr).Set(ctx, "/shards/k", nil))
	require.NoError(t, s.Close())
	s.Reset()
	require.Zero(t, s.stats().Keys)
}

// TestResetAmongRequests resets while clients count: a connection that got into the next namespace would count down.
func TestResetAmongRequests(t *testing.T) {
	ctx := testContext(t)
	s, addr := start(t, Config{})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				c, err := Dial(ctx, addr)
				if err != nil {
					t.Error(err)
					return
				}
				n, err := c.Add(ctx, "/count", 1)
				if m, err2 := c.Add(ctx, "/count", 0); err == nil && err2 == nil && m < n {
					t.Errorf("one connection saw %d and then %d", n, m)
				}
				c.Close()
			}
		})
	}
	for range 200 {
		for last := s.stats().Requests; s.stats().Requests == last; {
			runtime.Gosched()
		}
		s.Reset()
	}
	close(stop)
	wg.Wait()
}

func TestStaleConnectionIsNotAdmitted(t *testing.T) {
	s := New(Config{})
	client, server := net.Pipe()
	defer client.Close()
	c := s.newConn(server)
	s.Reset()
	require.False(t, s.admit(c))
	_, err := client.Read(make([]byte, 1))
	require.Equal(t, io.EOF, err)
	require.NoError(t, s.Close())
}

func TestCloseEndsEverything(t *testing.T) {
	s, addr := start(t, Config{})
	nc := dialRaw(t, addr)
	send(t, nc, greeting+"\x06"+strs("/never"))
	require.Eventually(t, func() bool { return s.stats().Requests == 1 }, 10*time.Second, time.Millisecond)
	require.NoError(t, s.Close())
	_, err := nc.Read(make([]byte, 1))
	require.Error(t, err)
	require.Zero(t, s.stats().Connections)
	require.NoError(t, s.Close(), "twice")
	s.Reset()

	client, server := net.Pipe()
	s.serveConn(server)
	_, err = client.Read(make([]byte, 1))
	require.Equal(t, io.EOF, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, s.Serve(l))
}

func TestServeReportsListenerError(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	s := New(Config{})
	require.ErrorIs(t, s.Serve(l), net.ErrClosed)
	require.NoError(t, s.Close())
}

func TestAllow(t *testing.T) {
	var log logBuffer
	s, addr := start(t, Config{Logger: log.logger(), Allow: func(a netip.Addr) bool {
		return a != netip.MustParseAddr("127.0.0.1")
	}})
	for range 2 {
		nc := dialRaw(t, addr)
		_, err := nc.Read(make([]byte, 1))
		require.Error(t, err)
	}
	require.Eventually(t, func() bool { return s.stats().Refused == 2 }, 10*time.Second, time.Millisecond)
	require.Equal(t, 1, strings.Count(log.String(), "peer is not allowed"), "one line however often it tries: %s",
		log.String())
	require.Zero(t, s.stats().Requests)
}

func TestAllowSeesIPv4OfMappedAddress(t *testing.T) {
	l, err := net.Listen("tcp", "[::]:0") // PyTorch's clients connect to a dual-stack socket
	if err != nil {
		t.Skipf("no IPv6 here, so a store on it is NOT tested: %v", err)
	}
	seen := make(chan netip.Addr, 1)
	s := New(Config{Allow: func(a netip.Addr) bool { seen <- a; return true }})
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	dialRaw(t, fmt.Sprintf("127.0.0.1:%d", l.Addr().(*net.TCPAddr).Port))
	require.Equal(t, netip.MustParseAddr("127.0.0.1"), <-seen)
	require.NoError(t, s.Close())
	require.NoError(t, <-done)
}

func TestAllowRefusesAPeerWithoutIPAddress(t *testing.T) {
	s := New(Config{Allow: func(netip.Addr) bool { return true }})
	client, server := net.Pipe()
	s.serveConn(server)
	_, err := client.Read(make([]byte, 1))
	require.Equal(t, io.EOF, err)
	require.Equal(t, uint64(1), s.stats().Refused)
	require.NoError(t, s.Close())
}

// TestAcceptOutlivesFullFileTable has a listener that runs out of descriptors, recovers, and is then closed.
func TestAcceptOutlivesFullFileTable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full := &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
		client, server := net.Pipe()
		l := &scripted{errs: []error{full, full, nil, full, net.ErrClosed}, nc: server}
		var log logBuffer
		taken := 0
		begin := time.Now()
		require.ErrorIs(t, acceptAll(l, log.logger(), func(net.Conn) { taken++ }), net.ErrClosed)
		require.Equal(t, 1, taken)
		require.Equal(t, 20*time.Millisecond, time.Since(begin), "5 ms, 10 ms, and 5 ms again")
		require.Equal(t, 3, strings.Count(log.String(), "too many open files"))
		client.Close()
	})
}

// scripted is a listener that returns what it was told to.
type scripted struct {
	net.Listener
	errs []error
	nc   net.Conn
}

func (s *scripted) Addr() net.Addr { return &net.TCPAddr{} }

func (s *scripted) Accept() (net.Conn, error) {
	err := s.errs[0]
	s.errs = s.errs[1:]
	return s.nc, err
}

func TestLimitsCloseWithOneLine(t *testing.T) {
	for _, tc := range []struct {
		name, data, log string
	}{
		{"key", "\x03" + str("123456789"), `"what":"bytes in one key","value":9,"max":8`},
		{"value", "\x01" + str("k") + u64(1001), `"what":"bytes in one value","value":1001,"max":1000`},
		{"keys", "\x06" + u64(5), `"what":"keys in one request","value":5,"max":4`},
		{"request", "\x0b" + u64(3) + strings.Repeat(str("k")+str(strings.Repeat("v", 1000)), 3),
			`"what":"bytes in one request","value":2034,"max":2000`},
		{"store by set", strings.Repeat("\x01"+str("k")+str("v")+"\x01"+str("l")+str(strings.Repeat("v", 1000)), 2) +
			"\x01" + str("m") + str(strings.Repeat("v", 1000)), `"what":"bytes in the store","value":2388,"max":2000`},
		{"store by append", strings.Repeat("\x09"+str("k")+str(strings.Repeat("v", 500)), 4),
			`"what":"bytes in the store","value":2129,"max":2000`},
		{"store by push", strings.Repeat("\x0e"+str("q")+str(strings.Repeat("v", 500)), 4),
			`"what":"bytes in the store","value":2013,"max":2000`},
		{"store by add", addKeys(20), `"what":"bytes in the store"`},
		{"store by barrier", strings.ReplaceAll(addKeys(20), "\x04\x01", "\x12\x01"), `"what":"bytes in the store"`},
		{"answers", "\x01" + str("k") + str(strings.Repeat("v", 1000)) + "\x0a" + strs("k", "k", "k", "k"),
			`"what":"bytes of answers that were not read","value":4032,"max":4000`},
		{"text", "\x01" + str("k") + str("text") + "\x04" + str("k") + u64(1),
			`not a decimal number of 64 bits: key \"k\" holds \"text\"`},
		{"query", "\x13", `first byte 0x13`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var log logBuffer
			cfg := Config{MaxKeyBytes: 8, MaxValueBytes: 1000, MaxKeysPerRequest: 4, MaxRequestBytes: 2000, MaxStoreBytes: 2000,
				MaxQueuedBytes: 4000, Logger: log.logger()}
			s, addr := start(t, cfg)
			other := dial(t, addr)
			require.NoError(t, other.Ping(testContext(t)))
			nc := dialRaw(t, addr)
			_, _ = io.WriteString(nc, greeting+tc.data) // the server may close before all was sent
			_, _ = io.Copy(io.Discard, nc)
			require.Eventually(t, func() bool { return s.stats().Connections == 1 && log.String() != "" },
				10*time.Second, time.Millisecond)
			require.Contains(t, log.String(), tc.log)
			require.Contains(t, log.String(), `"peer":"127.0.0.1:`)
			require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
			require.LessOrEqual(t, s.stats().Bytes, cfg.MaxStoreBytes)
			require.NoError(t, other.Ping(testContext(t)), "others must not notice")
		})
	}
}

func addKeys(n int) (data string) {
	for i := range n {
		data += "\x04" + str(string(rune('a'+i))) + u64(1)
	}
	return data
}

// TestBytesReturnToZero takes back all that was stored or waited for.
func TestBytesReturnToZero(t *testing.T) {
	ctx := testContext(t)
	s, addr := start(t, Config{})
	c := dial(t, addr)
	a := dialRaw(t, addr)
	send(t, a, "\x07"+str("/a"))
	_, err := io.ReadFull(a, make([]byte, 1))
	require.NoError(t, err)
	require.NoError(t, c.Set(ctx, "/a", []byte("12345")))
	require.NoError(t, c.Set(ctx, "/a", []byte("1")))
	require.NoError(t, c.Append(ctx, "/a", []byte("23")))
	_, err = c.Add(ctx, "/a", 1e6)
	require.NoError(t, err)
	require.NoError(t, c.QueuePush(ctx, "/q", []byte("one")))
	require.NoError(t, c.QueuePush(ctx, "/q", nil))
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	require.ErrorIs(t, c.Wait(short, "/a", "/b", "/c"), context.DeadlineExceeded)
	w := dial(t, addr)
	waited := make(chan error, 1)
	go func() { waited <- w.Wait(ctx, "/b", "/c") }()
	require.Positive(t, s.stats().Bytes)
	require.NoError(t, c.MultiSet(ctx, []string{"/b", "/c"}, [][]byte{nil, nil}))
	require.NoError(t, <-waited)

	for _, k := range []string{"/a", "/b", "/c"} {
		ok, err := c.Delete(ctx, k)
		require.NoError(t, err)
		require.True(t, ok)
	}
	for _, want := range []string{"one", ""} {
		item, err := c.QueuePop(ctx, "/q")
		require.NoError(t, err)
		require.Equal(t, want, string(item))
	}
	dying := dialRaw(t, addr)
	send(t, dying, greeting+"\x06"+strs("/never"))
	require.Eventually(t, func() bool { return s.stats().Bytes > 0 }, 10*time.Second, time.Millisecond)
	dying.Close()
	a.Close()
	require.Eventually(t, func() bool { return s.stats().Bytes == 0 }, 10*time.Second, time.Millisecond)
}

// TestSlowReader has a client that asks and does not read: it stops nobody and is closed when it took nothing for a
// while.
func TestSlowReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log logBuffer
		s := New(Config{Logger: log.logger()})
		value := strings.Repeat("v", 1<<20)
		slow, other := pipe(t, s), record(pipe(t, s))
		send(t, slow, greeting+"\x01"+str("k")+str(value)+"\x03"+str("k"))
		synctest.Wait() // the answer waits for its reader

		send(t, other.nc, greeting+"\x01"+str("k")+str("short")+"\x03"+str("k"))
		synctest.Wait()
		got, _ := other.take()
		require.Equal(t, str("short"), got)
		require.Equal(t, 2, s.stats().Connections)

		_, err := io.ReadFull(slow, make([]byte, 8+300<<10))
		require.NoError(t, err)
		time.Sleep(59 * time.Second) // of the bubble's clock, since the last byte was taken
		synctest.Wait()
		require.Equal(t, 2, s.stats().Connections)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Equal(t, 1, s.stats().Connections)
		require.Contains(t, log.String(), "nothing was read for 1m0s")
		require.NoError(t, s.Close())
	})
}

// TestSlowWatcher has a client whose answers are caused by others.
func TestSlowWatcher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log logBuffer
		s := New(Config{Logger: log.logger(), MaxQueuedBytes: 64 << 10})
		slow, other := pipe(t, s), record(pipe(t, s))
		send(t, slow, "\x07"+str("k"))
		_, err := io.ReadFull(slow, make([]byte, 1))
		require.NoError(t, err)
		send(t, other.nc, greeting)
		for range 64 {
			send(t, other.nc, "\x09"+str("k")+str(strings.Repeat("v", 1000)))
		}
		synctest.Wait()
		require.Equal(t, 1, s.stats().Connections)
		require.Equal(t, 1, strings.Count(log.String(), "answers that were not read"), log.String())
		require.NoError(t, s.Close())
	})
}

// TestSharedValueIsNotChanged reads a value slowly while others change it.
func TestSharedValueIsNotChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Config{})
		value := strings.Repeat("v", 100<<10)
		slow, other := pipe(t, s), record(pipe(t, s))
		send(t, slow, greeting+"\x01"+str("k")+str(value)+"\x03"+str("k"))
		synctest.Wait()
		send(t, other.nc, greeting+"\x09"+str("k")+str("more")+"\x09"+str("k")+str("and more")+"\x01"+str("k")+
			str("x")+"\x08"+str("k"))
		synctest.Wait()
		got := make([]byte, len(str(value)))
		_, err := io.ReadFull(slow, got)
		require.NoError(t, err)
		require.Equal(t, str(value), string(got))
		require.NoError(t, s.Close())
	})
}

func TestThousandClients(t *testing.T) {
	const clients = 1000
	ctx := testContext(t)
	s, addr := start(t, Config{})
	var wg sync.WaitGroup
	errs := make(chan error, clients)
	for i := range clients {
		wg.Go(func() { errs <- meet(ctx, addr, i, clients) })
	}
	wg.Wait()
	for range clients {
		require.NoError(t, <-errs)
	}
	require.Equal(t, clients+2, s.stats().Keys)
	require.Eventually(t, func() bool { return s.stats().Connections == 0 }, 10*time.Second, time.Millisecond)
}

// meet is one worker: it announces itself, waits for all others and reads one of them.
func meet(ctx context.Context, addr string, rank, world int) error {
	c, err := Dial(ctx, addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.Set(ctx, fmt.Sprint("/rank/", rank), fmt.Append(nil, rank)); err != nil {
		return err
	}
	n, err := c.Add(ctx, "/count", 1)
	if err != nil {
		return err
	}
	if n == int64(world) {
		err = c.Set(ctx, "/go", nil)
	}
	if err != nil {
		return err
	}
	if err := c.Wait(ctx, "/go"); err != nil {
		return err
	}
	next := (rank + 1) % world
	v, err := c.Get(ctx, fmt.Sprint("/rank/", next))
	if err == nil && string(v) != fmt.Sprint(next) {
		err = fmt.Errorf("rank %d reads as %q", next, v)
	}
	return err
}

func FuzzServer(f *testing.F) {
	for _, tc := range conversations() {
		var a, b string
		for _, st := range tc.steps {
			if a == "" {
				a = hello(st.conn)
			}
			a, b = a+st.send, st.send
		}
		f.Add([]byte(a), []byte(b))
	}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		cfg := Config{
			MaxKeyBytes: 100, MaxValueBytes: 1000, MaxKeysPerRequest: 20, MaxStoreBytes: 10_000, MaxQueuedBytes: 100_000,
		}
		s := New(cfg)
		first, second := feed(s, a), feed(s, append([]byte(greeting), b...))
		<-first
		<-second
		require.LessOrEqual(t, s.stats().Bytes, cfg.MaxStoreBytes)
		require.NoError(t, s.Close())
	})
}

// feed sends data, discards the answers and hangs up: the connection must then end.
func feed(s *Server, data []byte) (ended chan struct{}) {
	client, server := net.Pipe()
	ended = make(chan struct{})
	go func() {
		s.serveConn(server)
		close(ended)
	}()
	go io.Copy(io.Discard, client)
	go func() {
		_, _ = client.Write(data)
		client.Close()
	}()
	return ended
}

// TestLargeValues stores what PyTorch's server without libuv takes.
func TestLargeValues(t *testing.T) {
	ctx := testContext(t)
	var log logBuffer
	s, addr := start(t, Config{Logger: log.logger()})
	c := dial(t, addr)
	value := bytes.Repeat([]byte("0123456789abcdef"), 4<<20)
	require.NoError(t, c.Set(ctx, "/k", value))
	got, err := c.CompareSet(ctx, "/k", value, value)
	require.NoError(t, err)
	require.True(t, bytes.Equal(value, got))
	require.Eventually(t, func() bool { return s.receiving.Load() == 0 }, 10*time.Second, time.Millisecond)
	_ = c.Set(ctx, "/k", append(value, 'x')) // the server may close before all was sent
	require.Error(t, c.Ping(ctx))
	require.Eventually(t, func() bool {
		return strings.Contains(log.String(), `"what":"bytes in one value","value":67108865,"max":67108864`)
	}, 10*time.Second, time.Millisecond)
}

// TestBrokenRulesDoNotFillTheLog has a client that comes again and again.
func TestBrokenRulesDoNotFillTheLog(t *testing.T) {
	var log logBuffer
	_, addr := start(t, Config{Logger: log.logger()})
	for range 2 * maxEndLines {
		nc := dialRaw(t, addr)
		_, _ = io.WriteString(nc, greeting+"\x01"+u64(1<<60))
		_, _ = io.Copy(io.Discard, nc)
		nc.Close()
	}
	warnings := func() int { return strings.Count(log.String(), "\"WARN\"") }
	require.Eventually(t, func() bool { // a client is gone before that is logged
		return strings.Contains(log.String(), "not reported") && warnings() >= maxEndLines
	}, 10*time.Second, time.Millisecond)
	require.Equal(t, maxEndLines, warnings())
}

// TestUnfinishedRequestsAreBounded has clients that announce much and send half of it.
func TestUnfinishedRequestsAreBounded(t *testing.T) {
	ctx := testContext(t)
	var log logBuffer
	s, addr := start(t, Config{Logger: log.logger(), MaxReceivingBytes: 1 << 20})
	half := greeting + "\x01" + str("k") + u64(64<<20) + strings.Repeat("v", 300<<10)
	var clients []net.Conn
	for range 20 {
		nc := dialRaw(t, addr)
		_, _ = io.WriteString(nc, half) // the later ones are closed meanwhile
		clients = append(clients, nc)
	}
	require.Eventually(t,
		func() bool { return strings.Contains(log.String(), "bytes of unfinished requests of all clients") },
		10*time.Second, time.Millisecond)
	require.Eventually(t, func() bool { return s.receiving.Load() <= 1<<20 }, 10*time.Second, time.Millisecond)
	c := dial(t, addr)
	require.NoError(t, c.Set(ctx, "/small", make([]byte, 60<<10)), "small requests pass whatever others send")
	require.NoError(t, c.Ping(ctx))
	for _, nc := range clients {
		nc.Close()
	}
	require.Eventually(t, func() bool { return s.receiving.Load() == 0 }, 10*time.Second, time.Millisecond)
	require.NoError(t, c.Set(ctx, "/large", make([]byte, 1<<20)))
	require.NoError(t, c.Ping(ctx))
}
