package hang

import (
	"slices"
	"time"
)

// blocking is the group that m waits in, nil if every other member of its groups has come as far as m. That which m has
// entered last counts, unless the flight recorder knows better.
func (m *member) blocking() (blocking *processGroup) {
	newest := time.Duration(-1)
	recorded := m.recorded()
	for _, g := range m.in {
		state, ok := m.page.Group(g.ID)
		if !ok || state.Seq < g.top || !g.lacks(m) {
			continue
		}
		since := state.Since
		if recorded != "" && recorded == g.Name {
			since = 1<<63 - 1
		}
		if since > newest {
			blocking, newest = g, since
		}
	}
	return blocking
}

// behind reports whether another member is ahead in one of its groups.
func (m *member) behind() bool {
	return slices.ContainsFunc(m.in, func(g *processGroup) bool { return g.lags(m) })
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

// waitSearch is a walk through the graph of waiting ranks.
type waitSearch struct {
	loose bool // a rank that rests in the user's code may be waiting
	// culprits wait for no rank; stuck ones wait, and all others have arrived.
	culprits, stuck, waiters members
	circle                   members
	group                    *processGroup // that in which a culprit is missed
	seen                     map[*member]bool
	gone                     map[*processGroup]bool
}

// follow walks from all waiting ranks to the ranks that wait for no other.
func (ms members) follow(loose bool) *waitSearch {
	h := &waitSearch{loose: loose, seen: map[*member]bool{}, gone: map[*processGroup]bool{}}
	for _, m := range ms {
		if g := m.blocking(); g != nil && !h.ends(m) {
			h.waiters = append(h.waiters, m)
			h.walk(g)
		}
	}
	if len(h.culprits) == 0 && len(h.stuck) == 0 {
		h.circle = h.waiters.circle()
	}
	for _, found := range []members{h.culprits, h.stuck} {
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
		case m.blocking() == nil:
			h.stuck = append(h.stuck, m)
		}
	}
}

// ends reports whether m waits for no rank, but is waited for.
func (h *waitSearch) ends(m *member) bool {
	switch {
	case m.halted():
		return true
	case m.class == classWaiting || !m.behind():
		return false
	}
	return m.class == classBusy || !m.maybe || !h.loose
}

// circle leaves out, one after the other, ranks that wait but have no waiters.
func (ms members) circle() members {
	for {
		missed := map[*member]bool{}
		for _, m := range ms {
			for _, o := range m.blocking().late {
				missed[o] = true
			}
		}
		left := slices.DeleteFunc(slices.Clone(ms), func(m *member) bool { return !missed[m] })
		if len(left) == len(ms) || len(left) == 0 {
			return left
		}
		ms = left
	}
}
