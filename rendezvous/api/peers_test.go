package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous"
)

// names are a resolver.
type names struct {
	mu    sync.Mutex
	addrs map[string]string // by name; "!" is no answer
	asked map[string]int
	most  int // lookups at a time
	now   int
	takes time.Duration
}

func (n *names) lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	n.mu.Lock()
	n.now++
	n.most = max(n.most, n.now)
	n.asked[host]++
	addr, takes := n.addrs[host], n.takes
	n.mu.Unlock()
	defer func() { n.mu.Lock(); n.now--; n.mu.Unlock() }()
	select {
	case <-time.After(takes):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	switch addr {
	case "":
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	case "!":
		return nil, &net.DNSError{Err: "server misbehaving", Name: host, IsTemporary: true}
	}
	return []netip.Addr{netip.MustParseAddr(addr)}, nil
}

func (n *names) set(host, addr string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.addrs[host] = addr
}

func (n *names) total() (all int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, k := range n.asked {
		all += k
	}
	return all
}

// peersOf is in a bubble, and ends with the test.
func peersOf(t *testing.T, n *names, hosts ...string) (p *Peers, log *strings.Builder) {
	log = &strings.Builder{}
	n.asked = map[string]int{}
	p = NewPeers(PeersConfig{Names: hosts, Text: strings.Join(hosts, ", "), Lookup: n.lookup,
		Log: slog.New(slog.NewTextHandler(log, nil))})
	t.Cleanup(p.Close)
	return p, log
}

func (p *Peers) check(addr string) error {
	return p.Check(context.Background(), netip.MustParseAddr(addr))
}

func TestPeersAreKnownByTheirNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{addrs: map[string]string{"a": "10.0.0.1", "b": "fd00::2"}}
		p, log := peersOf(t, n, "a", "b", "c", "10.0.0.9")
		require.NoError(t, p.check("10.0.0.9"))
		require.Zero(t, n.total(), "an address is not looked up")
		began := time.Now()
		require.NoError(t, p.check("::ffff:10.0.0.1"))
		require.Zero(t, time.Since(began))
		require.NoError(t, p.check("fd00::2%eth0"))
		require.Equal(t, 3, n.total())
		require.ErrorIs(t, p.check("10.0.0.3"), errStranger)
		require.ErrorContains(t, p.check("10.0.0.3"), "this one has the address 10.0.0.3, and none of these has it: "+
			"a, b, c, 10.0.0.9; give the job a token")
		require.Equal(t, 2*time.Second, time.Since(began), "a second between two passes")
		n.set("c", "10.0.0.3") // its pod has started
		require.NoError(t, p.check("10.0.0.3"))
		require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
		require.Contains(t, log.String(), "addr=10.0.0.3")
	})
}

func TestPeersAreReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{addrs: map[string]string{"a": "10.0.0.1", "b": "10.0.0.2"}}
		p, _ := peersOf(t, n, "a", "b")
		require.NoError(t, p.check("10.0.0.1"))
		n.set("b", "10.0.0.3")
		require.NoError(t, p.check("10.0.0.3"))
		require.ErrorIs(t, p.check("10.0.0.2"), errStranger, "the pass has told that the name moved")

		n.set("a", "10.0.0.4")
		require.NoError(t, p.check("10.0.0.1"), "for a while nobody looks again")
		time.Sleep(peerFresh)
		asked := n.total()
		require.NoError(t, p.check("10.0.0.3"))
		require.Equal(t, asked+1, n.total(), "one name")
		require.ErrorIs(t, p.check("10.0.0.1"), errStranger)
		require.NoError(t, p.check("10.0.0.4"))

		n.set("a", "!")
		time.Sleep(peerFresh)
		require.NoError(t, p.check("10.0.0.4"), "the resolver is away")
		n.set("a", "")
		time.Sleep(peerFresh)
		require.ErrorIs(t, p.check("10.0.0.4"), errStranger, "there is no such name")
	})
}

// Two names may have one address.
func TestPeersShareAHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{addrs: map[string]string{"a": "10.0.0.1", "b": "10.0.0.1"}}
		p, _ := peersOf(t, n, "a", "b")
		require.NoError(t, p.check("10.0.0.1"))
		n.set("b", "")
		time.Sleep(peerFresh)
		require.NoError(t, p.check("10.0.0.1"))
	})
}

// An address that is listed stays, whatever name has had it.
func TestPeersByAddressStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{addrs: map[string]string{"b": "10.0.0.1"}}
		p, _ := peersOf(t, n, "10.0.0.1", "b")
		require.ErrorIs(t, p.check("10.0.0.2"), errStranger)
		n.set("b", "10.0.0.2")
		require.NoError(t, p.check("10.0.0.2"))
		require.NoError(t, p.check("10.0.0.1"))
	})
}

// Strangers, and pods whose names come late, make few lookups, however many come.
func TestPeersLookUpFewNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{addrs: map[string]string{}, takes: time.Millisecond}
		var hosts []string
		for i := range 10_000 {
			hosts = append(hosts, fmt.Sprint("w-", i))
			n.set(hosts[i], netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String())
		}
		n.set("w-7", "")
		p, log := peersOf(t, n, hosts...)
		p.cfg.Text = "many"
		require.NoError(t, p.check("10.1.39.15"))
		require.Equal(t, len(hosts), n.total(), "one pass")
		require.Equal(t, peerLookups, n.most)
		began := time.Now()
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() {
				require.ErrorIs(t, p.check(fmt.Sprintf("10.9.0.%d", i)), errStranger)
			})
		}
		wg.Wait()
		require.Equal(t, peerWait, time.Since(began))
		require.NoError(t, p.check("10.1.0.1"), "who is known does not wait")
		require.Equal(t, peerWait, time.Since(began))
		require.Equal(t, len(hosts), n.total(), "the next pass has to wait")
		require.Equal(t, 1, strings.Count(log.String(), "\n"))
		n.set("w-7", "10.1.0.7")
		require.Eventually(t, func() bool { return p.check("10.1.0.7") == nil }, time.Minute, time.Second)
		require.Equal(t, 2*len(hosts), n.total())
		require.Less(t, time.Since(began), 50*time.Second)
	})
}

// A resolver that does not answer holds up those who ask, for a bounded time, and no others. The next pass goes on.
func TestPeersOfASlowResolver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{addrs: map[string]string{}, takes: time.Hour}
		var hosts []string
		for i := range 200 {
			hosts = append(hosts, fmt.Sprint("w-", i))
		}
		p, _ := peersOf(t, n, append(hosts, "10.0.0.1")...)
		began := time.Now()
		require.ErrorIs(t, p.check("10.0.0.2"), errStranger)
		require.Equal(t, peerWait, time.Since(began))
		require.NoError(t, p.check("10.0.0.1"))
		require.Equal(t, peerWait, time.Since(began))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, p.Check(ctx, netip.MustParseAddr("10.0.0.2")), errStranger, "who hangs up")
		require.Equal(t, peerWait+time.Second, time.Since(began))
		time.Sleep(time.Minute)
		require.ErrorIs(t, p.check("10.0.0.2"), errStranger)
		for range 4 {
			time.Sleep(20 * time.Second)
			require.ErrorIs(t, p.check("10.0.0.2"), errStranger)
		}
		p.Close()
		require.Len(t, n.asked, len(hosts), "all have had their turn")
	})
}

func TestClosedPeersKnowNobodyNew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{addrs: map[string]string{}, takes: time.Hour}
		p, _ := peersOf(t, n, "a")
		done := make(chan error, 1)
		go func() { done <- p.check("10.0.0.1") }()
		synctest.Wait()
		p.Close()
		require.ErrorIs(t, <-done, errStranger)
		require.ErrorIs(t, p.check("10.0.0.1"), errStranger)
		(*Peers)(nil).Close()
	})
}

func TestRequestsOfLaunchers(t *testing.T) {
	s := &server{cfg: ServerConfig{PeerCalls: []string{"POST checks/next", "GET checks"}}}
	for request, want := range map[string]bool{
		"POST /v1/runs/r/join": true, "GET /v1/runs/r/watch?node=x": true, "POST /v1/runs/a%2Fb/leave": true,
		"POST /v1/runs/r/checks/next": true, "GET /v1/runs/r/checks": true, "GET /v1/runs/%2e%2e/world": true,
		"GET /v1/runs": false, "GET /v1/runs/": false, "GET /v1/runs/r/join": false, "POST /v1/runs/r/orders": false,
		"POST /v1/runs/r/notices": false, "GET /v1/runs/r/events": false, "GET /v1/runs/r/verdict": false,
		"POST /v1/runs/r/checks": false, "POST /v1/runs/r/x/join": false, "POST /v1/join": false, "GET /v1/nodes": false,
		"POST /v1/nodes/join": false, "POST /v1/runs/r/join/": false, "POST /v1/runs//r/join": false,
		"POST /v1/runs/r/%6frders": false, "PUT /v1/runs/r/join": false,
	} {
		method, url, _ := strings.Cut(request, " ")
		require.Equal(t, want, s.launchers(httptest.NewRequest(method, url, nil)), request)
	}
}

// refusing is a daemon that knows this host after a while, or never.
type refusing struct {
	Service
	known time.Time
	err   error
}

func (r *refusing) Join(context.Context, string, rendezvous.Join) error {
	if r.known.IsZero() || time.Now().Before(r.known) {
		return r.err
	}
	return rendezvous.ErrRefused
}

// A pod may come before its name does. After a minute, or when its own time is over, it says who turned it away.
func TestANodeIsTurnedAway(t *testing.T) {
	stranger := fmt.Errorf("%w: this one has the address 10.0.0.3", errStranger)
	for name, c := range map[string]struct {
		known, connect, ends time.Duration
		away                 bool
	}{
		"never known":         {0, 10 * time.Minute, strangersPatience, true},
		"known after a while": {20 * time.Second, 10 * time.Minute, 20 * time.Second, false},
		"its time is over":    {0, 5 * time.Second, 5 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				svc := &refusing{err: stranger}
				if c.known > 0 {
					svc.known = time.Now().Add(c.known)
				}
				began := time.Now()
				_, err := Open(t.Context(), svc, SessionConfig{Run: "r", Where: "w-0:1", ConnectTimeout: c.connect,
					Params: rendezvous.Params{Min: 2, Max: 2}})
				require.Error(t, err)
				require.Equal(t, c.away, errors.Is(err, ErrUnauthorized), err)
				if c.away {
					require.Equal(t, "w-0:1 has turned this node away: "+stranger.Error(), err.Error())
				}
				require.InDelta(t, c.ends, time.Since(began), float64(2*time.Second))
			})
		})
	}
}
