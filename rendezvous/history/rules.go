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
	worlds         map[job.EpochID]*world
	order          []job.EpochID     // of worlds, the oldest first
	heard          map[string]*heard // by launcher
}

// maxWorlds is how many worlds are remembered: a history may be long.
const maxWorlds = 64

// world is an epoch, as launchers were told of it.
type world struct {
	leads          string // the launcher that was told to lead
	nodes, workers int
	seats          map[int]string // launchers by rank
}

// heard is what a launcher has heard.
type heard struct {
	restarts int
	sent     job.EpochID // of the newest Run that has reached its host
	last     Told        // the newest Run with workers
	over     job.Kind    // the run has ended so
}

// NewRules returns the rules of a run with worlds of so many nodes.
func NewRules(least, most, unit int) *Rules {
	return &Rules{min: least, max: most, unit: max(unit, 1), worlds: map[job.EpochID]*world{},
		heard: map[string]*heard{}}
}

func (r *Rules) of(id string) *heard {
	if r.heard[id] == nil {
		r.heard[id] = &heard{}
	}
	return r.heard[id]
}

// Over says that a launcher knows of a run that has ended: it hears the same, whatever it asks.
func (r *Rules) Over(id string, kind job.Kind) { r.of(id).over = kind }

// Sent says that a Run has reached the host of a launcher, which may be busy. Another daemon takes its workers for
// running, and confirms them, also in a pause.
func (r *Rules) Sent(id string, e job.EpochID) { r.of(id).sent = e }

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
	if t.Kind == job.Run && !t.confirms() {
		h.last = t
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
	if t.confirms() && t.EpochID == h.sent {
		return nil
	}
	return r.fresh(h, t)
}

// confirms: no workers are started.
func (t Told) confirms() bool { return t.Kind == job.Run && (t.Paused != nil || t.Barred != nil) }

// fresh holds what is true of a new world.
func (r *Rules) fresh(h *heard, t Told) error {
	switch leads := &r.world(t).leads; {
	case t.Paused != nil:
		return fmt.Errorf("%s gets workers in a pause", t.ID)
	case t.Barred != nil:
		return fmt.Errorf("%s gets workers, and is barred", t.ID)
	case t.Restarts < h.restarts:
		return fmt.Errorf("%s: spent restarts come back: %d after %d", t.ID, t.Restarts, h.restarts)
	case t.Kind == job.Lead && *leads != "" && *leads != t.ID:
		return fmt.Errorf("%s and %s lead in %v", *leads, t.ID, t.EpochID)
	case t.Kind == job.Lead:
		*leads = t.ID
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
	w := r.world(t)
	if w.nodes != size || w.workers != t.Place.WorldSize {
		return fmt.Errorf("two worlds of %v: %d nodes, %d workers and %d, %d", t.EpochID, w.nodes, w.workers, size,
			t.Place.WorldSize)
	}
	if w.seats[rank] == "" {
		w.seats[rank] = t.ID
	}
	if w.seats[rank] != t.ID {
		return fmt.Errorf("%s and %s have rank %d of %v", w.seats[rank], t.ID, rank, t.EpochID)
	}
	return nil
}

// world is that of which a launcher is told.
func (r *Rules) world(t Told) *world {
	if w := r.worlds[t.EpochID]; w != nil {
		return w
	}
	if r.order = append(r.order, t.EpochID); len(r.order) > maxWorlds {
		delete(r.worlds, r.order[0])
		r.order = r.order[1:]
	}
	w := &world{nodes: t.Place.GroupWorldSize, workers: t.Place.WorldSize, seats: map[int]string{}}
	r.worlds[t.EpochID] = w
	return w
}
