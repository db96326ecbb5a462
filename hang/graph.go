package hang

import (
	"iter"
	"slices"
	"time"
)

// processGroup is a process group as the judge sees it.
type processGroup struct {
	Group
	members []*member // ranks with evidence, by rank
	unknown RankSet   // members without evidence
	top     uint64    // the highest sequence number of a member
	late    []*member // those that lag, by rank
	whole   bool      // all ranks of the world are in it
}

// at is the sequence number of a member; a worker without a page has none.
func (g *processGroup) at(m *member) (seq uint64, ok bool) {
	if m.page == nil {
		return 0, false
	}
	return m.page.seq(g.ID)
}

// lags reports whether m has not entered the newest collective of g. The page of a rank that cannot run may be old,
// or the number may have been taken before the collective was really entered.
func (g *processGroup) lags(m *member) bool {
	seq, ok := g.at(m)
	return m.halted() || ok && seq < g.top
}

// halted reports whether it does nothing at all, even if its page says otherwise.
func (m *member) halted() bool {
	return m.class == classStopped || m.class == classBlocked || m.class == classEnded
}

// analysis is the state of one call of Judge.
type analysis struct {
	world   World
	ranks   RankSet         // of the world
	members []*member       // by rank, one for each rank with evidence
	groups  []*processGroup // with at least two members, in a fixed order
	noData  RankSet
	store   []StoreWait
}

func newAnalysis(w World, ev iter.Seq[Evidence], store []StoreWait) *analysis {
	c := &analysis{world: w, ranks: w.Ranks(), store: store}
	known, read := RankSet{}, library{}
	for e := range ev {
		if m := classify(&e, read); m.class != classUnknown {
			c.members = append(c.members, m)
		}
	}
	slices.SortStableFunc(c.members, func(a, b *member) int { return a.rank - b.rank })
	c.members = slices.CompactFunc(c.members, func(a, b *member) bool { return a.rank == b.rank })
	for _, m := range c.members {
		known.Add(m.rank)
	}
	c.noData = c.ranks.Without(known)
	c.meet()
	return c
}

// member is nil for a rank without evidence.
func (c *analysis) member(rank int) *member {
	i, found := slices.BinarySearchFunc(c.members, rank, func(m *member, rank int) int { return m.rank - rank })
	if !found {
		return nil
	}
	return c.members[i]
}

// meet finds the groups, and their members.
func (c *analysis) meet() {
	index := map[uint64]*processGroup{}
	for _, m := range c.members {
		for _, g := range m.groups {
			if index[g.ID] == nil {
				index[g.ID] = c.group(g)
			}
		}
		c.unnamed(m, index)
	}
	c.groups = slices.DeleteFunc(c.groups, func(g *processGroup) bool {
		return len(g.members) == 0 || len(g.members)+g.unknown.Len() < 2
	})
	for _, g := range c.groups {
		for _, m := range g.members {
			m.in = append(m.in, g)
			seq, _ := g.at(m)
			g.top = max(g.top, seq)
		}
		for _, m := range g.members {
			if g.lags(m) {
				g.late = append(g.late, m)
			}
		}
	}
}

// group takes the members of g. A member with no such group in its page has none or is older; it counts if it cannot
// be asked anymore.
func (c *analysis) group(g Group) *processGroup {
	p := &processGroup{Group: g}
	c.groups = append(c.groups, p)
	ranks := ranksIn(g.Ranks)
	p.whole = len(c.ranks.Without(ranks)) == 0
	for _, run := range ranks {
		for r := run.First; r <= run.Last; r++ {
			switch m := c.member(r); {
			case m == nil:
				p.unknown.Add(r)
			case m.halted():
				p.members = append(p.members, m)
			default:
				if _, ok := p.at(m); ok {
					p.members = append(p.members, m)
				}
			}
		}
	}
	return p
}

// unnamed adds m to the groups that are on its page and have no description.
func (c *analysis) unnamed(m *member, index map[uint64]*processGroup) {
	if m.page == nil {
		return
	}
	for _, s := range m.page.Groups {
		if g := index[s.ID]; g == nil {
			index[s.ID] = &processGroup{Group: Group{ID: s.ID}, members: []*member{m}}
			c.groups = append(c.groups, index[s.ID])
		} else if g.Ranks == "" {
			g.members = append(g.members, m)
		}
	}
}

// ranksIn reads 0-3,8; of a text that is wrong there are none.
func ranksIn(text string) (s RankSet) {
	err := eachRange(text, func(first, last int) {
		if n := len(s); n > 0 && s[n-1].Last+1 == first {
			s[n-1].Last = last
			return
		}
		s = append(s, RankRun{first, last})
	})
	if err != nil {
		return nil
	}
	return s
}

// blocking is the group that m waits in, nil if every other member of its groups has come as far as m. That which m has
// entered last counts, unless the flight recorder knows better.
func (c *analysis) blocking(m *member) (blocking *processGroup) {
	newest := time.Duration(-1)
	recorded := m.recorded()
	for _, g := range m.in {
		seq, ok := g.at(m)
		if !ok || seq < g.top || !g.lacks(m) {
			continue
		}
		since := m.page.since(g.ID)
		if recorded != "" && recorded == g.Name {
			since = 1<<63 - 1
		}
		if since > newest {
			blocking, newest = g, since
		}
	}
	return blocking
}

// lacks reports whether m is there before others. Ended ranks are missed only by a rank that is seen to wait.
func (g *processGroup) lacks(m *member) bool {
	return slices.ContainsFunc(g.late, func(o *member) bool {
		return o != m && (o.class != classEnded || m.class == classWaiting)
	})
}

// recorded names the group of the collective that m has not completed, "" if the flight recorder does not know.
func (m *member) recorded() string {
	if m.flight == nil {
		return ""
	}
	for _, e := range m.flight.Entries {
		if e.State != "completed" && !e.IsP2P {
			return e.Group
		}
	}
	return ""
}

func (p *Page) since(group uint64) time.Duration {
	for _, g := range p.Groups {
		if g.ID == group {
			return g.Since
		}
	}
	return 0
}

// waitSearch is a walk through the graph of waiting ranks.
type waitSearch struct {
	c     *analysis
	loose bool // a rank that rests in the user's code may be waiting
	// culprits wait for no rank; stuck ones wait, and all others have arrived.
	culprits, stuck, waiters []*member
	circle                   []*member
	group                    *processGroup // that in which a culprit is missed
	seen                     map[*member]bool
	gone                     map[*processGroup]bool
}

// follow walks from all waiting ranks to the ranks that wait for no other.
func (c *analysis) follow(loose bool) *waitSearch {
	h := &waitSearch{c: c, loose: loose, seen: map[*member]bool{}, gone: map[*processGroup]bool{}}
	for _, m := range c.members {
		if g := c.blocking(m); g != nil && !h.ends(m) {
			h.waiters = append(h.waiters, m)
			h.walk(g)
		}
	}
	if len(h.culprits) == 0 && len(h.stuck) == 0 {
		h.circle = c.circle(h.waiters)
	}
	for _, found := range [][]*member{h.culprits, h.stuck} {
		slices.SortFunc(found, func(a, b *member) int { return a.rank - b.rank })
	}
	return h
}

// walk looks at the missing members of a group. Their own waits are looked at in their turn.
func (h *waitSearch) walk(g *processGroup) {
	if h.gone[g] {
		return
	}
	h.gone[g] = true
	for _, m := range g.late {
		if h.seen[m] {
			continue
		}
		h.seen[m] = true
		switch {
		case h.ends(m):
			h.culprits = append(h.culprits, m)
			if h.group == nil {
				h.group = g
			}
		case h.c.blocking(m) == nil:
			h.stuck = append(h.stuck, m)
		}
	}
}

// ends reports whether m waits for no rank, but is waited for.
func (h *waitSearch) ends(m *member) bool {
	switch {
	case m.halted():
		return true
	case m.class == classWaiting || !h.c.behind(m):
		return false
	}
	return m.class == classBusy || !m.maybe || !h.loose
}

// behind reports whether another member is ahead in one of its groups.
func (c *analysis) behind(m *member) bool {
	return slices.ContainsFunc(m.in, func(g *processGroup) bool { return g.lags(m) })
}

// circle leaves out, one after the other, ranks that wait but have no waiters.
func (c *analysis) circle(waiters []*member) []*member {
	for {
		missed := map[*member]bool{}
		for _, m := range waiters {
			for _, o := range c.blocking(m).late {
				missed[o] = true
			}
		}
		left := slices.DeleteFunc(slices.Clone(waiters), func(m *member) bool { return !missed[m] })
		if len(left) == len(waiters) || len(left) == 0 {
			return left
		}
		waiters = left
	}
}
