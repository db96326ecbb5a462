package watch

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"dlrover-run/hang"
)

// Bounds of the reports that wait for delivery.
const (
	maxWaiting = 8                // reports
	tryAgain   = time.Second      // after a failure
	tooOld     = 30 * time.Second // to be tried again
)

// outbox delivers reports in order. Of those that answer nothing only the newest counts.
type outbox struct {
	post func(context.Context, hang.Report) error
	log  *slog.Logger

	mu      sync.Mutex
	waiting []letter
	busy    bool // a goroutine delivers
}

type letter struct {
	hang.Report
	written time.Time
}

func newOutbox(post func(context.Context, hang.Report) error, log *slog.Logger) *outbox {
	return &outbox{post: post, log: log}
}

// put adds a report. The goroutine that delivers it belongs to wg and ends with ctx.
func (o *outbox) put(ctx context.Context, wg *sync.WaitGroup, r hang.Report) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if n := len(o.waiting); r.Ask == 0 && n > 0 && o.waiting[n-1].Ask == 0 {
		o.waiting = o.waiting[:n-1]
	}
	if len(o.waiting) == maxWaiting {
		o.waiting = o.waiting[1:]
	}
	o.waiting = append(o.waiting, letter{r, time.Now()})
	if !o.busy {
		o.busy = true
		wg.Go(func() { o.deliver(ctx) })
	}
}

func (o *outbox) deliver(ctx context.Context) {
	for {
		l, ok := o.take(ctx)
		if !ok {
			return
		}
		o.send(ctx, l)
	}
}

func (o *outbox) take(ctx context.Context) (l letter, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.waiting) == 0 || ctx.Err() != nil {
		o.busy = false
		return l, false
	}
	l, o.waiting = o.waiting[0], o.waiting[1:]
	return l, true
}

// send tries again until the report is too old or, if it is news, there is newer.
func (o *outbox) send(ctx context.Context, l letter) {
	for {
		err := o.post(ctx, l.Report)
		if err == nil || ctx.Err() != nil {
			return
		}
		if time.Since(l.written) > tooOld || l.Ask == 0 && o.pending() {
			o.log.Debug("what was seen of the workers could not be told to the judge", "err", err)
			return
		}
		select {
		case <-time.After(tryAgain):
		case <-ctx.Done():
			return
		}
	}
}

func (o *outbox) pending() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.waiting) > 0
}
