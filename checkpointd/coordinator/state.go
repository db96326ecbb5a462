package coordinator

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// state has the saves, agreements, peers and ages of one run. It has no clock and does no I/O: time is an argument of
// every step and must not go back. It may start empty at any time, because everything is repeated: waiting daemons
// repeat their last report, and a later phase implies the earlier ones.
//
// A state keeps the slices that it is given and hands out its own: neither may be modified.
type state struct {
	saves        map[string]*save
	agreements   map[string]*agreement
	exchanges    map[string]*exchange
	ages         map[int]age
	participants map[string]*participants // by round or epoch
	attendees    map[seat]attendee
	lost         map[seat]time.Time // nodes whose launcher is dead: when they are given up
	bytes        int64              // of entries, holdings and peers
	swept        time.Time
}

// newState returns a state that knows nothing.
func newState() *state {
	return &state{saves: map[string]*save{}, agreements: map[string]*agreement{}, exchanges: map[string]*exchange{},
		ages: map[int]age{}, participants: map[string]*participants{}, attendees: map[seat]attendee{},
		lost: map[seat]time.Time{}}
}

// topic is something that waiting nodes want to know.
type topic struct {
	kind topicKind
	key  string // a save's id, or the key of an agreement or exchange
}

// topicKind is the question of a topic.
type topicKind uint8

// The kinds of topics. Those of a save are bits, because step compares the known ones before and after.
const (
	allPrepared topicKind = 1 << iota // for the leader
	hasIntent                         // for the others
	allPlaced                         // for the leader
	isPublished                       // for the others
	agreed
	peersKnown
)

// event is an input of step: reportEvent, agreeEvent, peersEvent, agesEvent, Participation, attendEvent, lostEvent or
// tick.
type event interface {
	check() error
	step(st *state, now time.Time) ([]topic, error)
}

// tick lets time pass.
type tick struct{}

// sweepEvery is the time between two sweeps.
const sweepEvery = 10 * time.Second

// step applies an event and returns the topics that have an answer now. An event that is
// refused changes nothing but time; errors wrap errBadRequest, ErrLimit or ErrDecided.
func (st *state) step(now time.Time, ev event) ([]topic, error) {
	if err := ev.check(); err != nil {
		return nil, err
	}
	if now.Sub(st.swept) >= sweepEvery {
		st.sweep(now)
	}
	due := st.expire(now)
	topics, err := ev.step(st, now)
	return append(due, topics...), err
}

func (tick) check() error                            { return nil }
func (tick) step(*state, time.Time) ([]topic, error) { return nil, nil }

// sweep forgets all that has had no event for forgetAfter.
func (st *state) sweep(now time.Time) {
	st.swept = now
	old := func(heard time.Time) bool { return now.Sub(heard) >= forgetAfter }
	for id, s := range st.saves {
		if old(s.heard) {
			st.dropSave(id)
		}
	}
	maps.DeleteFunc(st.ages, func(_ int, a age) bool { return old(a.heard) })
	if len(st.ages) > 0 && len(st.exchanges) > 0 { // its epoch may still run
		slices.MaxFunc(slices.Collect(maps.Values(st.exchanges)),
			func(a, b *exchange) int { return a.heard.Compare(b.heard) }).heard = now
	}
	forget(st, st.agreements, old)
	forget(st, st.exchanges, old)
	forget(st, st.participants, old)
	st.forgetAttendees(old)
}

// empty reports whether there is nothing to remember.
func (st *state) empty() bool {
	return len(st.saves)+len(st.agreements)+len(st.exchanges)+len(st.ages)+len(st.participants)+len(st.attendees)+
		len(st.lost) == 0
}

// reserve takes n bytes more (or fewer) from the run's budget.
func (st *state) reserve(n int64, what string) error {
	if n > 0 && st.bytes+n > maxBytes {
		return fmt.Errorf("%w: %s: the run would keep more than %d MiB of entries, holdings and peers; "+
			"save less often or in fewer files", ErrLimit, what, maxBytes>>20)
	}
	st.bytes += n
	return nil
}
