package api

import (
	"errors"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// Keeper keeps in a store the state of runs that later daemons need. Its methods must be quick, but for Settle.
type Keeper interface {
	// Changed: a run has news, and Forgotten: it is not kept any more. The run is locked; they must not call the Hub.
	Changed(run string)
	Forgotten(run string)
	// Settle waits until the store has all changes of the run so far, for 50 ms at most; false: another daemon leads.
	Settle(run string) (leads bool)
}

// KeptRun is the state of a run that later daemons need.
type KeptRun struct {
	Round rendezvous.Kept
	Line  KeptLine
}

// KeptLine is a timeline, the oldest first.
type KeptLine struct {
	// Base and Lost are numbers of events: all are larger than Base, and those up to Lost are not here any more.
	Base, Lost uint64
	Events     []Event
	Proofs     []Proof
}

// Restore makes a run that earlier daemons have kept. It replaces none: call it before the Hub is served.
func (h *Hub) Restore(id string, past KeptRun) error {
	_, err := h.runs.Open(id, func() *run {
		r := h.newRun(id, &past.Round)
		r.used = true
		r.line.recall(past.Line)
		return r
	})
	return err
}

// Kept is the state of a run that later daemons need, also of a Hub that is closed; false: there is none. Of its
// timeline it has the events that follow the event after, and the evidence with the number proof. The caller must not
// write to data that it refers to.
func (h *Hub) Kept(id string, after, proof uint64) (past KeptRun, exists bool) {
	r := h.runs.Get(id)
	if r == nil {
		return past, false
	}
	r.Lock()
	defer r.Unlock()
	return KeptRun{r.round.Kept(), r.line.after(after, proof)}, true
}

// after returns the events after one, and the evidence with a number.
func (t *timeline) after(event, proof uint64) KeptLine {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	out := KeptLine{Base: t.base, Lost: t.lost, Events: t.events.from(t.first(event))}
	for i := range t.ended.count {
		if p := *t.ended.at(i); p.N > proof {
			out.Proofs = append(out.Proofs, p)
		}
	}
	return out
}

// recall begins with the timeline of earlier daemons.
func (t *timeline) recall(past KeptLine) {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	if past.Base > 0 {
		t.base, t.lost = past.Base, max(past.Lost, past.Base)
	}
	for _, e := range past.Events {
		if old, full := t.events.push(e); full {
			t.dropped(old)
		}
		t.seq = max(t.seq, e.Seq) // also if the clock was set back
		t.grow(e.Event, e.Node, e.size())
	}
	for _, p := range past.Proofs {
		if old, full := t.ended.push(p); full {
			t.book("", -old.size())
		}
		t.proofs = p.N
		t.grow("", "", p.size())
	}
}

// settle waits for the Keeper, if there is one, before somebody hears of a decision. A deposed daemon answers nothing.
func (c *HubConfig) settle(id string) error {
	if c.Keeper != nil && !c.Keeper.Settle(id) {
		return ErrClosed
	}
	return nil
}

// decides: the directive is of a world that starts, or of a run that has ended. What led to that has been told before.
func decides(d *rendezvous.Directive) bool {
	return d.Kind == job.Run || d.Kind == job.Done || d.Kind == job.Fail
}

// departs: after the report, the workers of a world are stopped.
func departs(ev rendezvous.Event) bool {
	switch ev.(type) {
	case rendezvous.Failing, rendezvous.Leaving:
		return true
	}
	return false
}

// changedLocked tells the Keeper, if there is one, that something may have been decided.
func (r *run) changedLocked() {
	if r.cfg.Keeper != nil {
		r.cfg.Keeper.Changed(r.id)
	}
}

// forgottenLocked tells it that the run is dropped, unless the Hub is closed: the next daemon goes on with the run.
func (r *run) forgottenLocked() {
	if r.cfg.Keeper != nil && !errors.Is(r.Err(), ErrClosed) {
		r.cfg.Keeper.Forgotten(r.id)
	}
}
