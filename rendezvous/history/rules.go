package history

import (
	"fmt"

	"dlrover-run/internal/job"
)

// Told is what a launcher was told.
type Told struct {
	ID   string
	Kind job.Kind
	job.EpochID
	Place                 *job.Place
	Restarts              int
	Cause, Paused, Barred *job.Cause
}

// Rules hold for all that the launchers of a run are told, by all daemons together.
type Rules struct {
	min, max, unit int
	seats          map[string]string      // by epoch and rank: the launcher, and what it was told
	leads          map[job.EpochID]string // the launchers that were told to lead
	heard          map[string]*heard      // by launcher
}

// heard is what a launcher has heard.
type heard struct {
	restarts int
	ran      map[job.EpochID]bool
	last     Told     // the newest Run
	over     job.Kind // the run has ended so
}

// NewRules returns the rules of a run with worlds of so many nodes.
func NewRules(least, most, unit int) *Rules {
	return &Rules{min: least, max: most, unit: max(unit, 1), seats: map[string]string{},
		leads: map[job.EpochID]string{}, heard: map[string]*heard{}}
}

func (r *Rules) of(id string) *heard {
	if r.heard[id] == nil {
		r.heard[id] = &heard{ran: map[job.EpochID]bool{}}
	}
	return r.heard[id]
}

// Over says that a launcher knows of a run that has ended: it hears the same, whatever it asks.
func (r *Rules) Over(id string, kind job.Kind) { r.of(id).over = kind }

// Forgotten says that the next daemon knows nothing: a run that has ended may begin anew.
func (r *Rules) Forgotten() {
	for _, h := range r.heard {
		h.over = ""
	}
}

// Told returns the rule that is broken by what a launcher is told.
func (r *Rules) Told(t Told) error {
	h := r.of(t.ID)
	err := r.broken(h, t)
	if t.Round > 0 {
		h.restarts = t.Restarts
	}
	if t.Kind == job.Run {
		h.last, h.ran[t.EpochID] = t, true
	}
	return err
}

func (r *Rules) broken(h *heard, t Told) error {
	switch t.Kind {
	case job.Stop, job.Bar, job.Fail:
		if t.Cause == nil || t.Cause.Text == "" {
			return fmt.Errorf("%s is not told why: %s", t.ID, t.Kind)
		}
	}
	if h.over != "" && t.Kind != h.over {
		return fmt.Errorf("the run of %s has ended (%s), and it is told %s", t.ID, h.over, t.Kind)
	}
	if t.Kind != job.Run && t.Kind != job.Lead {
		return nil
	}
	if err := r.seat(t); err != nil {
		return err
	}
	if t.Kind == job.Run && t.EpochID == h.last.EpochID {
		if t.Place.GroupRank != h.last.Place.GroupRank {
			return fmt.Errorf("%s has another place", t.ID)
		}
		return nil // confirmed
	}
	return r.fresh(h, t)
}

// fresh holds what is true of a new world.
func (r *Rules) fresh(h *heard, t Told) error {
	switch leads := r.leads[t.EpochID]; {
	case t.Paused != nil:
		return fmt.Errorf("%s gets workers in a pause", t.ID)
	case t.Barred != nil:
		return fmt.Errorf("%s gets workers, and is barred", t.ID)
	case t.Restarts < h.restarts:
		return fmt.Errorf("%s: spent restarts come back: %d after %d", t.ID, t.Restarts, h.restarts)
	case t.Kind == job.Lead && leads != "" && leads != t.ID:
		return fmt.Errorf("%s and %s lead in %v", leads, t.ID, t.EpochID)
	case t.Kind == job.Lead:
		r.leads[t.EpochID] = t.ID
	case h.ran[t.EpochID]:
		return fmt.Errorf("%s runs epoch %v twice", t.ID, t.EpochID)
	case !t.Newer(h.last.EpochID):
		return fmt.Errorf("%s runs %v after %v", t.ID, t.EpochID, h.last.EpochID)
	}
	return nil
}

// seat: a rank of an epoch has one node, and all nodes of it are told of the same world.
func (r *Rules) seat(t Told) error {
	rank, size := t.Place.GroupRank, t.Place.GroupWorldSize
	if size < r.min || size > r.max || size%r.unit != 0 || rank < 0 || rank >= size {
		return fmt.Errorf("%s has rank %d of %d", t.ID, rank, size)
	}
	for key, value := range map[string]string{
		fmt.Sprint(t.EpochID, rank): t.ID,
		fmt.Sprint(t.EpochID):       fmt.Sprint(size, t.Place.WorldSize),
	} {
		if r.seats[key] == "" {
			r.seats[key] = value
		}
		if r.seats[key] != value {
			return fmt.Errorf("two worlds of %s: %s and %s", key, r.seats[key], value)
		}
	}
	return nil
}
