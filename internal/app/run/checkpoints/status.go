package checkpoints

import (
	"context"
	"sync"
	"time"

	"dlrover-run/checkpointd"
)

const (
	// statusTime bounds a request for the daemon's status.
	statusTime = time.Second
	// statusPatience bounds the wait of a report for it. A daemon that is not frozen or starved answers in a millisecond.
	statusPatience = 50 * time.Millisecond
)

// newest keeps the last status of the daemon in this epoch: reports of this node do not wait for a frozen daemon.
type newest struct {
	ask func(context.Context) (*checkpointd.Status, error) // nil without an error: no daemon runs

	mu       sync.Mutex
	epochs   int // that have begun
	known    *checkpointd.Status
	answered chan struct{} // closes when the request under way has ended; nil: none is
}

// forget drops the status of the epoch before.
func (n *newest) forget() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.epochs++
	n.known = nil
}

// get asks the daemon, unless a request is under way, and returns what is known soon afterwards. Nil: nothing is.
func (n *newest) get() *checkpointd.Status {
	n.mu.Lock()
	if n.answered == nil {
		n.answered = make(chan struct{})
		go n.request(n.epochs, n.answered)
	}
	answered := n.answered
	n.mu.Unlock()
	late := time.NewTimer(statusPatience)
	defer late.Stop()
	select {
	case <-answered:
	case <-late.C:
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.known
}

func (n *newest) request(epochs int, answered chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), statusTime)
	defer cancel()
	st, err := n.ask(ctx)
	n.mu.Lock()
	defer n.mu.Unlock()
	if err == nil && st != nil && epochs == n.epochs {
		n.known = st
	}
	n.answered = nil
	close(answered)
}
