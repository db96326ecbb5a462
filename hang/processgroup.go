package hang

import (
	"slices"
	"time"

	"dlrover-run/hang/rankset"
)

// processGroup is a process group as the judge sees it.
type processGroup struct {
	Group
	members members     // ranks with evidence, by rank
	unknown rankset.Set // members without evidence
	top     uint64      // the highest sequence number of a member
	late    members     // those that lag, by rank
	whole   bool        // all ranks of the world are in it
}

// at is the sequence number of a member; a worker without a page has none.
func (g *processGroup) at(m *member) (seq uint64, ok bool) {
	state, ok := m.page.Group(g.ID)
	return state.Seq, ok
}

// lags reports whether m has not entered the newest collective of g. The page of a rank that cannot run may be old,
// or the number may have been taken before the collective was really entered.
func (g *processGroup) lags(m *member) bool {
	seq, ok := g.at(m)
	return m.halted() || ok && seq < g.top
}

// lacks reports whether m is there before others. Ended ranks are missed only by a rank that is seen to wait.
func (g *processGroup) lacks(m *member) bool {
	return g.late.any(func(o *member) bool {
		return o != m && (o.class != classEnded || m.class == classWaiting)
	})
}

// age is the time since its first member has entered the newest collective.
func (g *processGroup) age() time.Duration {
	m := g.members[0]
	if m.page == nil {
		return 0
	}
	state, _ := m.page.Group(g.ID)
	return m.at - state.Since
}

// recorded reports whether the flight recorders of all members have an entry.
func (g *processGroup) recorded() bool {
	return !g.members.any(func(m *member) bool { return m.entry(g.Name) == nil })
}

// groupFinder finds the process groups of members, which describe them.
type groupFinder struct {
	world   rankset.Set
	members members
	groups  []*processGroup // in a fixed order
	index   map[uint64]*processGroup
}

// groupsOf are the groups with at least two ranks, which may be without evidence. Their members get to know them.
func groupsOf(ms members, world rankset.Set) []*processGroup {
	f := &groupFinder{world: world, members: ms, index: map[uint64]*processGroup{}}
	for _, m := range ms {
		for _, g := range m.groups {
			if f.index[g.ID] == nil {
				f.add(f.named(g))
			}
		}
		f.unnamed(m)
	}
	groups := slices.DeleteFunc(f.groups, func(g *processGroup) bool {
		return len(g.members) == 0 || len(g.members)+g.unknown.Len() < 2
	})
	for _, g := range groups {
		g.meet()
	}
	return groups
}

func (f *groupFinder) add(g *processGroup) {
	f.index[g.ID] = g
	f.groups = append(f.groups, g)
}

// named takes the members of g. A member with no such group in its page has none or is older; it counts if it cannot
// be asked anymore.
func (f *groupFinder) named(g Group) *processGroup {
	p := &processGroup{Group: g}
	ranks := rankset.Named(g.Ranks)
	p.whole = len(f.world.Without(ranks)) == 0
	for _, run := range ranks {
		for r := run.First; r <= run.Last; r++ {
			m := f.members.of(r)
			if m == nil {
				p.unknown.Add(r)
			} else if _, ok := p.at(m); ok || m.halted() {
				p.members = append(p.members, m)
			}
		}
	}
	return p
}

// unnamed adds m to the groups that are on its page and have no description.
func (f *groupFinder) unnamed(m *member) {
	if m.page == nil {
		return
	}
	for _, s := range m.page.Groups {
		if g := f.index[s.ID]; g == nil {
			f.add(&processGroup{Group: Group{ID: s.ID}, members: members{m}})
		} else if g.Ranks == "" {
			g.members = append(g.members, m)
		}
	}
}

// meet finds the newest collective, and the members that have not entered it.
func (g *processGroup) meet() {
	for _, m := range g.members {
		m.in = append(m.in, g)
		seq, _ := g.at(m)
		g.top = max(g.top, seq)
	}
	g.late = g.members.all(g.lags)
}
