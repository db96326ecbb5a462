package coordinator

import (
	"context"
	"errors"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/internal/runhost"
)

// hold is how long a request waits before it has to be repeated.
const hold = 25 * time.Second

var (
	errPending = errors.New("coordinator: no answer yet") // after hold
	errClosed  = errors.New("the checkpoint coordinator is shutting down")
)

// run is a state with a clock and its waiting requests.
type run struct {
	runhost.Run
	state   *state
	waiting map[topic]*waiters
	conns   map[context.Context]seat // of the daemons, each for the node that has spoken last
}

// waiters share one channel, so that an event costs one step for each of them and nothing for other requests.
type waiters struct {
	news chan struct{} // closed when the topic is known
	n    int
}

func newRun() *run {
	return &run{state: newState(), waiting: map[topic]*waiters{}, conns: map[context.Context]seat{}}
}

// ask steps ev in until answer returns true, at most for hold.
func (r *run) ask(ctx context.Context, ev event, t topic, answer func(*state) (bool, error)) error {
	expired := time.NewTimer(hold)
	defer expired.Stop()
	for {
		w, err := r.try(ev, t, answer)
		if w == nil {
			return err
		}
		select {
		case <-w.news:
		case <-expired.C:
			err = errPending
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		r.leave(t, w)
		if err != nil {
			return err
		}
	}
}

// try returns the waiters to join, or nil when there is an answer.
func (r *run) try(ev event, t topic, answer func(*state) (bool, error)) (*waiters, error) {
	r.Lock()
	defer r.Unlock()
	if err := r.stepLocked(ev); err != nil {
		return nil, err
	}
	if done, err := answer(r.state); done || err != nil {
		return nil, err
	}
	w := r.waiting[t]
	if w == nil {
		w = &waiters{news: make(chan struct{})}
		r.waiting[t] = w
	}
	w.n++
	return w, nil
}

func (r *run) stepLocked(ev event) error {
	if err := r.Err(); err != nil {
		return err
	}
	now := time.Now()
	topics, err := r.state.step(now, ev)
	for _, t := range topics {
		if w := r.waiting[t]; w != nil {
			close(w.news)
			delete(r.waiting, t)
		}
	}
	r.Arm(now, r.state.next())
	return err
}

func (r *run) leave(t topic, w *waiters) {
	r.Lock()
	defer r.Unlock()
	if w.n--; w.n == 0 && r.waiting[t] == w {
		delete(r.waiting, t)
	}
}

// apply steps ev in and waits for nothing.
func (r *run) apply(ev event) error {
	r.Lock()
	defer r.Unlock()
	return r.stepLocked(ev)
}

func (r *run) post(ctx context.Context, rep Report) (es []commit.Entry, err error) {
	err = r.ask(ctx, reportEvent{rep}, rep.topic(), func(st *state) (done bool, err error) {
		es, done, err = st.reply(rep)
		return done, err
	})
	return es, err
}

func (r *run) agree(ctx context.Context, h agreeEvent) (a agreeAnswer, err error) {
	err = r.ask(ctx, h, topic{agreed, h.Key}, func(st *state) (done bool, _ error) {
		a, done = st.agreement(h.Key, h.Node)
		return done, nil
	})
	return a, err
}

func (r *run) peers(ctx context.Context, h peersEvent) (body encoded, err error) {
	err = r.ask(ctx, h, topic{peersKnown, h.Key}, func(st *state) (done bool, err error) {
		body, done, err = st.peersReply(h.Key)
		return done, err
	})
	return body, err
}

// reopen forgets that a save was aborted: it is to be written once more.
func (r *run) reopen(id string) {
	r.Lock()
	defer r.Unlock()
	r.state.reopen(id)
}

func (r *run) summary() Summary {
	r.Lock()
	defer r.Unlock()
	return r.state.summary()
}

// tick implements runhost.Machine.
func (r *run) Tick(time.Time) { _ = r.stepLocked(tick{}) } // never refused

// Idle implements runhost.Machine.
func (r *run) Idle(now time.Time) bool {
	r.Tick(now)
	return r.state.empty() && len(r.waiting) == 0
}

// Closed implements runhost.Machine. It ends every request.
func (r *run) Closed() {
	clear(r.conns)
	for t, w := range r.waiting {
		close(w.news)
		delete(r.waiting, t)
	}
}
