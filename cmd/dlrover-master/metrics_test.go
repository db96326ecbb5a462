package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous"
)

// Two requests within a second get the same bytes.
func TestThePageOfMetricsIsShared(t *testing.T) {
	m := newMetrics()
	p, now := &page{reg: m.reg}, time.Now()
	first, err := p.fresh(now)
	require.NoError(t, err)
	m.note(rendezvous.Note{Event: "join"})
	again, err := p.fresh(now.Add(pageTime - 1))
	require.NoError(t, err)
	require.Same(t, &first[0], &again[0])
	later, err := p.fresh(now.Add(pageTime))
	require.NoError(t, err)
	require.NotContains(t, string(first), `dlrover_rendezvous_events_total{event="join"} 1`)
	require.Contains(t, string(later), `dlrover_rendezvous_events_total{event="join"} 1`)
}
