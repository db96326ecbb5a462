package node

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/internal/testkit"
	"dlrover-run/netcheck"
	"dlrover-run/netcheck/probe"
	"dlrover-run/netcheck/serve"
)

// Four nodes on the loopback addresses of this machine really test each other. What they measure says nothing on a busy
// machine, and so this test does not look at it.
func TestFourNodesTestEachOtherForReal(t *testing.T) {
	testkit.Long(t, "it takes ten seconds")
	spec := netcheck.Spec{Level: netcheck.LevelHost, TTL: time.Hour, Timeout: netcheck.DefaultTimeout}
	hub := serve.New(serve.Config{
		Spec: func(string) (netcheck.Spec, error) { return spec, nil },
		Bar:  func(_, _, _, reason string) { t.Error(reason) },
		Note: func(_ string, n job.Note) { t.Log(n.Event, n.Text) },
	})
	defer hub.Close()
	require.NoError(t, hub.Expect("r", []string{"id0", "id1", "id2", "id3"}, nil))
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			id, addr := fmt.Sprint("id", i), fmt.Sprintf("127.0.0.%d", i+1)
			v, err := Run(t.Context(), Config{
				Run: "r", Transport: hub, Prober: probe.New(probe.Config{ID: netcheck.Alias(id), Addr: addr}),
				Node: netcheck.Node{ID: id, Name: fmt.Sprint("n", i), Addr: addr},
			})
			if err != nil || v.Excluded || !v.Paired {
				t.Error(err, v)
			}
		})
	}
	wg.Wait()
	p, err := hub.Picture("r")
	require.NoError(t, err)
	require.Len(t, p.Pairs, 12)
	for _, x := range p.Pairs {
		require.NotEqual(t, netcheck.Auth, x.Class)
		require.Positive(t, x.Mbps)
	}
	t.Log(p.Summary)
}
