package retry

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func pauses(b *Backoff, n int) (all []time.Duration) {
	for range n {
		all = append(all, b.Next())
	}
	return all
}

func TestPausesDouble(t *testing.T) {
	b := Backoff{First: 2, Most: 9}
	require.Equal(t, []time.Duration{2, 4, 8, 9, 9}, pauses(&b, 5))
	b.Reset()
	require.Equal(t, []time.Duration{2, 4}, pauses(&b, 2))
	require.Equal(t, []time.Duration{1, 2, 4, 8, 16}, pauses(&Backoff{First: 1}, 5), "without a bound")
	require.Equal(t, []time.Duration{5, 5}, pauses(&Backoff{First: 7, Most: 5}, 2))
}

func TestSpreadPausesAreNeverShorterThanHalf(t *testing.T) {
	b := Backoff{First: 100, Most: 100, Spread: true}
	least, most := time.Duration(100), time.Duration(0)
	for _, d := range pauses(&b, 2000) {
		least, most = min(least, d), max(most, d)
	}
	require.GreaterOrEqual(t, least, time.Duration(50))
	require.LessOrEqual(t, most, time.Duration(100))
	require.Greater(t, most-least, time.Duration(40), "they are spread")
	require.Equal(t, time.Duration(1), (&Backoff{First: 1, Spread: true}).Next())
}

func TestWaitEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := Backoff{First: time.Second}
		begin := time.Now()
		require.True(t, b.Wait(t.Context()))
		require.Equal(t, time.Second, time.Since(begin))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second/2)
		defer cancel()
		require.False(t, b.Wait(ctx))
		require.Equal(t, 3*time.Second/2, time.Since(begin))
		require.False(t, b.Wait(ctx), "it has ended before")
	})
}
