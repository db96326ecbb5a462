package node

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/netcheck"
	"dlrover-run/netcheck/serve"
)

// network has the addresses at which somebody listens.
type network struct {
	*testing.T
	mu     sync.Mutex
	open   map[string]bool
	ports  int
	readys int // that were sent
}

func (n *network) listen(host string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ports++
	addr := fmt.Sprint(host, ":", n.ports)
	n.open[addr] = true
	return addr
}

func (n *network) close(addr string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.open, addr)
}

// card is the Prober of a node on a network.
type card struct {
	*network
	host  string
	old   bool // it has never heard of Listen
	early string
}

func (c *card) Listen(context.Context) []string {
	switch {
	case c.old:
		return nil
	case c.early == "":
		c.early = c.listen(c.host)
	}
	return []string{c.early}
}

func (c *card) Close() { c.close(c.early) }

func (c *card) Serve(ctx context.Context, _ netcheck.Assignment, ready func([]string) error) netcheck.Result {
	addr := c.early
	if c.early = ""; addr == "" {
		addr = c.listen(c.host)
	}
	defer c.close(addr)
	if ready([]string{addr}) != nil {
		return netcheck.Result{Class: netcheck.Canceled}
	}
	return c.measure(ctx)
}

func (c *card) Dial(ctx context.Context, a netcheck.Assignment) netcheck.Result {
	c.mu.Lock()
	open := c.open[a.Peer.Addrs[0]]
	c.mu.Unlock()
	if !open {
		c.Errorf("nobody listens at %s", a.Peer.Addrs[0])
		return netcheck.Result{Class: netcheck.Refused}
	}
	return c.measure(ctx)
}

func (c *card) measure(ctx context.Context) netcheck.Result {
	select {
	case <-time.After(time.Second):
		return netcheck.Result{Flows: []netcheck.Flow{{NIC: "eth0", Mbps: 1000, P50: 50}}}
	case <-ctx.Done():
		return netcheck.Result{Class: netcheck.Canceled}
	}
}

// link carries requests to a service of this version, or of one that reads neither Listens nor sends Told.
type link struct {
	*serve.Hub
	network *network
	old     bool
}

func (l link) Next(ctx context.Context, run string, q serve.Request) (netcheck.Assignment, error) {
	if q.Ready != nil {
		l.network.mu.Lock()
		l.network.readys++
		l.network.mu.Unlock()
	}
	if l.old {
		q.Listens = nil
	}
	return l.Hub.Next(ctx, run, q)
}

// Launchers and services of this version and of earlier ones go on together, and nobody connects before the other end
// listens.
func TestMixedVersions(t *testing.T) {
	const nodes = 8
	for name, c := range map[string]struct {
		oldNodes   int
		oldService bool
		all        bool // tests need Ready
	}{
		"all new": {}, "a few old nodes": {oldNodes: 3}, "old nodes": {nodes, false, true},
		"an old service": {oldService: true, all: true}, "all old": {nodes, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				net := &network{T: t, open: map[string]bool{}}
				spec := netcheck.Spec{Level: netcheck.LevelHost, TTL: time.Hour, Timeout: netcheck.DefaultTimeout}
				hub := serve.New(serve.Config{
					Spec: func(string) (netcheck.Spec, error) { return spec, nil },
					Bar:  func(_, _, _, reason string) { t.Error(reason) },
					Note: func(string, job.Note) {},
				})
				defer hub.Close()
				var ids []string
				for i := range nodes {
					ids = append(ids, fmt.Sprint("id", i))
				}
				require.NoError(t, hub.Expect("r", ids, nil))
				var all sync.WaitGroup
				for i, id := range ids {
					all.Go(func() {
						host := fmt.Sprint("10.0.0.", i+1)
						v, err := Run(t.Context(), Config{Run: "r", Transport: link{hub, net, c.oldService},
							Prober: &card{network: net, host: host, old: i < c.oldNodes},
							Node:   netcheck.Node{ID: id, Name: id, Addr: host}})
						if err != nil || v.State != netcheck.StateOK {
							t.Error(err, v)
						}
					})
				}
				all.Wait()
				p, err := hub.Picture("r")
				require.NoError(t, err)
				if tests := len(p.Pairs) / 2; c.all {
					require.Equal(t, tests, net.readys)
				} else {
					require.Less(t, net.readys, tests)
				}
				require.Empty(t, net.open)
			})
		})
	}
}
