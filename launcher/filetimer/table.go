package filetimer

import (
	"cmp"
	"fmt"
	"maps"
	"time"

	"dlrover-run/internal/stable"
)

// maxTimers bounds a Table.
const maxTimers = 1 << 16

// Timer is a timer that runs.
type Timer struct {
	Request
	Deadline time.Time
}

// Table holds the timers of one node. The zero value is empty.
type Table struct {
	timers map[name]Timer
}

type name struct {
	pid   int
	scope string
}

// Set starts a timer, or starts it again.
func (t *Table) Set(r Request, now time.Time) (Timer, error) {
	n := name{r.PID, r.Scope}
	if _, again := t.timers[n]; !again && len(t.timers) >= maxTimers {
		return Timer{}, fmt.Errorf("more than %d timers run", maxTimers)
	}
	if t.timers == nil {
		t.timers = map[name]Timer{}
	}
	timer := Timer{r, now.Add(r.After)}
	t.timers[n] = timer
	return timer, nil
}

// Release ends a timer, if it runs.
func (t *Table) Release(pid int, scope string) { delete(t.timers, name{pid, scope}) }

// Drop ends all timers of a process.
func (t *Table) Drop(pid int) {
	for n := range t.timers {
		if n.pid == pid {
			delete(t.timers, n)
		}
	}
}

// Runs reports whether a process has a timer.
func (t *Table) Runs(pid int) bool {
	for n := range t.timers {
		if n.pid == pid {
			return true
		}
	}
	return false
}

// Next is the earliest deadline; false if no timer runs.
func (t *Table) Next() (next time.Time, ok bool) {
	for _, timer := range t.timers {
		if !ok || timer.Deadline.Before(next) {
			next, ok = timer.Deadline, true
		}
	}
	return next, ok
}

// Expire returns for each process with an expired timer the one that counts: as in torchrun the earliest that asks for
// a signal, or the earliest at all. It ends all timers of a process that gets a signal, else only expired ones.
func (t *Table) Expire(now time.Time) (expired []Timer) {
	first := map[int]Timer{}
	for _, timer := range t.timers {
		if timer.Deadline.After(now) {
			continue
		}
		if old, found := first[timer.PID]; !found || precedes(timer, old) < 0 {
			first[timer.PID] = timer
		}
	}
	for pid, timer := range first {
		maps.DeleteFunc(t.timers, func(n name, o Timer) bool {
			return n.pid == pid && (timer.Signal > 0 || !o.Deadline.After(now))
		})
		expired = append(expired, timer)
	}
	stable.Sort(expired,
		func(a, b Timer) int { return cmp.Or(a.Deadline.Compare(b.Deadline), cmp.Compare(a.PID, b.PID)) })
	return expired
}

func precedes(a, b Timer) int {
	if (a.Signal > 0) != (b.Signal > 0) {
		return cmp.Compare(b.Signal, a.Signal)
	}
	return cmp.Or(a.Deadline.Compare(b.Deadline), cmp.Compare(a.Scope, b.Scope))
}
