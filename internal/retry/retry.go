// Package retry spaces the tries of an operation that fails for a while.
package retry

import (
	"context"
	"math/rand/v2"
	"time"
)

// Backoff is the pauses between the tries of one thing: First (positive), then twice as long each time, at most Most; 0
// is no bound. One goroutine uses it.
type Backoff struct {
	First, Most time.Duration
	// Spread shortens each pause by up to a half at random, so that many clients do not retry all at once.
	Spread bool

	last time.Duration
}

// Next returns how long to pause now.
func (b *Backoff) Next() time.Duration {
	b.last = max(b.First, 2*b.last)
	if b.Most > 0 {
		b.last = min(b.last, b.Most)
	}
	if b.Spread {
		random := rand.NewPCG(uint64(time.Now().UnixNano()), uint64(b.last)) // a history on a virtual clock repeats
		return b.last - time.Duration(random.Uint64()%uint64(b.last/2+1))
	}
	return b.last
}

// Reset begins with First again.
func (b *Backoff) Reset() { b.last = 0 }

// Wait pauses. It returns false when ctx has ended, at once if it ends meanwhile.
func (b *Backoff) Wait(ctx context.Context) bool { return Sleep(ctx, b.Next()) }

// Sleep pauses for d. It returns false when ctx has ended, at once if it ends meanwhile.
func Sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
