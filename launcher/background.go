package launcher

import (
	"context"
	"fmt"
	"sync"
)

// background is the goroutines of one Agent.Run.
type background struct {
	sync.WaitGroup
	ctx    context.Context // ends with Run
	cancel context.CancelFunc
	over   chan struct{} // closed when the loop has ended
	force  chan struct{} // closed when workers get no more grace
	forced sync.Once
	errs   chan error // lasting errors of requests to the rendezvous
}

func newBackground() *background {
	b := &background{over: make(chan struct{}), force: make(chan struct{}), errs: make(chan error)}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	return b
}

// end waits for all goroutines, now that the loop has ended.
func (b *background) end() {
	b.cancel()
	close(b.over)
	b.Wait()
}

// hurry ends the grace of all workers: because of a second signal, or when the time to leave is over.
func (b *background) hurry() { b.forced.Do(func() { close(b.force) }) }

// call runs a request to the rendezvous in a goroutine; a lasting error ends the agent.
func (b *background) call(what string, f func(ctx context.Context) error) {
	b.Go(func() {
		if err := f(b.ctx); err != nil && b.ctx.Err() == nil {
			post(b, b.errs, fmt.Errorf("%s: %w", what, err))
		}
	})
}

// post hands v to the loop, unless that has ended.
func post[T any](b *background, to chan<- T, v T) {
	select {
	case to <- v:
	case <-b.over:
	}
}
