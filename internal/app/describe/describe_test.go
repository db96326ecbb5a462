package describe

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestCheckpoint(t *testing.T) {
	now := time.Unix(1700000000, 0)
	old := &Checkpoint{
		MemoryStep: 120, MemoryAt: now.Add(-12 * time.Second), DiskStep: 100, DiskAt: now.Add(-200 * time.Second),
	}
	require.Equal(t, "step 120 in memory, 12s old; step 100 on disk, 3m20s old", old.Text(now))
	require.Equal(t, "none in memory; none on disk", (&Checkpoint{}).Text(now))
}

func TestAge(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 59 * time.Second: "59s", time.Hour: "1h0m", 50 * time.Hour: "2d2h",
	} {
		require.Equal(t, want, Age(d))
	}
}
