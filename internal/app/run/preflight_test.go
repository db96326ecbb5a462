package run

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLittleSharedMemoryIsSaid(t *testing.T) {
	h := testHost()
	for free, want := range map[int64]int{64 << 20: 1, 128 << 20: 0} {
		h.shmFree = func() (int64, error) { return free, nil }
		s, err := resolvedOn(t, h, "--nproc-per-node=2 train.py", nil)
		require.NoError(t, err)
		require.Len(t, s.warnings, want)
	}
}
