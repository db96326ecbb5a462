package marks

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	"dlrover-run/internal/app/nodehealth"
)

// Actor carries out marks somewhere. Its methods must be idempotent; their ctx ends after a minute, and calls never
// overlap. An error that is ErrFinal is not retried, every other one is.
type Actor interface {
	// Apply marks m.Node, or brings its mark up to date.
	Apply(ctx context.Context, m nodehealth.Mark) error
	// Remove removes the mark m, and nothing of others.
	Remove(ctx context.Context, m nodehealth.Mark) error
}

// Sweeper is an Actor that can remove the marks of earlier daemons: all but those of known machines. It is called at
// the start, and then every hour.
type Sweeper interface {
	Sweep(ctx context.Context, known func(machine string) bool) error
}

// avoider is an Actor that publishes the machines that replacement pods should avoid. It is called at the start, and
// when they change.
type avoider interface {
	Avoid(ctx context.Context, machines []string) error
}

// ErrFinal is an error of an Actor that trying again does not help.
var ErrFinal = errors.New("it is not tried again")

// Bounds of the queue of an Actor.
const (
	maxPending = nodehealth.MaxNodes // machines
	actBudget  = time.Minute         // of one call
	firstPause = time.Second         // after a call that has failed; it doubles
	lastPause  = 2 * time.Minute
	sweepEvery = time.Hour // also the last pause of a sweep
)

// Tasks about no machine in particular. They cannot be names of machines.
const (
	sweepTask = "\nmarks that earlier daemons have left"
	avoidTask = "\nthe list of machines to avoid"
)

// ActionRecord is how far an Actor is with a machine.
type ActionRecord struct {
	Do    nodehealth.Do `json:"do"`
	State State         `json:"state"`
	Why   string        `json:"why,omitempty"` // the newest error
	said  string        // the newest error that was logged
}

// State is that of an ActionRecord.
type State string

// The states of an ActionRecord.
const (
	Pending State = "pending"
	Applied State = "applied" // the mark is there
	GivenUp State = "given-up"
	DryRun  State = "dry-run" // it would be done
)

// actor has an Actor do the newest act of every machine.
type actor struct {
	do  Actor
	mgr *Manager
	log *slog.Logger

	mu       sync.Mutex
	pending  map[string]*pending
	records  map[string]ActionRecord // by machine
	failures int
	wake     chan struct{} // holds one when there is more to do
}

// pending is the newest task of one machine, or one of the others.
type pending struct {
	key   string
	what  nodehealth.Do // "" of a task about no machine
	run   func(context.Context) error
	due   time.Time
	pause time.Duration // before the next attempt
	said  string        // the newest error that was logged
	why   string        // the newest error
}

func newActor(mgr *Manager) *actor {
	return &actor{do: mgr.cfg.Actor, mgr: mgr, log: mgr.cfg.Log, pending: map[string]*pending{},
		records: map[string]ActionRecord{}, wake: make(chan struct{}, 1)}
}

// begin enqueues the tasks of the start: an earlier daemon may have left them undone.
func (a *actor) begin(marks []nodehealth.Mark) {
	for _, m := range marks {
		a.enqueue(nodehealth.Act{Do: nodehealth.Apply, Mark: m})
	}
	if s, ok := a.do.(Sweeper); ok {
		a.put(&pending{key: sweepTask, run: func(ctx context.Context) error { return s.Sweep(ctx, a.known) }})
	}
	a.avoid()
}

// enqueue replaces the machine's pending task.
func (a *actor) enqueue(act nodehealth.Act) {
	m, f := act.Mark, a.do.Apply
	if act.Do == nodehealth.Remove {
		f = a.do.Remove
	}
	a.put(&pending{key: m.Node, what: act.Do, run: func(ctx context.Context) error { return f(ctx, m) }})
}

// avoid has the list of machines to avoid published again.
func (a *actor) avoid() {
	if v, ok := a.do.(avoider); ok {
		a.put(&pending{key: avoidTask, run: func(ctx context.Context) error { return v.Avoid(ctx, a.mgr.Avoid()) }})
	}
}

func (a *actor) put(p *pending) {
	a.mu.Lock()
	defer a.mu.Unlock()
	old := a.pending[p.key]
	if old == nil && len(a.pending) >= maxPending {
		a.log.Error("too many marks wait to be carried out; this one is not", "action", string(p.what), "node", p.key)
		return
	}
	if old != nil && old.what == p.what {
		p.said, p.why = old.said, old.why
	} else if d := a.records[p.key]; d.Do == p.what {
		p.said = d.said
	}
	p.due, p.pause = time.Now(), firstPause
	a.pending[p.key] = p
	signal(a.wake)
}

// known reports whether the machine has a pending task, or its mark counts.
func (a *actor) known(machine string) bool {
	a.mu.Lock()
	_, busy := a.pending[machine]
	a.mu.Unlock()
	return busy || a.mgr.marked(machine)
}

// work carries out tasks, one at a time.
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

// next returns the task that is due, or the time until one is.
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

// attempt carries out a task, and forgets it if that has succeeded and there is no newer one.
func (a *actor) attempt(ctx context.Context, p *pending) {
	call, cancel := context.WithTimeout(ctx, actBudget)
	defer cancel()
	err := p.run(call)
	if ctx.Err() != nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.told(p, err)
	next := a.pending[p.key]
	newer := next != p
	if newer && next != nil && next.what == p.what {
		next.said = p.said
	}
	switch {
	case err == nil:
		a.succeeded(p, newer)
	case newer:
	case errors.Is(err, ErrFinal):
		delete(a.pending, p.key)
		a.records[p.key] = ActionRecord{p.what, GivenUp, nodehealth.Line(err.Error()), p.said}
	default:
		p.why = nodehealth.Line(err.Error())
		p.due = time.Now().Add(p.pause)
		p.pause = min(2*p.pause, p.longest())
	}
}

// longest bounds the pause. A sweep lists the whole cluster, and fails as long as one annotation cannot be read.
func (p *pending) longest() time.Duration {
	if p.key == sweepTask {
		return sweepEvery
	}
	return lastPause
}

// succeeded records a task that was carried out. The lock is held.
func (a *actor) succeeded(p *pending, newer bool) {
	switch p.what {
	case nodehealth.Apply:
		a.records[p.key] = ActionRecord{Do: p.what, State: Applied}
	case nodehealth.Remove:
		delete(a.records, p.key)
	}
	if newer {
		return
	}
	if delete(a.pending, p.key); p.key == sweepTask {
		a.pending[p.key] = &pending{key: p.key, run: p.run, due: time.Now().Add(sweepEvery), pause: firstPause}
	}
}

// told logs the result of a task, once for every change. The lock is held.
func (a *actor) told(p *pending, err error) {
	about := []any{"action", string(p.what), "node", p.key}
	if p.what == "" {
		about = []any{"what", strings.TrimSpace(p.key)}
	}
	if err == nil {
		if p.what != "" || p.said != "" {
			a.log.Info("carried out", about...)
		}
		p.said = ""
		return
	}
	a.failures++
	if text := same(err); text != p.said {
		p.said = text
		a.log.Warn("not carried out", append(about, "err", err, "again", !errors.Is(err, ErrFinal))...)
	}
}

// same is the common part of errors that differ in ports or times only.
func same(err error) string {
	return strings.Map(func(r rune) rune {
		if '0' <= r && r <= '9' {
			return -1
		}
		return r
	}, err.Error())
}

// record is the progress with a machine; nil: there is none.
func (a *actor) record(machine string) *ActionRecord {
	a.mu.Lock()
	defer a.mu.Unlock()
	if p := a.pending[machine]; p != nil {
		return &ActionRecord{Do: p.what, State: Pending, Why: p.why}
	}
	if d, ok := a.records[machine]; ok {
		return &d
	}
	return nil
}

// busy returns the machines with pending tasks, and the other tasks that cannot be carried out now.
func (a *actor) busy() (machines, troubles []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, p := range a.pending {
		if p.what != "" {
			machines = append(machines, key)
		} else if p.why != "" {
			troubles = append(troubles, strings.TrimSpace(key)+": "+p.why)
		}
	}
	return machines, troubles
}

// counts are those of machines with pending tasks, and of failed calls.
func (a *actor) counts() (machines, failures int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.pending {
		if p.what != "" {
			machines++
		}
	}
	return machines, a.failures
}
