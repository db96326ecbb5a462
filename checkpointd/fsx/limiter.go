package fsx

import (
	"context"
	"sync"
	"time"
)

// Limiter holds writers to a number of bytes per second, all that share it together. A nil Limiter does not limit.
type Limiter struct {
	perSecond int64

	mu   sync.Mutex
	next time.Time // when the granted bytes are paid off
}

// NewLimiter returns a limiter, or nil, which does not limit, when bytesPerSecond is not positive.
func NewLimiter(bytesPerSecond int64) *Limiter {
	if bytesPerSecond <= 0 {
		return nil
	}
	return &Limiter{perSecond: bytesPerSecond}
}

// Wait returns when n more bytes may be written. One request may be of any size: it is granted as soon as the earlier
// ones are paid off, and the next one waits for it.
func (l *Limiter) Wait(ctx context.Context, n int64) error {
	if l == nil {
		return ctx.Err()
	}
	delay := l.take(n)
	if delay <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(delay)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		l.refund(n)
		return ctx.Err()
	}
}

// take reserves n bytes and returns how long the caller has to wait for them.
func (l *Limiter) take(n int64) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if l.next.Before(now) {
		l.next = now
	}
	delay := l.next.Sub(now)
	l.next = l.next.Add(l.cost(n))
	return delay
}

// refund takes back the booking of a caller that gave up.
func (l *Limiter) refund(n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next = l.next.Add(-l.cost(n))
}

func (l *Limiter) cost(n int64) time.Duration {
	return time.Duration(float64(n) / float64(l.perSecond) * float64(time.Second))
}
