package api

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous"
)

// What a node tells, and what all tell, by one event has a bound for some time; other events have their own.
func TestQuota(t *testing.T) {
	now := time.Unix(0, 0)
	var q quota
	flood := func(event string, nodes int) (taken int) {
		for i := range nodes * 2 * quotaNode {
			if q.take(now, event, fmt.Sprint("n", i%nodes)) {
				taken++
			}
		}
		return taken
	}
	require.Equal(t, quotaNode, flood("log-rule", 1))
	require.Equal(t, quotaNode, flood("node-error", 1))
	require.Equal(t, quotaRun-quotaNode, flood("log-rule", 100))
	require.Zero(t, flood("log-rule", 100))
	require.LessOrEqual(t, len(q.taken), 2*quotaRun+4)
	now = now.Add(quotaTime)
	require.Equal(t, quotaNode, flood("log-rule", 1))
}

// A flood of what is told does not reach who observes the run either.
func TestToldIsBounded(t *testing.T) {
	seen := 0
	h := NewHub(HubConfig{Observe: func(string, rendezvous.Note) { seen++ }})
	defer h.Close()
	for i := range 1000 {
		require.NoError(t, h.Told("r", "node-error", fmt.Sprint("n", i), "no GPU"))
	}
	require.Equal(t, quotaRun, seen)
	for range 1000 {
		require.NoError(t, h.Annotate("r", "node-marked", "n", "no GPU"))
	}
	require.Equal(t, quotaRun+1000, seen, "what the daemon finds itself has none")
}
