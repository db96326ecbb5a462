package hang

import (
	"cmp"
	"iter"
	"time"

	"dlrover-run/hang/rankset"
	"dlrover-run/internal/stable"
)

// Bounds of Arrivals. The shim sees twice a second which collectives have begun.
const (
	maxLateness  = 32
	latenessUnit = 100 * time.Millisecond // or more, so that there are no more than maxLateness
)

// Arrivals tell of late ranks in collectives, by the newest evidence. Ranks without a page, or with nobody to meet, are
// unknown.
type Arrivals struct {
	At   time.Time  `json:"at"`
	Late []Lateness `json:"late"` // the latest first; 32 at most
}

// Lateness is that of ranks which are about equally late.
type Lateness struct {
	Ranks string `json:"ranks"` // as 0-3,8
	// Late is the time from the first rank of their process group in its newest collective until they came, or until now.
	Late   time.Duration `json:"late"`
	Absent bool          `json:"absent,omitempty"` // they have not come yet
}

// arrivals are collected while the judge reads the evidence.
type arrivals struct {
	meetings map[uint64]*meeting // by the id of a process group
	ranks    []arrival
}

// meeting is the newest collective of a process group.
type meeting struct {
	seq     uint64
	age     time.Duration // since its first rank came
	members int           // with a page
	here    int           // that have come
}

// arrival is the progress of a rank in its process groups.
type arrival struct {
	rank   int
	at     time.Duration
	groups []GroupState
}

// look passes all evidence to a reader, and notes the arrivals in it.
func (f *file) look(now time.Time, read func(iter.Seq[Evidence])) {
	a := arrivals{meetings: map[uint64]*meeting{}}
	read(func(yield func(Evidence) bool) {
		for e := range f.all() {
			a.add(&e)
			if !yield(e) {
				return
			}
		}
	})
	f.arrivals = a.result(now)
}

func (a *arrivals) add(e *Evidence) {
	i := len(e.Samples) - 1
	for i >= 0 && e.Samples[i].Page == nil {
		i--
	}
	if i < 0 {
		return
	}
	s := &e.Samples[i]
	a.ranks = append(a.ranks, arrival{e.Rank, s.At, s.Page.Groups})
	for _, g := range s.Page.Groups {
		m := a.meetings[g.ID]
		if m == nil {
			m = &meeting{}
			a.meetings[g.ID] = m
		}
		m.see(g.Seq, s.At-g.Since)
	}
}

func (m *meeting) see(seq uint64, age time.Duration) {
	if seq > m.seq || m.members == 0 {
		m.seq, m.age, m.here = seq, age, 0
	}
	m.members++
	if seq == m.seq {
		m.age = max(m.age, age)
		m.here++
	}
}

// late is the lateness of a rank. It only waits in a collective that it has come to before others. Otherwise one group
// without it is enough.
func (a *arrivals) late(r arrival) (l Lateness, known bool) {
	var absent, came time.Duration // since others have come to one, and later than others to another
	newest, waits, misses := time.Duration(-1), false, false
	for _, g := range r.groups {
		m, age := a.meetings[g.ID], r.at-g.Since
		switch {
		case m.members < 2:
		case g.Seq < m.seq:
			absent, misses = max(absent, m.age), true
		case newest < 0 || age < newest:
			newest, came, waits = age, m.age-age, m.here < m.members
		}
	}
	if misses && !waits {
		return Lateness{Late: absent, Absent: true}, true
	}
	return Lateness{Late: came}, newest >= 0
}

// result is nil if nothing is known.
func (a *arrivals) result(now time.Time) *Arrivals {
	var all []Lateness
	for unit := latenessUnit; ; unit *= 2 {
		all = a.levels(unit)
		if len(all) <= maxLateness {
			break
		}
	}
	if len(all) == 0 {
		return nil
	}
	return &Arrivals{At: now, Late: all}
}

// levels has one for each multiple of the unit that occurs.
func (a *arrivals) levels(unit time.Duration) (all []Lateness) {
	sets := map[time.Duration]*rankset.Set{} // twice the lateness, and one more for absent ranks
	for _, r := range a.ranks {
		l, known := a.late(r)
		if !known {
			continue
		}
		key := 2 * max(l.Late, 0).Round(unit)
		if l.Absent {
			key++
		}
		if sets[key] == nil {
			sets[key] = new(rankset.Set)
		}
		sets[key].Add(r.rank)
	}
	for key, set := range sets {
		all = append(all, Lateness{set.String(), key / 2, key%2 == 1})
	}
	stable.Sort(all, func(x, y Lateness) int {
		return cmp.Or(cmp.Compare(y.Late, x.Late), cmp.Compare(x.Ranks, y.Ranks))
	})
	return all
}
