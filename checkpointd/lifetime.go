package checkpointd

import (
	"context"
	"errors"
	"sync"
)

// lifetime is common to the parts of a Daemon: its context, its goroutines, and the news that a part has changed.
type lifetime struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each change
}

func newLifetime() *lifetime {
	l := &lifetime{changed: make(chan struct{})}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l
}

// news is closed at the next change. Take it before you look at the parts, or a change may be missed.
func (l *lifetime) news() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

// notify reports that a part has changed.
func (l *lifetime) notify() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.changed)
	l.changed = make(chan struct{})
}

// until waits for cond or for ctx.
func (l *lifetime) until(ctx context.Context, cond func() bool) error {
	for {
		news := l.news()
		if cond() {
			return nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return ctx.Err()
		case <-l.ctx.Done():
			return errClosed
		}
	}
}

var errClosed = errors.New("the checkpoint daemon is ending")
