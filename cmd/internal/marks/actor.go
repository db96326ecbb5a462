package marks

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"dlrover-run/rendezvous/nodes"
)

// Bounds of what waits for an Actor.
const (
	maxPending = nodes.MaxNodes // machines
	actBudget  = time.Minute    // of one call
	firstPause = time.Second    // after a call that has failed; it doubles
	lastPause  = 2 * time.Minute
)

// actor has an Actor do the newest act of every machine.
type actor struct {
	do  Actor
	log *slog.Logger

	mu      sync.Mutex
	pending map[string]*pending
	wake    chan struct{} // holds one when there is more to do
}

// pending is the newest act of one machine.
type pending struct {
	act   nodes.Act
	due   time.Time
	pause time.Duration // before the next attempt
}

func newActor(do Actor, log *slog.Logger) *actor {
	return &actor{do: do, log: log, pending: map[string]*pending{}, wake: make(chan struct{}, 1)}
}

// enqueue replaces what was to be done about the machine.
func (a *actor) enqueue(act nodes.Act) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.pending[act.Mark.Node] == nil && len(a.pending) >= maxPending {
		a.log.Error("too many marks wait to be carried out; this one is not", "action", string(act.Do),
			"node", act.Mark.Node)
		return
	}
	a.pending[act.Mark.Node] = &pending{act: act, due: time.Now(), pause: firstPause}
	signal(a.wake)
}

// work carries out acts, one at a time.
func (a *actor) work(ctx context.Context) {
	for ctx.Err() == nil {
		p, wait := a.next()
		if p != nil {
			a.attempt(ctx, p)
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-a.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// next is what is due, or for how long nothing is.
func (a *actor) next() (first *pending, wait time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.pending {
		if first == nil || p.due.Before(first.due) {
			first = p
		}
	}
	if first == nil {
		return nil, time.Hour
	}
	if wait = time.Until(first.due); wait > 0 {
		return nil, wait
	}
	return first, 0
}

// attempt carries out an act, and forgets it if that has succeeded and there is no newer one.
func (a *actor) attempt(ctx context.Context, p *pending) {
	call, cancel := context.WithTimeout(ctx, actBudget)
	defer cancel()
	m := p.act.Mark
	f := a.do.Apply
	if p.act.Do == nodes.Remove {
		f = a.do.Remove
	}
	err := f(call, m)
	if err != nil && ctx.Err() == nil {
		a.log.Warn("a mark cannot be carried out; it is tried again", "action", string(p.act.Do), "node", m.Node,
			"in", p.pause, "err", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.pending[m.Node] != p {
		return // something newer is to be done
	}
	if err == nil {
		delete(a.pending, m.Node)
		return
	}
	p.due = time.Now().Add(p.pause)
	p.pause = min(2*p.pause, lastPause)
}
