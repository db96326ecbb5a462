package tcpstore

import (
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Clients that are silent, idle or waiting cost no goroutine, and all of them go on when they have a reason.
func TestClientsThatWaitCostNoGoroutine(t *testing.T) {
	s, addr := start(t, Config{})
	setter := dial(t, addr)
	require.NoError(t, setter.Set(testContext(t), "before", nil))
	_, err := setter.Get(testContext(t), "before") // a Set has no answer: after this one the connection is served
	require.NoError(t, err)
	before := runtime.NumGoroutine()
	var silent, idle, waiting []net.Conn
	for range 200 {
		silent = append(silent, dialRaw(t, addr))
		idle = append(idle, dialRaw(t, addr))
		send(t, idle[len(idle)-1], "\x03"+str("/idle")+u64(1))
		waiting = append(waiting, dialRaw(t, addr))
		send(t, waiting[len(waiting)-1], "\x05"+strs("/all"))
	}
	for _, nc := range idle {
		_, err := io.ReadFull(nc, make([]byte, 8))
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		return s.stats().Connections == 601 && runtime.NumGoroutine() <= before+1 && s.stats().Requests >= 401
	}, time.Minute, 10*time.Millisecond, "%d goroutines more", runtime.NumGoroutine()-before)
	require.NoError(t, setter.Set(testContext(t), "/all", nil)) // of another generation
	for _, nc := range append(silent, idle...) {
		send(t, nc, "\x03"+str("/idle")+u64(1))
	}
	for _, nc := range waiting {
		_, err := io.ReadFull(nc, make([]byte, 1))
		require.NoError(t, err)
		require.NoError(t, nc.Close())
	}
	for _, nc := range append(silent, idle...) {
		_, err := io.ReadFull(nc, make([]byte, 8))
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool { return s.stats().Connections == 401 }, time.Minute, 10*time.Millisecond)
	s.Reset()
	for _, nc := range idle {
		_, err := nc.Read(make([]byte, 1))
		require.Error(t, err)
	}
}

// However many clients stop in the middle of a request, or of an answer, others are served.
func TestStalledClientsStallNobody(t *testing.T) {
	_, addr := start(t, Config{})
	c, ctx := dial(t, addr), testContext(t)
	value := strings.Repeat("v", 16<<20) // more than a socket takes
	require.NoError(t, c.Set(ctx, "/large", []byte(value)))
	require.NoError(t, c.Wait(ctx, "/large"))
	var stalled []net.Conn
	for i := range 20 * runtime.GOMAXPROCS(0) {
		nc := dialRaw(t, addr)
		send(t, nc, []string{"\x00" + str("/half") + u64(5) + "v", "\x02" + str("/large")}[i%2])
		stalled = append(stalled, nc)
	}
	time.Sleep(100 * time.Millisecond) // some may be served later: the answer is the same
	for i := range 100 {
		key := fmt.Sprint("/", i)
		require.NoError(t, c.Set(ctx, key, []byte("v")))
		got, err := c.Get(ctx, key)
		require.NoError(t, err)
		require.Equal(t, "v", string(got))
	}
	send(t, stalled[0], "alue\x03"+str("/n")+u64(7))
	_, err := io.ReadFull(stalled[0], make([]byte, 8))
	require.NoError(t, err)
	got, err := io.ReadAll(io.LimitReader(stalled[1], int64(8+len(value))))
	require.NoError(t, err)
	require.Equal(t, 8+len(value), len(got))
	require.True(t, u64(int64(len(value)))+value == string(got), "%q", got[:20])
}
