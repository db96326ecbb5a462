package board

import (
	"context"
	"errors"
	"sync"
	"time"

	"dlrover-run/checkpointd/commit"
)

// hold is how long a request waits before it has to be repeated.
const hold = 25 * time.Second

var (
	errPending = errors.New("board: no answer yet") // after hold
	errClosed  = errors.New("the checkpoint board is shutting down")
)

// room is a Ledger with a clock and with those who wait for it.
type room struct {
	mu      sync.Mutex
	ledger  *Ledger
	waiting map[Topic]*waiters
	closed  bool
}

// waiters share one channel, so that news cost one step for each of them and nothing for anybody else.
type waiters struct {
	news chan struct{} // closed when the topic is known
	n    int
}

func newRoom() *room { return &room{ledger: NewLedger(), waiting: map[Topic]*waiters{}} }

// ask steps ev in until answer says that it is done, at most for hold.
func (r *room) ask(ctx context.Context, ev Event, t Topic, answer func(*Ledger) (bool, error)) error {
	expired := time.NewTimer(hold)
	defer expired.Stop()
	for {
		w, due, err := r.try(ev, t, answer)
		if w == nil {
			return err
		}
		err = w.wait(ctx, expired.C, due)
		r.leave(t, w)
		if err != nil {
			return err
		}
	}
}

// try returns what to wait for and until when (zero: as long as possible), or nil when there is an answer.
func (r *room) try(ev Event, t Topic, answer func(*Ledger) (bool, error)) (*waiters, time.Time, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.stepLocked(ev); err != nil {
		return nil, time.Time{}, err
	}
	if done, err := answer(r.ledger); done || err != nil {
		return nil, time.Time{}, err
	}
	w := r.waiting[t]
	if w == nil {
		w = &waiters{news: make(chan struct{})}
		r.waiting[t] = w
	}
	w.n++
	return w, r.ledger.Due(t), nil
}

func (r *room) stepLocked(ev Event) error {
	if r.closed {
		return errClosed
	}
	topics, err := r.ledger.Step(time.Now(), ev)
	for _, t := range topics {
		if w := r.waiting[t]; w != nil {
			close(w.news)
			delete(r.waiting, t)
		}
	}
	return err
}

// wait returns nil when it is time to ask again.
func (w *waiters) wait(ctx context.Context, expired <-chan time.Time, due time.Time) error {
	var patience <-chan time.Time
	if !due.IsZero() {
		timer := time.NewTimer(time.Until(due))
		defer timer.Stop()
		patience = timer.C
	}
	select {
	case <-w.news:
		return nil
	case <-patience:
		return nil
	case <-expired:
		return errPending
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (r *room) leave(t Topic, w *waiters) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w.n--; w.n == 0 && r.waiting[t] == w {
		delete(r.waiting, t)
	}
}

// tell steps ev in and waits for nothing.
func (r *room) tell(ev Event) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stepLocked(ev)
}

func (r *room) post(ctx context.Context, rep Report) (es []commit.Entry, err error) {
	err = r.ask(ctx, Posted{rep}, rep.topic(), func(l *Ledger) (done bool, err error) {
		es, done, err = l.Reply(rep)
		return done, err
	})
	return es, err
}

func (r *room) agree(ctx context.Context, h Held) (a Agreement, err error) {
	err = r.ask(ctx, h, Topic{Agreed, h.Key}, func(l *Ledger) (done bool, _ error) {
		a, done = l.Agreement(h.Key, h.Node)
		return done, nil
	})
	return a, err
}

func (r *room) peers(ctx context.Context, h Here) (body encoded, err error) {
	err = r.ask(ctx, h, Topic{Met, h.Key}, func(l *Ledger) (done bool, err error) {
		body, done, err = l.peersReply(h.Key)
		return done, err
	})
	return body, err
}

// again forgets that a save was given up: it is to be written once more.
func (r *room) again(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ledger.again(id)
}

func (r *room) summary() Summary {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ledger.Summary()
}

// close ends every request, present and future.
func (r *room) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closeLocked()
}

func (r *room) closeLocked() {
	r.closed = true
	for t, w := range r.waiting {
		close(w.news)
		delete(r.waiting, t)
	}
}

// retire closes the room if there is nothing in it.
func (r *room) retire() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.stepLocked(Tick{}); err != nil || !r.ledger.Empty() || len(r.waiting) > 0 {
		return r.closed
	}
	r.closeLocked()
	return true
}
