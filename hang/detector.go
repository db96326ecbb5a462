package hang

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	"dlrover-run/internal/stable"
)

// DetectorConfig is the configuration of a Detector.
type DetectorConfig struct {
	// Limit replaces the adaptive limit for a worker without progress (XPU_TIMER_HANG_TIMEOUT); 0: adaptive.
	Limit time.Duration
	// Outside: no worker has a page, and looks are 5 s apart instead of one.
	Outside bool
}

// How far apart looks are. A look that is late by more than the period shows that the observer itself did not run.
const (
	lookPeriod    = time.Second
	outsidePeriod = 5 * time.Second
)

// Limits of the known pace of a worker.
const (
	paces      = 200              // the newest of its steps, or of its rests
	seqPaces   = 20               // without steps, so many looks at which collectives had gone on
	seqAge     = 60 * time.Second // and so old must the page be
	pagelessIn = 60 * time.Second // a worker without a page, although there is a shim, may rest
	firstRest  = 60 * time.Second // and one before its first steps
)

// A Detector finds the workers of one node that make no progress. It is for one epoch, and one goroutine.
type Detector struct {
	cfg     DetectorConfig
	last    time.Duration // the newest look
	looks   uint64
	paused  time.Duration
	workers map[int]*watched // by rank
}

// watched is a worker over time.
type watched struct {
	prev    Sample // Page is nil
	page    Page   // the last one; only the fields for advanced
	paged   bool
	look    uint64        // the newest in which it was there
	moved   time.Duration // the last progress
	active  time.Duration // when it last used a CPU or did I/O, before the first steps
	starved time.Duration // for how long the observer has not run since moved
	steps   pace          // between steps
	rests   pace          // of the main thread; with pages times between changes
	stepped time.Duration // the newest step that is in steps
	busy    busyWork
}

// NewDetector returns a Detector that has seen nothing.
func NewDetector(cfg DetectorConfig) *Detector {
	return &Detector{cfg: cfg, workers: map[int]*watched{}}
}

// Look takes a look at all workers of the node, and at the keys that are waited for in a store that is served here.
// It returns all present suspicions, by rank; the caller compares them with those before. A store wait that names a
// rank suspects this rank, wherever it runs. now is CLOCK_MONOTONIC, and must not go back.
func (d *Detector) Look(now time.Duration, workers []Sample, store []StoreWait) (found []Suspicion) {
	late := d.lateness(now)
	d.looks++
	for i := range workers {
		w := d.meet(now, &workers[i])
		if w.trained() && w.hasMoved(&workers[i]) {
			d.paused = max(d.paused, now-w.moved-w.starved-late)
		}
		w.see(now, &workers[i], late, d.period())
		if s, ok := d.suspect(now, w); ok {
			found = append(found, s)
		}
	}
	d.forget()
	found = d.suspectMissing(found, workers, store)
	stable.Sort(found, func(a, b Suspicion) int { return cmp.Compare(a.Rank, b.Rank) })
	return found
}

// lateness is for how long the observer has not run although it was to.
func (d *Detector) lateness(now time.Duration) time.Duration {
	late := time.Duration(0)
	if d.looks > 0 {
		late = max(now-d.last-2*d.period(), 0)
	}
	d.last = now
	return late
}

func (d *Detector) period() time.Duration {
	if d.cfg.Outside {
		return outsidePeriod
	}
	return lookPeriod
}

// meet finds a worker, or begins with it: its past is unknown.
func (d *Detector) meet(now time.Duration, s *Sample) *watched {
	w := d.workers[s.Rank]
	if w == nil || w.prev.PID != s.PID || w.prev.Start != s.Start {
		w = &watched{prev: *s, moved: now, active: now}
		w.prev.Page = nil
		d.workers[s.Rank] = w
	}
	w.look = d.looks
	return w
}

// forget those that are not there anymore.
func (d *Detector) forget() {
	for rank, w := range d.workers {
		if w.look != d.looks {
			delete(d.workers, rank)
		}
	}
}

// see notes the changes of a worker since the look before.
func (w *watched) see(now time.Duration, s *Sample, late, period time.Duration) {
	if useBetween(w.prev, *s).busy() || s.Proc.State == 'R' {
		w.active = now
	}
	w.busy.see(w.prev, *s, w.works(s))
	moved := w.hasMoved(s)
	if moved {
		w.rests.add(max(now-w.moved-period, 0))
		w.moved, w.starved = now, 0
	} else {
		w.starved += late
	}
	w.prev = *s
	w.prev.Page = nil
	if s.Page != nil {
		w.remember(s.Page)
	}
}

// hasMoved reports whether it has stepped, entered a collective or another phase; without a page, that its main
// thread, or anything of it, was not at rest.
func (w *watched) hasMoved(s *Sample) bool {
	switch {
	case s.Page == nil:
		return !rested(w.prev, *s) || useBetween(w.prev, *s).busy()
	case !w.paged:
		return true
	}
	return advanced(&w.page, s.Page) || w.page.PhaseSince != s.Page.PhaseSince
}

// works reports whether it is at its own work, which ends the observations of its wait. Without a page a worker that
// wakes up may be waiting all the same.
func (w *watched) works(s *Sample) bool {
	if s.Page == nil {
		return useBetween(w.prev, *s).busy()
	}
	return w.hasMoved(s)
}

// Paused is the longest time without progress after which a worker of the node has resumed.
func (d *Detector) Paused() time.Duration { return d.paused }

// trained reports whether the last progress was not one of its first, before which preparations may take any time.
func (w *watched) trained() bool {
	if w.paged {
		return w.page.Steps >= firstSteps || w.page.Steps == 0 && w.byPages(w.moved)
	}
	return w.moved-time.Duration(w.prev.Start)*clockTick >= youngAge
}

// byPages reports whether collectives on the pages show its pace, as they do without an optimizer.
func (w *watched) byPages(now time.Duration) bool {
	return w.rests.n >= seqPaces && now-w.page.Created >= seqAge
}

// Work is the observed work of a worker since its last progress.
func (d *Detector) Work(rank int) Work {
	if w := d.workers[rank]; w != nil {
		return w.busy.work()
	}
	return workNone
}

// remember keeps the fields for the comparison with the next page, and how long the new steps took.
func (w *watched) remember(p *Page) {
	groups := append(w.page.Groups[:0], p.Groups...)
	w.page = Page{
		PID: p.PID, Start: p.Start, Created: p.Created, Steps: p.Steps, PhaseSince: p.PhaseSince, Groups: groups,
	}
	w.paged = true
	for i, t := range p.StepTimes {
		if t > w.stepped && i > 0 {
			w.steps.add(t - p.StepTimes[i-1])
		}
	}
	if n := len(p.StepTimes); n > 0 {
		w.stepped = max(w.stepped, p.StepTimes[n-1])
	}
}

// suspect reports whether a worker has made no progress for longer than is normal for it. The time in which the
// observer did not run does not count.
func (d *Detector) suspect(now time.Duration, w *watched) (s Suspicion, suspected bool) {
	age := now - w.moved
	if age-w.starved < min(limitMin, cmp.Or(d.cfg.Limit, limitMin)) || w.prev.Proc.State == 0 {
		return Suspicion{}, false
	}
	limit, first := d.limit(now, w)
	quiet := age
	if first {
		quiet = now - max(w.moved, w.active)
	}
	s = Suspicion{Rank: w.prev.Rank, Age: age, Limit: limit, Why: w.why(), Starved: w.starved}
	return s, quiet-w.starved >= limit
}

// limit of a worker, and whether it is that of first steps, in which a busy worker is not suspected.
func (d *Detector) limit(now time.Duration, w *watched) (limit time.Duration, first bool) {
	switch {
	case d.cfg.Limit > 0:
		return d.cfg.Limit, false
	case !w.paged && d.cfg.Outside:
		return adaptive(w.rests.p99()), false
	case !w.paged:
		return max(adaptive(w.rests.p99()), pagelessIn), false
	case w.page.Steps >= firstSteps:
		return adaptive(w.steps.p99()), false
	case w.page.Steps == 0 && w.byPages(now):
		return adaptive(w.rests.p99()), false
	}
	return firstRest, true
}

func (w *watched) why() string {
	switch {
	case w.prev.Proc.State == 'T' || w.prev.Proc.State == 't':
		return "it is stopped"
	case w.paged:
		return "no step and no collective"
	}
	return "its main thread is at rest"
}

// suspectMissing adds the ranks with missing keys in the store. Without a name the node itself is suspected.
func (d *Detector) suspectMissing(found []Suspicion, workers []Sample, store []StoreWait) []Suspicion {
	for _, k := range store {
		rank, named := rankInKey(k.Key)
		limit := cmp.Or(d.cfg.Limit, storeGrace)
		if k.Age < limit || !named && len(workers) == 0 {
			continue
		}
		if !named {
			rank = workers[0].Rank
		}
		if !slices.ContainsFunc(found, func(s Suspicion) bool { return s.Rank == rank }) {
			why := "a key of the store is waited for: " + clean(k.Key)
			found = append(found, Suspicion{Rank: rank, Age: k.Age, Limit: limit, Why: why})
		}
	}
	return found
}

// pace are the newest of some durations.
type pace struct {
	ring [paces]time.Duration
	n    int // how many there were in all
}

func (p *pace) add(d time.Duration) {
	p.ring[p.n%paces] = d
	p.n++
}

func (p *pace) p99() time.Duration { return quantile99(p.ring[:min(p.n, paces)]) }

// String names the suspects, and the reason.
func (s Suspicion) String() string {
	return ranksText(strconv.Itoa(s.Rank)) + ": " + s.Why + " for " + s.Age.Round(time.Second).String() +
		" (normal is " + s.Limit.Round(time.Second).String() + " at most)"
}
