package api

import (
	"errors"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// Keeper keeps in a store what later daemons have to know of runs. Its methods must be quick, but for Settle.
type Keeper interface {
	// Changed: a run has news, and Forgotten: it is not kept any more. The run is locked; they must not call the Hub.
	Changed(run string)
	Forgotten(run string)
	// Settle waits until the store has what Changed has told of the run, for 50 ms at most.
	Settle(run string)
}

// Restore makes a run that earlier daemons have kept. It replaces none: call it before the Hub is served.
func (h *Hub) Restore(id string, past rendezvous.Kept) error {
	_, err := h.runs.Open(id, func() *run {
		r := h.newRun(id, &past)
		r.used = true
		return r
	})
	return err
}

// Kept is what later daemons have to know of a run, also of a Hub that is closed; false: there is none. The caller must
// not write to what it refers to.
func (h *Hub) Kept(id string) (past rendezvous.Kept, exists bool) {
	r := h.runs.Get(id)
	if r == nil {
		return past, false
	}
	r.Lock()
	defer r.Unlock()
	return r.round.Kept(), true
}

// settle waits for the Keeper, if there is one, before somebody hears of a decision.
func (h *Hub) settle(id string) {
	if h.cfg.Keeper != nil {
		h.cfg.Keeper.Settle(id)
	}
}

// tellsEnd: the directive is of a run that has ended.
func tellsEnd(d *rendezvous.Directive) bool { return d.Kind == job.Done || d.Kind == job.Fail }

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
