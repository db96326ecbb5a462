package probe

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLoopback(t *testing.T) {
	began := time.Now()
	rate, err := Loopback(t.Context())
	require.NoError(t, err)
	require.Greater(t, rate, 5.0)
	require.Less(t, time.Since(began), 20*time.Second)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Loopback(ctx)
	require.Error(t, err)
}

func TestThroughputEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err := throughput(ctx, plan{measure: time.Minute})
	require.Error(t, err)
	require.Less(t, time.Since(began), 30*time.Second)
}
