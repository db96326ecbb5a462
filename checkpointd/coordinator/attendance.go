package coordinator

import (
	"context"
	"fmt"
	"maps"
	"time"
)

// Attendance. A node of a round attends for as long as a connection is open over which its daemon has spoken. What a
// daemon has announced counts while it attends: a node that dies with all its processes may announce its memory just
// before. Without connections to watch, as behind some proxies, nothing is known and everything counts.

// lostGrace is the time that the daemon of a dead launcher needs to notice the death and to announce its holdings. A
// daemon that is known to be gone has none.
const lostGrace = time.Second

// seat is a node of a round, "term.round".
type seat struct {
	of   string
	node int
}

// attendee is a node that attends, or has.
type attendee struct {
	conns int
	heard time.Time // of the last change
}

// attendEvent is a connection that a daemon now uses for the first time, or one that has ended.
type attendEvent struct {
	seat
	ended bool
}

// lostEvent is a node whose launcher is dead.
type lostEvent struct{ seat }

func (at seat) check() error {
	if at.node < 0 || at.node >= maxShards || len(at.of) > maxKey {
		return fmt.Errorf("%w: node %d of %.80q: need 0 to %d", errBadRequest, at.node, at.of, maxShards-1)
	}
	return nil
}

func (e attendEvent) step(st *state, now time.Time) ([]topic, error) {
	a, known := st.attendees[e.seat]
	switch {
	case !known && len(st.attendees) >= maxShards:
		return nil, fmt.Errorf("%w: more than %d nodes attend", ErrLimit, maxShards)
	case e.ended:
		a.conns--
	default:
		a.conns++
	}
	a.heard = now
	st.attendees[e.seat] = a
	if a.conns > 0 {
		return nil, nil
	}
	st.withdraw(e.seat)
	if _, lost := st.lost[e.seat]; lost {
		return st.giveUp(e.seat, now)
	}
	return nil, nil
}

func (e lostEvent) step(st *state, now time.Time) ([]topic, error) {
	if st.gone(e.seat) {
		return st.giveUp(e.seat, now)
	}
	if len(st.lost) < maxShards {
		st.lost[e.seat] = now.Add(lostGrace)
	}
	return nil, nil
}

// giveUp has no agreement wait for a node.
func (st *state) giveUp(at seat, now time.Time) ([]topic, error) {
	delete(st.lost, at)
	return Participation{Of: at.of, Node: at.node}.step(st, now)
}

// withdraw takes the holdings of a node out of the agreements that are not decided. If its daemon lives, it repeats
// them.
func (st *state) withdraw(at seat) {
	for _, a := range st.agreements {
		hs, spoke := a.held[at.node]
		if a.open || !spoke || a.of[0] != at.of {
			continue
		}
		n := holdingBytes(hs)
		a.bytes -= n
		st.bytes -= n
		delete(a.held, at.node)
		delete(a.answers, at.node)
		for _, of := range []string{a.of[1], a.of[0]} {
			if r := st.participants[of]; r != nil && r.said(at.node) {
				a.expect(at.node, r.keys[at.node])
			}
		}
	}
}

// gone reports whether the daemon of a node has attended, and does not any more.
func (st *state) gone(at seat) bool {
	a, known := st.attendees[at]
	return known && a.conns == 0
}

// endGraces gives up the nodes whose launcher has been dead for long enough.
func (st *state) endGraces(now time.Time) (topics []topic) {
	for at, due := range st.lost {
		if !now.Before(due) {
			t, _ := st.giveUp(at, now) // else patience does it
			topics = append(topics, t...)
		}
	}
	return topics
}

// forgetAttendees forgets the nodes that have not attended for long.
func (st *state) forgetAttendees(old func(time.Time) bool) {
	maps.DeleteFunc(st.attendees, func(_ seat, a attendee) bool { return a.conns == 0 && old(a.heard) })
}

// attend counts the connection for a node, and no longer for another one.
func (r *run) attend(conn context.Context, at seat) {
	r.Lock()
	defer r.Unlock()
	before, known := r.conns[conn]
	if known && before == at || r.stepLocked(attendEvent{at, false}) != nil {
		return
	}
	r.conns[conn] = at
	if known {
		_ = r.stepLocked(attendEvent{before, true})
		return
	}
	context.AfterFunc(conn, func() { r.hungUp(conn) })
}

func (r *run) hungUp(conn context.Context) {
	r.Lock()
	defer r.Unlock()
	if at, known := r.conns[conn]; known {
		delete(r.conns, conn)
		_ = r.stepLocked(attendEvent{at, true})
	}
}
