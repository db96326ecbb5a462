package nodehealth

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// markTable holds the marks that are there, and counts those of the policy for the breaker.
type markTable struct {
	of    map[string]*record // marked machines, by name
	byRun map[string]int     // marks of the policy, by run
	made  []time.Time        // when marks of the policy were made in the last Window, the oldest first
}

func newMarkTable() markTable { return markTable{of: map[string]*record{}, byRun: map[string]int{}} }

// set marks a machine that has no mark.
func (t *markTable) set(r *record, m Mark) {
	r.mark, r.held = &m, nil
	t.of[r.name] = r
	if m.By == byPolicy {
		t.byRun[m.Run]++
	}
}

// unset removes the mark of a machine that has one.
func (t *markTable) unset(r *record) Mark {
	m := *r.mark
	r.mark = nil
	delete(t.of, r.name)
	if m.By != byPolicy {
		return m
	}
	if t.byRun[m.Run]--; t.byRun[m.Run] == 0 {
		delete(t.byRun, m.Run)
	}
	return m
}

// sorted are the marked machines, by name.
func (t *markTable) sorted() []*record {
	return slices.SortedFunc(maps.Values(t.of), func(a, b *record) int { return strings.Compare(a.name, b.name) })
}

// next is when the first of the marks ends; zero: none does.
func (t *markTable) next() (next time.Time) {
	for _, r := range t.of {
		if u := r.mark.Until; !u.IsZero() && (next.IsZero() || u.Before(next)) {
			next = u
		}
	}
	return next
}

// breaker is why no other machine may be marked for a run now; "": one may. j may be nil; known is the number of all
// machines.
func (t *markTable) breaker(now time.Time, cfg Config, run string, j *job, known int) string {
	if j != nil {
		if most := limit(cfg.JobShare, cfg.JobLeast, len(j.members)); t.byRun[run] >= most {
			return fmt.Sprintf("%d nodes are marked for run %s already, the most of its %d", t.byRun[run], run,
				len(j.members))
		}
	}
	t.forgetMade(now, cfg.Window)
	if most := limit(cfg.ClusterShare, cfg.ClusterLeast, known); len(t.made) >= most {
		return fmt.Sprintf("%d nodes were marked within %s already, the most of %d that are known", len(t.made),
			cfg.Window, known)
	}
	return ""
}

func limit(share float64, least, of int) int { return max(least, int(share*float64(of)+1e-9)) }

// forgetMade forgets marks that were made before the last window.
func (t *markTable) forgetMade(now time.Time, window time.Duration) {
	t.made = slices.DeleteFunc(t.made, func(at time.Time) bool { return now.Sub(at) >= window })
}

// sweep is forgetMade, and bounds times of a clock that was wrong.
func (t *markTable) sweep(now time.Time, window time.Duration) {
	t.forgetMade(now, window)
	for i := range t.made {
		t.made[i] = earlier(t.made[i], now)
	}
}
