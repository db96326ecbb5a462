package netcheck

import (
	"container/heap"
	"time"
)

// timers are the deadlines of running tests, soonest first. A deadline that has moved leaves its old entry behind; it
// is dropped when its time has come.
type timers []timer

type timer struct {
	at time.Time
	t  *test
}

func (q timers) Len() int           { return len(q) }
func (q timers) Less(i, j int) bool { return q[i].at.Before(q[j].at) }
func (q timers) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *timers) Push(x any)        { *q = append(*q, x.(timer)) }
func (q *timers) Pop() any {
	old := *q
	x := old[len(old)-1]
	old[len(old)-1] = timer{}
	*q = old[:len(old)-1]
	return x
}

func (x timer) stale() bool { return x.t.ended || !x.t.deadline.Equal(x.at) }

// set moves the deadline of t.
func (q *timers) set(t *test, at time.Time) {
	t.deadline = at
	heap.Push(q, timer{at, t})
}

// next is the soonest deadline, or zero.
func (q *timers) next() time.Time {
	for len(*q) > 0 && (*q)[0].stale() {
		heap.Pop(q)
	}
	if len(*q) == 0 {
		return time.Time{}
	}
	return (*q)[0].at
}

// due takes a test whose deadline is not after now, or nil.
func (q *timers) due(now time.Time) *test {
	if at := q.next(); at.IsZero() || at.After(now) {
		return nil
	}
	return heap.Pop(q).(timer).t
}

// sooner is the earlier of two times; zero is never.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// reached reports whether at is a time and has come.
func reached(at, now time.Time) bool { return !at.IsZero() && !at.After(now) }
