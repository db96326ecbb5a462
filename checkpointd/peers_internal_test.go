package checkpointd

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/replica"
	"dlrover-run/checkpointd/shm"
)

// A worker reports a save, and so does the exchange of addresses: the partner gets one copy, not two.
func TestASaveIsCopiedOnce(t *testing.T) {
	now := time.Now()
	p := &peers{pending: map[origin]pendingCopy{}, copied: map[origin]pendingCopy{}, unreachable: map[int]backoff{},
		key:   "1.0.0",
		known: []coordinator.Peer{{Node: 0}, {Node: 1}}, partners: []replica.Peer{{Node: 1}}}
	due := func() int {
		t, _ := p.next(now)
		for _, to := range t.to {
			p.recordResult(t, to.Node, nil)
		}
		return len(t.to)
	}
	first, second := shm.Meta{Save: "1", Dir: "/ckpt"}, shm.Meta{Save: "2", Dir: "/ckpt"}
	p.enqueue(now, first)
	require.Equal(t, 1, due())
	p.enqueue(now, first) // before it is known that all have it
	require.Zero(t, due())
	p.enqueue(now, first) // and after
	require.Zero(t, due())
	p.enqueue(now.Add(-1), second)
	require.Zero(t, due(), "an older one")
	p.enqueue(now.Add(1), second)
	require.Equal(t, 1, due())
}
