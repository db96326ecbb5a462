package hang

import (
	"slices"
	"time"
)

// suspicions are the present ones of the nodes of a world.
type suspicions struct {
	nodes   []nodeState // by group rank
	count   int         // nodes that suspect something
	sweepAt time.Time
}

// nodeState is one node of the present world.
type nodeState struct {
	suspicions []Suspicion
	heard      time.Time // time of the newest repetition
	since      time.Time // its last progress
	slow       string
}

func (s *suspicions) begin(nodes int) { s.nodes, s.count = make([]nodeState, nodes), 0 }

// has reports whether there is a node with this group rank.
func (s *suspicions) has(groupRank int) bool { return groupRank >= 0 && groupRank < len(s.nodes) }

// replace takes new suspicions of a node for its earlier ones.
func (s *suspicions) replace(now time.Time, groupRank int, ss []Suspicion) {
	m := &s.nodes[groupRank]
	if len(m.suspicions) > 0 {
		s.count--
	}
	ss = m.dated(now, ss)
	m.suspicions, m.heard = ss, now
	if len(ss) == 0 {
		return
	}
	if s.count == 0 {
		s.sweepAt = now.Add(sweepEvery)
	}
	s.count++
	m.since = now
	for _, x := range ss {
		if at := now.Add(-x.age()); at.Before(m.since) {
			m.since = at
		}
	}
}

// dated converts the ages of a report to the present time. A report is older than now by its delivery time and the
// look before it. Without progress since the previous report, the age counts from that report. Otherwise each answer
// would delay the deadline by its own delay.
func (m *nodeState) dated(now time.Time, ss []Suspicion) []Suspicion {
	ss = slices.Clone(ss)
	for i := range ss {
		for _, old := range m.suspicions {
			since, at := m.heard.Add(-old.Age), now.Add(-ss[i].Age)
			if old.Rank == ss[i].Rank && at.After(since) && !at.After(m.heard) {
				ss[i].Age = now.Sub(since)
			}
		}
	}
	return ss
}

// oldest is the oldest suspicion, and the longest limit of any.
func (m *nodeState) oldest() (oldest Suspicion, limit time.Duration) {
	oldest = m.suspicions[0]
	for _, s := range m.suspicions {
		limit = max(limit, s.Limit) // four times the 99th percentile or more
		if s.Age > oldest.Age {
			oldest = s
		}
	}
	return oldest, limit
}

// sweep forgets suspicions that were not repeated, if it is time for that. That is no progress: a launcher without a
// connection reports nothing.
func (s *suspicions) sweep(now time.Time) (swept bool) {
	if s.count == 0 || !reached(s.sweepAt, now) {
		return false
	}
	for i := range s.nodes {
		if m := &s.nodes[i]; len(m.suspicions) > 0 && now.Sub(m.heard) >= staleTime {
			s.replace(now, i, nil)
		}
	}
	s.sweepAt = now.Add(sweepEvery)
	return true
}

func (s *suspicions) clear() {
	for i := range s.nodes {
		s.nodes[i].suspicions = nil
	}
	s.count = 0
}

// lastProgress is that of the node that made some last, of those that suspect something, and since without any.
func (s *suspicions) lastProgress(since time.Time) time.Time {
	for i := range s.nodes {
		if m := &s.nodes[i]; len(m.suspicions) > 0 {
			since = later(since, m.since)
		}
	}
	return since
}

// list is for people.
func (s *suspicions) list(now time.Time, w World) (out []nodeSuspicion) {
	for i := range s.nodes {
		for _, x := range s.nodes[i].suspicions {
			if len(out) == maxListed {
				return out
			}
			x.Age += now.Sub(s.nodes[i].heard)
			out = append(out, nodeSuspicion{i, w.Nodes[i].Name, x})
		}
	}
	return out
}

// slow are the stragglers, as their nodes report them.
func (s *suspicions) slow(w World) (out []nodeText) {
	for i := range s.nodes {
		if text := s.nodes[i].slow; text != "" && len(out) < maxListed {
			out = append(out, nodeText{i, w.Nodes[i].Name, text})
		}
	}
	return out
}
