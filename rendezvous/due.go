package rendezvous

import (
	"fmt"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/stable"
)

// Due is an event that time alone brings to a run, unless something else happens before.
type Due struct {
	At   time.Time `json:"at"`
	Text string    `json:"text"`
}

// dues lists the events that time alone brings to the run, the next first.
func dues(r *Round) (ds []Due) {
	if r.epoch.phase == finished || len(r.members.nodes) == 0 {
		return nil
	}
	add := func(at time.Time, text string) {
		if !at.IsZero() {
			ds = append(ds, Due{at, text})
		}
	}
	if at, c := r.memory.limit(); c != nil {
		add(at, "the run fails: "+c.Text)
	}
	for _, n := range r.liveness.doubtful(maxNamed) {
		add(n.detached.Add(r.liveness.grace(n)), fmt.Sprintf("%s counts as lost, unless it comes back", n.Name))
	}
	if r.memory.rebuild != nil {
		add(r.memory.rebuild.until, "nodes of the world that have not come back count as lost")
	} else {
		add(r.sealer.due())
	}
	stable.Sort(ds, func(a, b Due) int { return a.At.Compare(b.At) })
	return ds
}

// due is the event that time alone brings to the world.
func (s *sealer) due() (time.Time, string) {
	enough := s.params.fit(s.members.possible()) >= s.params.Min
	switch {
	case s.epoch.phase == running:
		return s.growAt, "the workers are stopped, and start again with the nodes that have come"
	case s.epoch.phase == gating:
		return s.gate.until, "checks that have no result yet are no longer awaited"
	case s.epoch.phase != forming || s.orders.paused != nil || s.members.stopping > 0:
		return time.Time{}, ""
	case !s.account.backoffAt.IsZero() && !s.epoch.elastic:
		return s.account.backoffAt, "the delay of the next start is over"
	case !enough:
		return s.epoch.formingAt.Add(s.params.JoinTimeout), "the run fails, unless enough nodes are there"
	case !s.lastCallAt.IsZero():
		return s.lastCallEnd(s.members.possible()), "the workers start without further nodes"
	}
	return time.Time{}, ""
}

// doubtful are the first nodes, by rank and name, whose connection has broken.
func (l *liveness) doubtful(limit int) []*node {
	if l.at.IsZero() {
		return nil
	}
	all := l.members.sorted((*node).suspect)
	return all[:min(len(all), limit)]
}

// missing are nodes of the world that have gone, and have not come back under their names, until another world follows.
func (e *epoch) missing(m *members) (gone []job.Loss) {
	if !e.collecting() {
		return nil
	}
	here := map[string]bool{}
	for _, n := range m.nodes {
		here[n.Name] = true
	}
	for _, l := range e.kept.losses {
		if !here[l.Node] {
			gone = append(gone, l)
		}
	}
	return gone
}
