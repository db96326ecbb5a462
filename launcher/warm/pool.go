package warm

import "slices"

// Mode is where the prepared processes come from.
type Mode string

// The modes.
const (
	modeFork    Mode = "fork"
	modeStandby Mode = "standby"
)

// Bounds on retries.
const (
	maxDeaths = 3 // of parents: further ones than the first that are started
	maxFailed = 3 // children in a row that could not be parked
)

// recipe is the imports and the environment of a prepared process.
type recipe struct {
	// Modules: nil stands for the script's imports at its top level.
	Modules []string
	Env     []string
	Set     []string // the script's own additions to that before it imports
}

func (r *recipe) equal(o *recipe) bool {
	return (r.Modules == nil) == (o.Modules == nil) && slices.Equal(r.Modules, o.Modules) && slices.Equal(r.Env, o.Env) &&
		slices.Equal(r.Set, o.Set)
}

// actionKind of an action.
type actionKind int

// The kinds of actions.
const (
	startParent actionKind = iota // and let it prepare the recipe
	endParent
	park    // a child for Slot
	discard // the child for Slot
)

// action is something to be done. Generation distinguishes processes of the same place.
type action struct {
	Kind       actionKind
	Slot       int
	Generation int
	Recipe     *recipe
	Urgent     bool // workers wait for it
}

// pool decides about preparations. It has no clock, and every event returns the actions to take now. It is for one
// goroutine.
//
// Nothing is begun while workers start: only when the pool is Calm, or for the workers that are to be started next
// (Demand).
type pool struct {
	mode   Mode
	off    string  // why nothing is prepared any more
	want   *recipe // nil: not known yet
	calm   bool
	number int     // of the newest process
	parent process // that forks
	heir   process // takes its place once it has imported what is wanted by now
	grown  bool    // no heir is needed
	early  bool    // children are forked before it is known whether the parent is fit
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

// newPool is a pool for some local ranks.
func newPool(m Mode, slots int) *pool { return &pool{mode: m, slots: make([]process, slots)} }

// Off returns why nothing is prepared any more; "": something may be.
func (p *pool) Off() string { return p.off }

// Want sets the required imports, from now on.
func (p *pool) Want(r recipe) []action {
	if p.want != nil && p.want.equal(&r) {
		return nil
	}
	p.want = &r
	if p.parent.ready && !p.parent.stale {
		p.grown, p.heir.stale = false, true // meanwhile there are forks of what there is
	} else {
		p.outdate()
	}
	return p.next()
}

// Settle: what is prepared stays as it is, for no other parent can be forked; false: there is nothing.
func (p *pool) Settle() (do []action, ok bool) {
	if p.off != "" || !p.parent.ready || p.parent.stale {
		return nil, false
	}
	p.grown, p.heir.stale = true, true
	return p.next(), true
}

// Forget ends everything that is prepared, until something is wanted.
func (p *pool) Forget() []action {
	p.want = nil
	p.outdate()
	return p.next()
}

// Unfit: the process must not be forked, and is replaced by one with other imports.
func (p *pool) Unfit(generation int) []action {
	switch generation {
	case p.parent.generation:
		p.parent.stale = true
		if p.early {
			p.outdate()
		}
	case p.heir.generation:
		p.heir.stale = true
	default:
		p.outdate()
	}
	return p.next()
}

// Wanted is the required imports; nil: unknown.
func (p *pool) Wanted() *recipe { return p.want }

// Changed: files of imported modules have changed since.
func (p *pool) Changed() []action {
	p.outdate()
	return p.next()
}

func (p *pool) outdate() {
	p.early = false
	p.parent.stale, p.heir.stale = true, true
	for i := range p.slots {
		p.slots[i].stale = true
	}
}

// Calm sets whether there is time to prepare.
func (p *pool) Calm(calm bool) []action {
	p.calm = calm
	return p.next()
}

// Stop ends everything that is prepared, and keeps why for Off.
func (p *pool) Stop(why string) []action {
	if p.off == "" {
		p.off = why
	}
	return p.next()
}

// Imported: the parent is being tried, and workers wait for the result. It forks for them meanwhile.
func (p *pool) Imported(generation int) []action {
	if p.off != "" || generation != p.parent.generation {
		return nil
	}
	p.calm, p.early = false, true
	return p.forkAll()
}

// Prepared: a parent can fork.
func (p *pool) Prepared(generation int) []action {
	if q := p.parentOf(generation); q != nil {
		q.ready = true
		p.early = p.early && q != &p.parent
	}
	return p.next()
}

// Parent is the generation of the parent that forks; 0: there is none.
func (p *pool) Parent() int { return p.parent.generation }

// parentOf is the parent of that generation; nil: it is not wanted any more.
func (p *pool) parentOf(generation int) *process {
	switch {
	case generation == 0:
		return nil
	case p.parent.generation == generation:
		return &p.parent
	case p.heir.generation == generation:
		return &p.heir
	}
	return nil
}

// ParentLost: it does not answer any more, and is about to end.
func (p *pool) ParentLost(generation int) []action {
	if q := p.parentOf(generation); q != nil {
		q.ready = false
	}
	return nil
}

// ParentGone: it has ended, for a reason.
func (p *pool) ParentGone(generation int, why string) []action {
	q := p.parentOf(generation)
	if q == nil {
		return nil
	}
	if p.early && q == &p.parent {
		p.outdate()
	}
	if *q = (process{}); q == &p.parent { // its forks live on, until the heir has others
		p.parent, p.heir, p.grown = p.heir, process{}, true
	}
	if p.deaths++; p.deaths > maxDeaths && p.off == "" {
		p.off = why
	}
	return p.next()
}

// Parked: the child is ready.
func (p *pool) Parked(slot, generation int) []action {
	if c := &p.slots[slot]; generation != 0 && c.generation == generation {
		c.ready, p.failed = true, 0
	}
	return p.next()
}

// ChildGone: it has ended, before it was taken; why not "" if it is to blame that it could not be parked.
func (p *pool) ChildGone(slot, generation int, why string) []action {
	c := &p.slots[slot]
	if generation == 0 || c.generation != generation {
		return nil
	}
	if !c.ready && why != "" && !p.early {
		p.failed++
	}
	*c = process{}
	if p.failed > maxFailed && p.off == "" {
		p.off = why
	}
	return p.next()
}

// Demand: workers start now. Children that the parent can fork for them are forked at once.
func (p *pool) Demand() (do []action) {
	p.calm = false
	do = p.next()
	if p.off != "" || p.mode != modeFork || !p.parent.ready || p.parent.stale {
		return do
	}
	return append(do, p.forkAll()...)
}

// forkAll forks what workers lack that wait for it.
func (p *pool) forkAll() (do []action) {
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
func (p *pool) Usable(slot int) (generation int, ready bool) {
	c := p.slots[slot]
	if c.stale || p.off != "" || p.early {
		return 0, false
	}
	return c.generation, c.ready
}

// Take: the child of a slot becomes its worker.
func (p *pool) Take(slot int) { p.slots[slot] = process{} }

// next returns the actions to take now.
func (p *pool) next() (do []action) {
	do = p.clear()
	if p.off != "" || p.want == nil || !p.calm {
		return do
	}
	if p.mode == modeFork && p.parent.generation == 0 {
		p.grown = true
		return append(do, p.start(&p.parent))
	}
	if p.mode == modeFork && !p.grown && p.heir.generation == 0 {
		do = append(do, p.start(&p.heir))
	}
	if p.mode == modeFork && !p.parent.ready || slices.ContainsFunc(p.slots, process.coming) {
		return do // one after the other: none is urgent
	}
	for i := range p.slots {
		if p.slots[i].generation == 0 {
			return append(do, p.park(i))
		}
	}
	return do
}

func (p *pool) start(place *process) action {
	p.number++
	*place = process{generation: p.number}
	return action{Kind: startParent, Generation: p.number, Recipe: p.want}
}

func (c process) coming() bool { return c.generation != 0 && !c.ready }

// clear ends the processes that are of no use any more.
func (p *pool) clear() (do []action) {
	if p.heir.ready && !p.heir.stale && p.calm && p.off == "" { // not while workers start
		do = append(do, action{Kind: endParent, Generation: p.parent.generation})
		heir := p.heir
		p.outdate()
		p.parent, p.heir, p.grown = heir, process{}, true
	}
	for i := range p.slots {
		if c := &p.slots[i]; c.generation != 0 && (c.stale || p.off != "") {
			do = append(do, action{Kind: discard, Slot: i, Generation: c.generation})
			*c = process{}
		}
		p.slots[i].stale = false
	}
	for _, c := range []*process{&p.parent, &p.heir} {
		if c.generation != 0 && (c.stale || p.off != "") {
			do = append(do, action{Kind: endParent, Generation: c.generation})
			*c = process{}
		}
		c.stale = false
	}
	return do
}

func (p *pool) park(slot int) action {
	p.number++
	p.slots[slot] = process{generation: p.number}
	return action{Kind: park, Slot: slot, Generation: p.number, Recipe: p.want}
}
