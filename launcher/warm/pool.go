package warm

import "slices"

// Mode is where the prepared processes come from.
type Mode string

// The modes.
const (
	Fork    Mode = "fork"
	Standby Mode = "standby"
)

// Bounds on retries.
const (
	maxDeaths = 3 // of parents: further ones than the first that are started
	maxFailed = 3 // children in a row that could not be parked
)

// Recipe is the imports and the environment of a prepared process.
type Recipe struct {
	// Modules: nil stands for the script's imports at its top level.
	Modules []string
	Env     []string
	Set     []string // the script's own additions to that before it imports
}

func (r *Recipe) equal(o *Recipe) bool {
	return (r.Modules == nil) == (o.Modules == nil) && slices.Equal(r.Modules, o.Modules) && slices.Equal(r.Env, o.Env) &&
		slices.Equal(r.Set, o.Set)
}

// Kind of an Action.
type Kind int

// The kinds of actions.
const (
	StartParent Kind = iota // and let it prepare Recipe
	EndParent
	Park    // a child for Slot
	Discard // the child for Slot
)

// Action is something to be done. Generation distinguishes processes of the same place.
type Action struct {
	Kind       Kind
	Slot       int
	Generation int
	Recipe     *Recipe
	Urgent     bool // workers wait for it
}

// Pool decides about preparations. It has no clock, and every event returns the actions to take now. It is for one
// goroutine.
//
// Nothing is begun while workers start: only when the pool is Calm, or for the workers that are to be started next
// (Demand).
type Pool struct {
	mode   Mode
	off    string  // why nothing is prepared any more
	want   *Recipe // nil: not known yet
	calm   bool
	number int // of the newest process
	parent process
	deaths int
	failed int
	slots  []process
}

// process is a parent or a child.
type process struct {
	generation int // 0: there is none
	ready      bool
	stale      bool // its imports are outdated
}

// NewPool is a pool for some local ranks.
func NewPool(m Mode, slots int) *Pool { return &Pool{mode: m, slots: make([]process, slots)} }

// Off returns why nothing is prepared any more; "": something may be.
func (p *Pool) Off() string { return p.off }

// Want sets the required imports, from now on.
func (p *Pool) Want(r Recipe) []Action {
	if p.want != nil && p.want.equal(&r) {
		return nil
	}
	p.want = &r
	p.outdate()
	return p.next()
}

// Wanted is the required imports; nil: unknown.
func (p *Pool) Wanted() *Recipe { return p.want }

// Changed: files of imported modules have changed since.
func (p *Pool) Changed() []Action {
	p.outdate()
	return p.next()
}

func (p *Pool) outdate() {
	p.parent.stale = true
	for i := range p.slots {
		p.slots[i].stale = true
	}
}

// Calm sets whether there is time to prepare.
func (p *Pool) Calm(calm bool) []Action {
	p.calm = calm
	return p.next()
}

// Stop ends everything that is prepared, and keeps why for Off.
func (p *Pool) Stop(why string) []Action {
	if p.off == "" {
		p.off = why
	}
	return p.next()
}

// Prepared: a parent can fork.
func (p *Pool) Prepared(generation int) []Action {
	if generation != 0 && p.parent.generation == generation {
		p.parent.ready = true
	}
	return p.next()
}

// ParentLost: it answers no more, and is about to end.
func (p *Pool) ParentLost(generation int) []Action {
	if p.parent.generation == generation {
		p.parent.ready = false
	}
	return nil
}

// ParentGone: it has ended, for a reason.
func (p *Pool) ParentGone(generation int, why string) []Action {
	if generation == 0 || p.parent.generation != generation {
		return nil
	}
	p.parent = process{}
	if p.deaths++; p.deaths > maxDeaths && p.off == "" {
		p.off = why
	}
	return p.next()
}

// Parked: the child is ready.
func (p *Pool) Parked(slot, generation int) []Action {
	if c := &p.slots[slot]; generation != 0 && c.generation == generation {
		c.ready, p.failed = true, 0
	}
	return p.next()
}

// ChildGone: it has ended, before it was taken; why not "" if it is to blame that it could not be parked.
func (p *Pool) ChildGone(slot, generation int, why string) []Action {
	c := &p.slots[slot]
	if generation == 0 || c.generation != generation {
		return nil
	}
	if !c.ready && why != "" {
		p.failed++
	}
	*c = process{}
	if p.failed > maxFailed && p.off == "" {
		p.off = why
	}
	return p.next()
}

// Demand: workers start now. Children that the parent can fork for them are forked at once.
func (p *Pool) Demand() (do []Action) {
	p.calm = false
	do = p.next()
	if p.off != "" || p.mode != Fork || !p.parent.ready || p.parent.stale {
		return do
	}
	for i := range p.slots {
		if p.slots[i].generation == 0 {
			a := p.park(i)
			a.Urgent = true
			do = append(do, a)
		}
	}
	return do
}

// Usable is the generation of the child that may become the worker of a slot; ready, or soon. 0: there is none.
func (p *Pool) Usable(slot int) (generation int, ready bool) {
	c := p.slots[slot]
	if c.stale || p.off != "" {
		return 0, false
	}
	return c.generation, c.ready
}

// Take: the child of a slot becomes its worker.
func (p *Pool) Take(slot int) { p.slots[slot] = process{} }

// next returns the actions to take now.
func (p *Pool) next() (do []Action) {
	do = p.clear()
	if p.off != "" || p.want == nil || !p.calm {
		return do
	}
	if p.mode == Fork && p.parent.generation == 0 {
		p.number++
		p.parent = process{generation: p.number}
		return append(do, Action{Kind: StartParent, Generation: p.number, Recipe: p.want})
	}
	if p.mode == Fork && !p.parent.ready || slices.ContainsFunc(p.slots, process.coming) {
		return do // one after the other: none is urgent
	}
	for i := range p.slots {
		if p.slots[i].generation == 0 {
			return append(do, p.park(i))
		}
	}
	return do
}

func (c process) coming() bool { return c.generation != 0 && !c.ready }

// clear ends the processes that are of no use any more.
func (p *Pool) clear() (do []Action) {
	for i := range p.slots {
		if c := &p.slots[i]; c.generation != 0 && (c.stale || p.off != "") {
			do = append(do, Action{Kind: Discard, Slot: i, Generation: c.generation})
			*c = process{}
		}
		p.slots[i].stale = false
	}
	if c := &p.parent; c.generation != 0 && (c.stale || p.off != "") {
		do = append(do, Action{Kind: EndParent, Generation: c.generation})
		*c = process{}
	}
	p.parent.stale = false
	return do
}

func (p *Pool) park(slot int) Action {
	p.number++
	p.slots[slot] = process{generation: p.number}
	return Action{Kind: Park, Slot: slot, Generation: p.number, Recipe: p.want}
}
