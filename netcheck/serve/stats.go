package serve

import (
	"maps"
	"sync"
	"time"

	"dlrover-run/netcheck"
)

// States are those that Stats.Verdicts counts.
var States = []netcheck.State{
	netcheck.StateOK, netcheck.StateSlow, netcheck.StateFaulty, netcheck.StatePath, netcheck.StateLeaf,
	netcheck.StateIsland, netcheck.StateUnattributable, netcheck.StateNotTested, netcheck.StateUndecided,
	netcheck.StateUnreachable,
}

// Stats are figures of all checks of a Hub since it was made.
type Stats struct {
	// Verdicts counts decisions by state, and Excluded those that left a node out.
	Verdicts map[netcheck.State]int
	Excluded int
	// Checks counts those that have ended; Newest is how long the one that ended last took.
	Checks int
	Newest time.Duration
}

// Stats returns the present figures. The caller owns them.
func (h *Hub) Stats() Stats {
	h.stats.mu.Lock()
	defer h.stats.mu.Unlock()
	s := h.stats.now
	s.Verdicts = maps.Clone(s.Verdicts)
	return s
}

type stats struct {
	mu  sync.Mutex // the last that is taken
	now Stats
}

func (s *stats) decided(v *netcheck.Verdict) {
	if v == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now.Verdicts == nil {
		s.now.Verdicts = map[netcheck.State]int{}
	}
	s.now.Verdicts[v.State]++
	if v.Excluded {
		s.now.Excluded++
	}
}

func (s *stats) ended(took time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.Checks++
	s.now.Newest = took
}
