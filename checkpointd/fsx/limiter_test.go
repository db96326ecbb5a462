package fsx

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLimiterSharesItsRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, start, done := NewLimiter(1000), time.Now(), make(chan error)
		for range 2 {
			go func() {
				for range 5 {
					if err := l.Wait(t.Context(), 500); err != nil {
						done <- err
					}
				}
				done <- nil
			}()
		}
		require.NoError(t, <-done)
		require.NoError(t, <-done)
		require.Equal(t, 4500*time.Millisecond, time.Since(start)) // the last 500 bytes are not paid off yet
	})
}

func TestLimiterDoesNotSaveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(1000)
		require.NoError(t, l.Wait(t.Context(), 1))
		time.Sleep(time.Hour)
		start := time.Now()
		require.NoError(t, l.Wait(t.Context(), 1000))
		require.NoError(t, l.Wait(t.Context(), 1))
		require.Equal(t, time.Second, time.Since(start))
	})
}

func TestLimiterCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(1)
		require.NoError(t, l.Wait(t.Context(), 3600))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, l.Wait(ctx, 1000), context.DeadlineExceeded)
		require.NoError(t, l.Wait(t.Context(), 1))
		require.Equal(t, time.Hour, time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0,
			time.UTC))) // nothing for the one that gave up
	})
}

func TestNoLimiter(t *testing.T) {
	require.Nil(t, NewLimiter(0))
	ctx, cancel := context.WithCancel(context.Background())
	require.NoError(t, (*Limiter)(nil).Wait(ctx, 1<<40))
	cancel()
	require.ErrorIs(t, (*Limiter)(nil).Wait(ctx, 1), context.Canceled)
}
