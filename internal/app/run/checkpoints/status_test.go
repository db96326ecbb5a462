package checkpoints

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd"
)

// A daemon that does not answer holds no report up for long, and what it has said before in the epoch counts.
func TestStatusOfAFrozenDaemon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var answer atomic.Pointer[checkpointd.Status]
		var takes atomic.Int64 // nanoseconds
		answers := func(s *checkpointd.Status, after time.Duration) {
			answer.Store(s)
			takes.Store(int64(after))
		}
		n := newest{ask: func(ctx context.Context) (*checkpointd.Status, error) {
			select {
			case <-time.After(time.Duration(takes.Load())):
				return answer.Load(), nil
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
		answers(first, 0)
		asked(first, 0)
		answers(second, time.Hour)
		asked(first, statusPatience)
		asked(first, statusPatience) // the same request
		time.Sleep(statusTime)
		answers(second, statusPatience*3/2)
		asked(first, statusPatience)
		asked(second, statusPatience/2)
		answers(nil, 0)
		asked(second, 0) // it has died

		answers(first, statusPatience*3/2)
		asked(second, statusPatience)
		n.forget()
		asked(nil, statusPatience/2) // the answer is about the epoch before
		answers(first, 0)
		asked(first, 0)
	})
}
