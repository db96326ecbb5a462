package upstream

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// phase is the event that the node waits for.
type phase int

const (
	idle      phase = iota
	examining       // for its own launcher, which got a Check
	inCheck         // for the master's verdict about a test with other nodes
	joining         // for the master's leave to join
	forming         // for a world
	leading         // for its own launcher, which got a Lead
	following       // for the leader's address
	running         // for a reason to stop
	ending          // for the other nodes, with its own workers done
	over            // for nothing: the run has ended for this node
)

// progress is the phase of a node. The owner's lock guards phase and since.
type progress struct {
	phase phase
	since time.Time
	turns atomic.Int64  // grows with every phase, so that late answers are known
	kick  chan struct{} // holds one when the phase has changed
}

func newProgress() *progress { return &progress{kick: make(chan struct{}, 1)} }

// enter begins a phase.
func (p *progress) enter(next phase) {
	p.phase, p.since = next, time.Now()
	p.turns.Add(1)
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// pause is the time between two questions: large jobs ask less often, so that a master of some 3,000 requests a second
// has at most half of that to do.
func (p phase) pause(size int) time.Duration {
	nodes := time.Duration(size)
	switch p {
	case running:
		return min(500*time.Millisecond+nodes*time.Millisecond, 10*time.Second)
	case idle, examining, leading, over:
		return heartbeat // until it is kicked
	}
	return min(100*time.Millisecond+nodes*time.Millisecond, 3*time.Second)
}

// turn is one phase, for the goroutine that carries it out.
type turn struct {
	of     *progress
	number int64
	// asked hears of every answer of the master, and of every failure to get one.
	asked func(error)
}

// lasts reports whether the phase has not ended.
func (t turn) lasts() bool { return t.number == t.of.turns.Load() }

// sleep waits for a pause, or until the phase ends.
func (t turn) sleep(ctx context.Context, pause time.Duration) {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for t.lasts() {
		select {
		case <-t.of.kick:
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// Reasons to give up a phase that are no errors of the master.
var (
	// errAside: the phase has ended.
	errAside = errors.New("upstream: the phase is over")
	// errNext: other nodes have begun the next round of the check.
	errNext = errors.New("upstream: the round is over")
	// errAnew: the master was started again, or another check has begun.
	errAnew = errors.New("upstream: the master has forgotten the check")
)

// withoutReasons drops the errors above. Where the phase has not ended it begins anew.
func withoutReasons(err error) error {
	if errors.Is(err, errAside) || errors.Is(err, errNext) || errors.Is(err, errAnew) {
		return nil
	}
	return err
}

// wait is sleep, and fails if the phase has ended.
func (t turn) wait(ctx context.Context, pause time.Duration) error {
	t.sleep(ctx, pause)
	if !t.lasts() {
		return errAside
	}
	return ctx.Err()
}

// Pauses between attempts.
const (
	askPause    = 250 * time.Millisecond
	insistPause = 5 * time.Second // at most, between two attempts at the same
)

// insist asks the master until it has answered, or the phase has ended.
func (t turn) insist(ctx context.Context, ask func() error) error {
	for pause := askPause; ; pause = min(2*pause, insistPause) {
		err := ask()
		t.asked(err)
		if err == nil {
			return nil
		}
		if err := t.wait(ctx, pause); err != nil {
			return err
		}
	}
}
