package checkpoints

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/internal/app/run/feature/featuretest"
	"dlrover-run/internal/exposition"
)

// The age of a step is that of the newest save in memory, and on disk.
func TestMetrics(t *testing.T) {
	now := time.Now()
	text := featuretest.WellNamed(t, func(s *exposition.Scrape) {
		ckptStatus(s, checkpointd.Status{Ranks: []coordinator.Age{{
			Rank: 3, MemoryStep: 20, MemoryAt: now.Add(-time.Second), DurableStep: 10, DurableAt: now.Add(-time.Minute),
		}, {
			Rank: 4, MemoryStep: -1, DurableStep: -1,
		}}}, now)
	}, 0)
	require.Contains(t, text, "\n"+`dlrover_checkpoint_age_seconds{rank="3",where="disk"} 60`+"\n")
	require.Contains(t, text, "\n"+`dlrover_checkpoint_step{rank="3",where="memory"} 20`+"\n")
	require.NotContains(t, text, `rank="4"`)
}
