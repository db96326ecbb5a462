package checkpoints

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd"
)

// A daemon that does not answer holds no report up for long, and what it has said before in the epoch counts.
func TestStatusOfAFrozenDaemon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var answer *checkpointd.Status
		var takes time.Duration
		n := newest{ask: func(ctx context.Context) (*checkpointd.Status, error) {
			select {
			case <-time.After(takes):
				return answer, nil
			case <-ctx.Done():
				return &checkpointd.Status{}, errors.New("frozen")
			}
		}}
		asked := func(want *checkpointd.Status, takesNow time.Duration) {
			t.Helper()
			began := time.Now()
			require.Same(t, want, n.get())
			require.Equal(t, takesNow, time.Since(began))
		}
		asked(nil, 0) // none runs
		first, second := &checkpointd.Status{}, &checkpointd.Status{}
		answer = first
		asked(first, 0)
		answer, takes = second, time.Hour
		asked(first, statusPatience)
		asked(first, statusPatience) // the same request
		time.Sleep(statusTime)
		takes = statusPatience * 3 / 2
		asked(first, statusPatience)
		asked(second, statusPatience/2)
		answer, takes = nil, 0
		asked(second, 0) // it has died

		answer, takes = first, statusPatience*3/2
		asked(second, statusPatience)
		n.forget()
		asked(nil, statusPatience/2) // the answer is about the epoch before
		takes = 0
		asked(first, 0)
	})
}
