// Package straggler finds when the steps of a node became slower. hang/slow finds the ranks that all wait for.
package straggler

import (
	"fmt"
	"slices"
	"time"

	"dlrover-run/hang"
)

// Limits of a Finder.
const (
	paceWindow  = time.Minute // medians of the time of steps are taken of so long,
	paceSteps   = 10          // and of so many steps at least
	paceKeep    = 60          // windows for the normal pace
	paceWindows = 3           // in so many windows steps must be slower, or as before again
	paceSlower  = 1.05
	paceSpread  = 4 // and by so many median deviations
)

// Finder finds when steps became slower. It is for one epoch, and one goroutine.
type Finder struct{ steps trend }

// Finding is that steps have become slower.
type Finding struct {
	Before time.Duration // a step until Since
	Step   time.Duration // a step now
	Since  time.Duration // CLOCK_MONOTONIC of the node
}

// Look takes the pages of a node at one moment. It allocates nothing while nothing changes.
func (s *Finder) Look(now time.Duration, workers []hang.Sample) {
	for i := range workers {
		if p := workers[i].Page; p != nil {
			s.steps.add(now, p.StepTimes)
			break
		}
	}
}

// Found returns since when steps are slower, and whether they are.
func (s *Finder) Found() (Finding, bool) {
	return Finding{s.steps.normal, s.steps.now, s.steps.since}, s.steps.since > 0
}

// Line is the text for people. clock writes a moment of CLOCK_MONOTONIC as time of the day.
func (f Finding) Line(clock func(time.Duration) string) string {
	return fmt.Sprintf("steps of %s until %s, %s since", f.Before.Round(10*time.Millisecond), clock(f.Since),
		f.Step.Round(10*time.Millisecond))
}

// trend watches the medians of step times, window by window.
type trend struct {
	seen   time.Duration // the newest step that was taken
	from   time.Duration // when the window began
	gaps   []time.Duration
	past   []time.Duration // medians that are normal, the newest last
	odd    int             // newest windows that are not as normal is now held to be
	first  time.Duration   // when the first of these began
	now    time.Duration   // the newest median
	normal time.Duration   // of past, before since
	since  time.Duration   // since when steps are slower, 0: they are not
}

// add takes the ends of the newest steps.
func (t *trend) add(now time.Duration, ends []time.Duration) {
	if t.from == 0 {
		t.from = now
	}
	for i, end := range ends {
		if i > 0 && end > t.seen && ends[i-1] < end && len(t.gaps) < 1<<16 {
			t.gaps = append(t.gaps, end-ends[i-1])
		}
	}
	if n := len(ends); n > 0 {
		t.seen = max(t.seen, ends[n-1])
	}
	if now-t.from >= paceWindow && len(t.gaps) >= paceSteps {
		t.window(median(t.gaps))
		t.from, t.gaps = now, t.gaps[:0]
	}
}

// window compares a median with the normal one.
func (t *trend) window(m time.Duration) {
	t.now = m
	if len(t.past) < paceWindows {
		t.past = append(t.past, m)
		return
	}
	normal, limit := t.bounds()
	if (m > limit) == (t.since > 0) {
		t.odd = 0
		if t.since == 0 {
			t.past = append(t.past[max(0, len(t.past)+1-paceKeep):], m)
		}
		return
	}
	if t.odd++; t.odd == 1 {
		t.first = t.from
	}
	if t.odd == paceWindows {
		t.turn(normal)
	}
}

// turn records that steps have become slower, or are again as they were.
func (t *trend) turn(normal time.Duration) {
	t.odd = 0
	if t.since > 0 {
		t.since = 0
		return
	}
	t.since, t.normal = t.first, normal
}

// bounds are the normal median, and the limit of a slow one.
func (t *trend) bounds() (normal, limit time.Duration) {
	normal = median(t.past)
	off := make([]time.Duration, len(t.past))
	for i, m := range t.past {
		off[i] = max(m-normal, normal-m)
	}
	return normal, max(time.Duration(paceSlower*float64(normal)), normal+paceSpread*median(off))
}

func median(ds []time.Duration) time.Duration {
	sorted := slices.Clone(ds)
	slices.Sort(sorted)
	return sorted[len(sorted)/2]
}
