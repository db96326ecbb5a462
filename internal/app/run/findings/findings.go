// Package findings reports findings in the output of workers to the run.
package findings

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous/api"
)

// Queue reports to the run this launcher's findings in its workers' output. The run passes them to the store of
// node health. Nothing runs while there is nothing to report. The methods of nil do nothing.
type Queue struct {
	send func(ctx context.Context, text string) error
	log  *slog.Logger

	mu    sync.Mutex
	said  map[said]time.Time // the time of each finding that is or will be reported
	queue []string
	done  chan struct{} // closed when all is sent; nil: no goroutine sends
}

// said is the key of a finding that is reported once in saidTime.
type said struct {
	rule     string
	hardware bool
}

const (
	saidTime   = 10 * time.Minute
	maxQueue   = 16
	sayTries   = 5
	sayTime    = 10 * time.Second // of one try
	sayPause   = 3 * time.Second
	flushLimit = time.Second // how long a node that leaves waits for its findings to be sent
)

// New returns a queue. send gets one finding at a time.
func New(log *slog.Logger, send func(ctx context.Context, text string) error) *Queue {
	return &Queue{log: log, said: map[said]time.Time{}, send: send}
}

// Add queues a finding of a log rule, unless the same rule was reported lately.
func (f *Queue) Add(rule string, rank int, text string) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	is, now := said{rule, verdict.IsHardware(text)}, time.Now()
	if last, ok := f.said[is]; ok && now.Sub(last) < saidTime || len(f.queue) >= maxQueue {
		return
	}
	f.said[is] = now
	f.queue = append(f.queue, fmt.Sprintf("rank %d: log rule %s: %s", rank, rule, text))
	if f.done == nil {
		f.done = make(chan struct{})
		go f.tell()
	}
}

// tell sends the queue.
func (f *Queue) tell() {
	for {
		f.mu.Lock()
		if len(f.queue) == 0 {
			close(f.done)
			f.done = nil
			f.mu.Unlock()
			return
		}
		text := f.queue[0]
		f.queue = f.queue[1:]
		f.mu.Unlock()
		f.deliver(text)
	}
}

// deliver retries while a daemon is unreachable for a moment.
func (f *Queue) deliver(text string) {
	for try := 1; ; try++ {
		ctx, cancel := context.WithTimeout(context.Background(), sayTime)
		err := f.send(ctx, text)
		cancel()
		if err == nil {
			return
		}
		if api.Final(err) || try == sayTries { // a new daemon will soon have this node
			f.log.Debug("a finding is not told to the run", "finding", text, "err", err)
			return
		}
		time.Sleep(sayPause)
	}
}

// Flush waits until all is sent, or for flushLimit.
func (f *Queue) Flush() {
	if f == nil {
		return
	}
	f.mu.Lock()
	done := f.done
	f.mu.Unlock()
	if done == nil {
		return
	}
	late := time.NewTimer(flushLimit)
	defer late.Stop()
	select {
	case <-done:
	case <-late.C:
	}
}
