package checkpointd

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &restart{life: newLifetime()}
		waited := func(ctx context.Context) (time.Duration, error) {
			begin := time.Now()
			err := r.wait(ctx)
			return time.Since(begin), err
		}
		took, err := waited(t.Context())
		require.NoError(t, err)
		require.Zero(t, took)
		r.begin()
		time.AfterFunc(restartTime/2, r.begin)
		took, err = waited(t.Context())
		require.NoError(t, err)
		require.Equal(t, restartTime, took)
		r.begin()
		time.AfterFunc(time.Millisecond, r.over)
		took, err = waited(t.Context())
		require.NoError(t, err)
		require.Equal(t, time.Millisecond, took)
		r.begin()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = waited(ctx)
		require.ErrorIs(t, err, context.Canceled)
		time.Sleep(restartTime) // for the timers
	})
}
