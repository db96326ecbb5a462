package coordinator

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// State is what one run knows about its saves, agreements, peers and ages. It has no clock and does no I/O: time
// comes with every Step and must not go back. It may be started empty at any time, for everything comes again:
// waiting daemons repeat their last report, and a later phase implies the earlier ones.
//
// A State keeps the slices that it is given and hands out its own: neither may be modified.
type State struct {
	saves      map[string]*save
	agreements map[string]*agreement
	exchanges  map[string]*exchange
	ages       map[int]age
	rosters    map[string]*roster // by round or epoch
	bytes      int64              // of entries, holdings and peers
	swept      time.Time
}

// NewState returns a State that knows nothing.
func NewState() *State {
	return &State{saves: map[string]*save{}, agreements: map[string]*agreement{}, exchanges: map[string]*exchange{},
		ages: map[int]age{}, rosters: map[string]*roster{}}
}

// Topic is something that waiting nodes want to know.
type Topic struct {
	Kind TopicKind
	Key  string // a save's id, or the key of an agreement or exchange
}

// TopicKind says what a Topic is about.
type TopicKind uint8

// The kinds of topics. Those of a save are bits, because Step compares what was known before and after.
const (
	AllPrepared TopicKind = 1 << iota // for the leader
	HasIntent                         // for the others
	AllPlaced                         // for the leader
	IsPublished                       // for the others
	Agreed
	PeersKnown
)

// Event is what Step takes: Posted, Held, Here, Aged, Attendance or Tick.
type Event interface {
	check() error
	step(st *State, now time.Time) ([]Topic, error)
}

// Tick lets time pass.
type Tick struct{}

// sweepEvery is how often Step looks for what is to be forgotten.
const sweepEvery = 10 * time.Second

// Step takes an event in and returns the topics about which there is something to say now. An event that is
// refused changes nothing but time; errors wrap ErrBadRequest, ErrLimit or ErrDecided.
func (st *State) Step(now time.Time, ev Event) ([]Topic, error) {
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

func (Tick) check() error                            { return nil }
func (Tick) step(*State, time.Time) ([]Topic, error) { return nil, nil }

// sweep forgets what has not been heard of for Forget.
func (st *State) sweep(now time.Time) {
	st.swept = now
	old := func(heard time.Time) bool { return now.Sub(heard) >= Forget }
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
	forget(st, st.rosters, old)
}

// Empty reports whether there is nothing to remember.
func (st *State) Empty() bool {
	return len(st.saves)+len(st.agreements)+len(st.exchanges)+len(st.ages)+len(st.rosters) == 0
}

// reserve takes n bytes more (or fewer) from the run's budget.
func (st *State) reserve(n int64, what string) error {
	if n > 0 && st.bytes+n > MaxBytes {
		return fmt.Errorf("%w: %s: the run would keep more than %d MiB of entries, holdings and peers; "+
			"save less often or in fewer files", ErrLimit, what, MaxBytes>>20)
	}
	st.bytes += n
	return nil
}
