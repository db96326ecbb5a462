package hang

import (
	"slices"
	"time"
)

// Deadlines, counted from the last progress. Ranks that may be at work have the deadline of their phase.
const (
	limitMin   = 10 * time.Second
	limitMax   = 300 * time.Second
	limitFirst = 600 * time.Second // before the first steps

	namedByStore = 25 * time.Second // a rank that has not joined its process group, and does nothing
	phaseMin     = 600 * time.Second
	spinMax      = 300 * time.Second // a loop that may be an endless one
	commMin      = 60 * time.Second
	// Without pages it is unknown whether there was a first step. A young process may prepare something.
	youngAge      = 120 * time.Second
	youngDeadline = 90 * time.Second
	outsideComm   = 300 * time.Second
	outsideTell   = 60 * time.Second
	silentTell    = 60 * time.Second // the rendezvous gives up nodes sooner

	debugMax = 24 * time.Hour // a person may sit in a debugger for so long
)

// firstSteps is how many steps must be done before their times are of use.
const firstSteps = 3

// terms are the times of the report and of the action, counted from the last progress.
type terms struct{ tell, deadline time.Duration }

func both(d time.Duration) terms { return terms{d, d} }

func (t terms) longest(o terms) terms { return terms{max(t.tell, o.tell), max(t.deadline, o.deadline)} }

// limits are the facts about all ranks that the deadlines depend on.
type limits struct {
	p99     time.Duration // of the steps of the slowest rank
	early   bool          // the first steps are not done
	outside bool          // there are no pages
}

// terms returns the deadlines of a rank that others wait for. An idle rank is reported at once. A rank that may be at
// work gets the time limit of its phase. A rank that only spins is reported, but no action follows. Incident decides
// when anything is done.
func (l limits) terms(m *member) terms {
	quick := both(l.base())
	if l.early {
		quick = both(max(quick.deadline, limitFirst))
	} else if l.young(m) && !m.halted() {
		quick = both(max(quick.deadline, youngDeadline))
	}
	long := both(max(quick.deadline, phaseMin, 3*m.longest))
	switch {
	case m.debugged:
		return terms{quick.tell, debugMax}
	case m.class == classStopped || m.class == classEnded:
		return quick
	case m.phase.lasting():
		return long
	case m.wakes():
		return terms{quick.tell, long.deadline}
	case m.class != classBusy:
		return quick
	case m.spin && (m.phase == PhaseUnknown || m.phase == PhaseTrain || m.phase == PhaseEnd):
		return terms{quick.tell, max(quick.deadline, spinMax)}
	}
	return long
}

// base is the earliest time for a verdict: the normal limit, and then a second look.
func (l limits) base() time.Duration { return adaptive(l.p99) + max(10*time.Second, 2*l.p99) }

// adaptive is the time without progress that makes a worker suspicious, if 99 of 100 steps take no longer than p99.
func adaptive(p99 time.Duration) time.Duration { return min(max(4*p99, limitMin), limitMax) }

// urgent are the culprits that need no more time than others: a rank that sleeps is not excused by another one that
// writes a checkpoint.
func (l limits) urgent(culprits members) members {
	soon := slices.DeleteFunc(slices.Clone(culprits), func(m *member) bool { return l.terms(m).tell >= phaseMin })
	if len(soon) == 0 {
		return culprits
	}
	return soon
}

// comm is the least deadline of a collective that does not end.
func (l limits) comm() time.Duration { return max(commMin, 8*l.p99) }

// absentTerms: the store shows a missing rank sooner than the time of first steps.
func absentTerms(culprits members) (t terms) {
	for _, m := range culprits {
		mine := both(namedByStore)
		switch {
		case m.debugged:
			mine.deadline = debugMax
		case m.class == classStopped || m.class == classEnded:
		case m.phase.lasting() || m.class == classBusy && !m.spin:
			mine = both(max(phaseMin, 3*m.longest))
		case m.class == classBusy:
			mine.deadline = spinMax
		case m.wakes():
			mine.deadline = phaseMin
		}
		t = t.longest(mine)
	}
	return t
}

// early reports whether there are pages, and no rank has done the first steps. A job without an optimizer has no
// steps; after the time limit of first steps its state counts as normal.
func (ms members) early() bool {
	return !ms.outside() && !ms.any(func(m *member) bool {
		return m.page != nil && (m.page.Steps >= firstSteps || m.at-m.page.Created >= limitFirst)
	})
}

// young reports whether there are no pages, and the process was started a short time ago.
func (l limits) young(m *member) bool {
	return l.outside && m.at-time.Duration(m.start)*clockTick < youngAge
}
