package checkpointd

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/coordinator"
)

func TestAgesLeaveOutCopies(t *testing.T) {
	at := func(second int64) time.Time { return time.Unix(second, 0) }
	durable := map[int]SegmentStatus{0: {Rank: 0, Step: 4, Saved: at(4)}, 2: {Rank: 2, Step: 1, Saved: at(1)}}
	require.Equal(t, []coordinator.Age{
		{Rank: 0, MemoryStep: 7, MemoryAt: at(7), DurableStep: 4, DurableAt: at(4)},
		{Rank: 1, MemoryStep: 5, MemoryAt: at(5), DurableStep: 5, DurableAt: at(5)},
		{Rank: 2, MemoryStep: -1, DurableStep: 1, DurableAt: at(1)},
	}, agesOf(durable, []SegmentStatus{
		{Rank: 0, Step: 7, Saved: at(7)}, {Rank: 0, Step: 3, Saved: at(3), Durable: true},
		{Rank: 1, Step: 5, Saved: at(5), Durable: true}, {Rank: 1, Step: 9, Saved: at(9), Copy: true},
		{Rank: 3, Step: 9, Saved: at(9), Copy: true},
	}))
}
