package hang

import (
	"slices"
	"time"

	"dlrover-run/hang/rankset"
)

// members are ranks with evidence, by rank.
type members []*member

// all returns those with a property.
func (ms members) all(is func(*member) bool) (found members) {
	for _, m := range ms {
		if is(m) {
			found = append(found, m)
		}
	}
	return found
}

// any reports whether one of them has a property.
func (ms members) any(is func(*member) bool) bool { return slices.ContainsFunc(ms, is) }

// of is nil for a rank without evidence.
func (ms members) of(rank int) *member {
	i, found := slices.BinarySearchFunc(ms, rank, func(m *member, rank int) int { return m.rank - rank })
	if !found {
		return nil
	}
	return ms[i]
}

// outside reports whether no rank has a page.
func (ms members) outside() bool {
	return !ms.any(func(m *member) bool { return m.page != nil })
}

// p99 of the steps of the slowest rank.
func (ms members) p99() (worst time.Duration) {
	for _, m := range ms {
		worst = max(worst, m.p99)
	}
	return worst
}

// age is the time since the newest progress of any. Each counts by the clock of its own node.
func (ms members) age() time.Duration {
	age := time.Duration(0)
	for _, m := range ms {
		if m.page == nil || m.page.progress() == 0 {
			continue
		}
		if a := m.at - m.page.progress(); age == 0 || a < age {
			age = max(a, 1)
		}
	}
	return age
}

// ranks are all but those of others.
func (ms members) ranks(others members) (s rankset.Set) {
	out := map[*member]bool{}
	for _, m := range others {
		out[m] = true
	}
	for _, m := range ms {
		if !out[m] {
			s.Add(m.rank)
		}
	}
	return s
}
