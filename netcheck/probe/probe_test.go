package probe

import (
	"context"
	"crypto/rand"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/testkit"
	"dlrover-run/netcheck"
)

func TestMain(m *testing.M) {
	if os.Getenv(fakeToolEnv) != "" {
		fakeTool()
		return
	}
	if os.Getenv(endEnv) != "" {
		endMain()
		return
	}
	testkit.SideBySide(4) // most of the time they wait for an end that is silent
	goleak.VerifyTestMain(m)
}

var loNIC = netcheck.NIC{Name: "lo", Addr: "127.0.0.1", MTU: 1500}

// unhurried are limits that no step reaches on a busy machine. Only a test of a limit has a shorter one.
var unhurried = limits{bound: long, connect: long, retry: long, proof: long, answer: long, bye: long, why: long,
	rung: long, tool: long, listen: long, output: long}

const long = time.Minute

// couple is a test between two nodes on loopback.
type couple struct {
	server, dialer    *Prober
	serve, dial       netcheck.Assignment
	addrs             func([]string) []string // what the dialer is told
	served, dialed    netcheck.Result
	serveCtx, dialCtx context.Context
}

func newCouple(t *testing.T) *couple {
	key := make([]byte, 32)
	_, _ = rand.Read(key)
	nics := []netcheck.NIC{loNIC}
	a := netcheck.Assignment{Test: rand.Text(), Round: 1, Key: key, Left: 5 * long, Quick: true}
	c := &couple{serve: a, dial: a, serveCtx: t.Context(), dialCtx: t.Context(),
		server: New(Config{ID: "s", NICs: slices.Clone(nics)}), dialer: New(Config{ID: "d", NICs: slices.Clone(nics)}),
		addrs: func(a []string) []string { return a }}
	c.server.pace = &plan{warm: 20 * time.Millisecond, measure: 100 * time.Millisecond}
	c.dialer.pace = c.server.pace
	c.server.limits, c.dialer.limits = unhurried, unhurried
	c.serve.Peer = netcheck.Peer{ID: "d", Name: "dialer", Addr: "127.0.0.1", NICs: nics}
	c.dial.Peer = netcheck.Peer{ID: "s", Name: "server", Addr: "127.0.0.1", NICs: nics}
	return c
}

func (c *couple) run() { c.runThen(func() {}) }

// runUntilDialed ends the server's time once the dialer has its result.
func (c *couple) runUntilDialed() {
	ctx, end := context.WithCancelCause(c.serveCtx)
	c.serveCtx = ctx
	c.runThen(func() { end(context.DeadlineExceeded) })
}

func (c *couple) runThen(dialed func()) {
	var both sync.WaitGroup
	both.Go(func() {
		c.served = c.server.Serve(c.serveCtx, c.serve, func(addrs []string) error {
			c.dial.Peer.Addrs = c.addrs(addrs)
			both.Go(func() {
				c.dialed = c.dialer.Dial(c.dialCtx, c.dial)
				dialed()
			})
			return nil
		})
	})
	both.Wait()
}

func TestPair(t *testing.T) {
	c := newCouple(t)
	c.run()
	require.Empty(t, c.served.Class, c.served.Text)
	require.Empty(t, c.dialed.Class, c.dialed.Text)
	for _, r := range []netcheck.Result{c.served, c.dialed} {
		require.Equal(t, c.serve.Test, r.Test)
		require.Len(t, r.Flows, 1)
		f := r.Flows[0]
		require.Equal(t, "lo", f.NIC)
		require.Greater(t, f.Mbps, 5.0)
		require.Greater(t, f.Segments, 0)
		require.Equal(t, 1500, f.MTU)
	}
	require.Greater(t, c.dialed.Flows[0].P50, 0.0)
}

// A peer may come before the test is served. What is left open ends with Close.
func TestListenersThatAreOpenBeforeTheirTest(t *testing.T) {
	c := newCouple(t)
	addrs := c.server.Listen(t.Context())
	require.Len(t, addrs, 1)
	require.Equal(t, addrs, c.server.Listen(t.Context()))
	c.dial.Peer.Addrs, c.dial.Told = addrs, true
	var both sync.WaitGroup
	both.Go(func() { c.dialed = c.dialer.Dial(c.dialCtx, c.dial) })
	time.Sleep(50 * time.Millisecond)
	c.served = c.server.Serve(c.serveCtx, c.serve, func(at []string) error {
		require.Equal(t, addrs, at)
		return nil
	})
	both.Wait()
	require.Empty(t, c.served.Class, c.served.Text)
	require.Empty(t, c.dialed.Class, c.dialed.Text)
	_, err := net.Dial("tcp", addrs[0])
	require.Error(t, err, "it is for one test")

	next := c.server.Listen(t.Context())
	require.Len(t, next, 1)
	c.server.Close()
	_, err = net.Dial("tcp", next[0])
	require.Error(t, err)
	c.server.cfg.NICs = []netcheck.NIC{loNIC, {Name: "x", Addr: "192.0.2.1"}}
	require.Empty(t, c.server.Listen(t.Context()), "one address is not this host's")
	require.Empty(t, c.server.early)
}

func TestPairIPv6(t *testing.T) {
	ln, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skip("no IPv6 loopback here, so tests over IPv6 are NOT done:", err)
	}
	ln.Close()
	c := newCouple(t)
	six := []netcheck.NIC{{Name: "lo", Addr: "::1", MTU: 9000}}
	c.server.cfg.NICs, c.dialer.cfg.NICs = six, six
	c.serve.Peer.NICs, c.dial.Peer.NICs = six, six
	c.serve.Peer.Addr, c.dial.Peer.Addr = "localhost", "::1"
	c.run()
	require.Empty(t, c.dialed.Class, c.dialed.Text)
	require.Empty(t, c.served.Class, c.served.Text)
	require.Equal(t, 9000, c.served.Flows[0].MTU)
}

func TestANodeWithoutNICsHasOneRail(t *testing.T) {
	c := newCouple(t)
	c.server.cfg = Config{ID: "s", Addr: "localhost"}
	c.dialer.cfg = Config{ID: "d", Addr: "127.0.0.1"}
	c.serve.Peer.NICs, c.dial.Peer.NICs = nil, nil
	c.addrs = func(a []string) []string {
		// localhost may be ::1 first, where 127.0.0.1 cannot go.
		if !strings.HasPrefix(a[0], "127.") {
			c.dialer.cfg.Addr, c.dial.Peer.Addr = "::1", "::1"
		}
		return a
	}
	c.serve.Peer.Addr = "localhost"
	c.run()
	require.Empty(t, c.dialed.Class, c.dialed.Text)
	require.Len(t, c.served.Flows, 1)
	require.Zero(t, c.served.Flows[0].MTU, "the MTU is not known, so that there is no ladder")
}
