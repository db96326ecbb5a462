package tcpstore

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// waitFor sends a WAIT and returns the client's end of the connection.
func waitFor(t *testing.T, addr string, keys ...string) (net.Conn, netip.AddrPort) {
	nc := dialRaw(t, addr)
	send(t, nc, greeting+"\x06"+strs(keys...))
	return nc, netip.MustParseAddrPort(nc.LocalAddr().String())
}

// eventually returns the waits as soon as there are n requests.
func eventually(t *testing.T, s *Server, n int) []Wait {
	require.Eventually(t, func() bool { return s.stats().Requests == uint64(n) }, 10*time.Second, time.Millisecond)
	return s.Waits()
}

func keysOf(waits []Wait) []string {
	keys := make([]string, len(waits))
	for i, w := range waits {
		keys[i] = w.Key
	}
	return keys
}

func TestWaits(t *testing.T) {
	s, addr := start(t, Config{})
	require.Empty(t, s.Waits())
	begin := time.Now()
	_, first := waitFor(t, addr, "/late", "/set")
	require.Equal(t, []string{"/late", "/set"}, keysOf(eventually(t, s, 1)))
	nc, second := waitFor(t, addr, "/late")
	eventually(t, s, 2)
	require.NoError(t, dial(t, addr).Set(testContext(t), "/set", nil))
	waits := eventually(t, s, 3)
	require.Len(t, waits, 1, "a key that was set is waited for no more")
	require.Equal(t, "/late", waits[0].Key)
	require.Equal(t, []netip.AddrPort{first, second}, waits[0].Peers)
	require.Zero(t, waits[0].More)
	require.False(t, waits[0].Since.Before(begin))

	send(t, nc, "\x0c") // CANCEL_WAIT
	waits = eventually(t, s, 4)
	require.Equal(t, []netip.AddrPort{first}, waits[0].Peers)
	s.Reset()
	require.Empty(t, s.Waits())
}

func TestWaitsBeginWithTheOldest(t *testing.T) {
	s, addr := start(t, Config{})
	waitFor(t, addr, "/z")
	oldest := eventually(t, s, 1)[0].Since
	waitFor(t, addr, "/a")
	waits := eventually(t, s, 2)
	require.Equal(t, []string{"/z", "/a"}, keysOf(waits))
	require.Equal(t, oldest, waits[0].Since)
	require.True(t, waits[1].Since.After(oldest))
}

func TestWaitsAreBounded(t *testing.T) {
	s, addr := start(t, Config{})
	keys := make([]string, maxWaits+10)
	for i := range keys {
		keys[i] = fmt.Sprintf("/%03d", i)
	}
	const clients = maxWaitPeers + 3
	for range clients {
		waitFor(t, addr, keys...)
	}
	waits := eventually(t, s, clients)
	require.Equal(t, keys[:maxWaits], keysOf(waits))
	for _, w := range waits {
		require.Len(t, w.Peers, maxWaitPeers)
		require.Equal(t, clients-maxWaitPeers, w.More)
	}
}

func TestWaitsOfAClosedServer(t *testing.T) {
	s := New(Config{})
	require.NoError(t, s.Close())
	require.Empty(t, s.Waits())
}

func BenchmarkWaits(b *testing.B) {
	s := New(Config{})
	defer s.Close()
	for i := range connID(10_000) {
		_, err := s.space.store.apply(i, request{op: opWait, gen: genB, keys: []string{fmt.Sprint(i % 100), "all"}})
		require.NoError(b, err)
	}
	b.ReportAllocs()
	for b.Loop() {
		s.Waits()
	}
}
