package upstream

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto"
	"dlrover-run/rendezvous/pyproto/agents"
)

// checked are nodes in a check, under our own master for DLRover's agents: it answers as DLRover's does.
type checked struct {
	t     *testing.T
	hub   *api.Hub
	addr  string
	mu    sync.Mutex
	bad   map[int]bool   // node ranks whose tests fail
	slow  map[int]bool   // and those whose tests take long
	pairs map[string]int // groups, by the address where they have met
}

func newChecked(t *testing.T) *checked {
	c := &checked{
		t: t, hub: api.NewHub(api.HubConfig{}), bad: map[int]bool{}, slow: map[int]bool{}, pairs: map[string]int{},
	}
	host := agents.New(agents.Config{Service: c.hub, Run: "job", Open: true})
	srv := httptest.NewUnstartedServer(pyproto.Handler(host))
	srv.Config.Protocols = new(http.Protocols)
	srv.Config.Protocols.SetHTTP1(true)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	srv.Start()
	c.addr = srv.Listener.Addr().String()
	t.Cleanup(func() {
		host.Close()
		c.hub.Close()
		srv.Close()
	})
	return c
}

func (c *checked) test(rank int) func(context.Context, Group) (float64, error) {
	return func(_ context.Context, g Group) (float64, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.pairs[fmt.Sprintf("%s:%d of %d", g.MasterAddr, g.MasterPort, g.WorldSize)]++
		switch {
		case c.bad[rank]:
			return 0, errors.New("the link is down")
		case c.slow[rank]:
			return 100, nil
		}
		return 1 + float64(rank)/100, nil
	}
}

func (c *checked) node(rank int, p rendezvous.Params, k Check) *node {
	k.Test = c.test(rank)
	from := pyproto.Caller{NodeID: rank, NodeType: "worker"}
	client := pyproto.NewClient(pyproto.ClientConfig{Addr: c.addr, Caller: from})
	n := &node{t: c.t, rank: rank, slots: 2, params: p, Service: New(Config{Client: client, Rank: rank, Check: k,
		Port: func() (int, error) { return 30000 + rank, nil }})}
	n.every.round = 500 * time.Millisecond
	c.t.Cleanup(n.Close)
	return n.join()
}

func TestNodesThatPassTheirTestTrain(t *testing.T) {
	t.Parallel()
	c := newChecked(t)
	p := rendezvous.Params{Min: 3, Max: 3}
	run(c.node(0, p, Check{}), c.node(1, p, Check{}), c.node(2, p, Check{}))
	require.Equal(t, map[string]int{"10.0.0.0:30000 of 6": 3}, c.pairs)
}

func TestTheNodeAtFaultIsTold(t *testing.T) {
	t.Parallel()
	c := newChecked(t)
	c.bad[2] = true
	p := rendezvous.Params{Min: 3, Max: 4, LastCall: time.Second}
	var nodes []*node
	for rank := range 4 {
		nodes = append(nodes, c.node(rank, p, Check{}))
	}
	require.Equal(t, job.CauseCheck, nodes[2].until(job.Bar).Cause.Kind)
	nodes[2].leave()
	run(nodes[0], nodes[1], nodes[3])
	require.Equal(t, 6, nodes[3].seen.Place.WorldSize)
}

func TestFewNodesCannotTellWhoseFaultItIs(t *testing.T) {
	t.Parallel()
	c := newChecked(t)
	c.bad[1] = true
	nodes := []*node{c.node(0, two, Check{}), c.node(1, two, Check{})}
	for _, n := range nodes {
		require.Contains(t, n.until(job.Fail).Cause.Text, "too few to find out whose fault")
	}
}

func TestReportOnlyTrainsAllTheSame(t *testing.T) {
	t.Parallel()
	c := newChecked(t)
	c.bad[1] = true
	run(c.node(0, two, Check{ReportOnly: true}), c.node(1, two, Check{ReportOnly: true}))
}

func TestAStragglerLeavesOnlyIfItIsAsked(t *testing.T) {
	t.Parallel()
	for _, exclude := range []bool{false, true} {
		t.Run(fmt.Sprint(exclude), func(t *testing.T) {
			t.Parallel()
			c := newChecked(t)
			c.slow[3] = true
			p := rendezvous.Params{Min: 3, Max: 4, LastCall: time.Second}
			var nodes []*node
			for rank := range 4 {
				nodes = append(nodes, c.node(rank, p, Check{ExcludeStraggler: exclude}))
			}
			if exclude {
				require.Contains(t, nodes[3].until(job.Fail).Cause.Text, "--exclude-straggler")
				nodes[3].leave()
				nodes = nodes[:3]
			}
			run(nodes...)
		})
	}
}

// A launcher examines its own node first, once for as long as that counts.
func TestTheOwnNodeIsExaminedFirst(t *testing.T) {
	t.Parallel()
	c := newChecked(t)
	one := rendezvous.Params{Min: 1, Max: 1, MaxRestarts: 1}
	n := c.node(0, one, Check{Local: true})
	require.Equal(t, job.Check, n.next(patience).Kind)
	require.NoError(t, n.Report(t.Context(), "job", rendezvous.Cleared{ID: "x"}))
	n.until(job.Run)
	n.fails(rendezvous.RestartCharged)
	n.until(job.Run) // and is not told to Check again
	require.Equal(t, 2, c.pairs["10.0.0.0:30000 of 2"], "tests are made before every start")

	n = c.node(1, one, Check{Local: true})
	require.Equal(t, job.Check, n.next(patience).Kind)
	require.NoError(t, n.Report(t.Context(), "job", rendezvous.Barred{ID: "x", Reason: "no device"}))
	require.Equal(t, "no device", n.until(job.Bar).Cause.Text)
}

func TestACheckThatDoesNotComeAboutBlamesNobody(t *testing.T) {
	t.Parallel()
	m := newModel(t) // knows no checks
	n := m.node(0, 0, rendezvous.Params{Min: 2, Max: 2, JoinTimeout: time.Second})
	n.cfg.Check.Test = func(context.Context, Group) (float64, error) { return 1, nil }
	n.join()
	require.Equal(t, job.CauseTimeout, n.until(job.Fail).Cause.Kind)
	eventually(t, "the master hears", func() bool { return len(m.told("NodeFailure", 0)) == 1 })
	requireTimedOut(t, "network-check", m.told("NodeFailure", 0)[0])
}
