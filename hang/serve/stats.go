package serve

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/hang"
	"dlrover-run/internal/job"
)

// Kinds are those that Stats.Verdicts counts.
var Kinds = []hang.Kind{
	hang.KindMissing, hang.KindBehind, hang.KindStopped, hang.KindBlocked, hang.KindBusy, hang.KindMismatch,
	hang.KindComm, hang.KindDeadlock, hang.KindAlone,
}

// Stats are figures of all runs of a Hub since it was made.
type Stats struct {
	Reports    int               // that were taken
	Refused    int               // evidence that there was no room for
	Suspicions int               // incidents that were opened
	Withdrawn  int               // incidents that were no hang, or ended by themselves
	Verdicts   map[hang.Kind]int // that were reported
	Orders     map[hang.Action]int
	Held       int           // bytes of evidence, now
	Detect     time.Duration // from the last progress to the newest verdict
}

// Stats returns the present figures. The caller owns them.
func (h *Hub) Stats() Stats {
	h.stats.mu.Lock()
	defer h.stats.mu.Unlock()
	s := h.stats.now
	s.Verdicts, s.Orders = maps.Clone(s.Verdicts), maps.Clone(s.Orders)
	s.Reports, s.Refused, s.Held = int(h.stats.reports.Load()), int(h.stats.refusals.Load()), int(h.held.Load())
	return s
}

// Standing is how many runs stand still: a hang of theirs counts, and is not over.
func (h *Hub) Standing() (n int) {
	for _, r := range h.runs.All() {
		if p, _, err := r.picture(false); err == nil && p.State == hang.StateDecided {
			n++
		}
	}
	return n
}

type stats struct {
	reports, refusals atomic.Int64

	mu  sync.Mutex // the last that is taken
	now Stats
}

func (s *stats) reported() { s.reports.Add(1) }
func (s *stats) refused()  { s.refusals.Add(1) }

func (s *stats) count(a hang.Effect) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now.Verdicts == nil {
		s.now.Verdicts, s.now.Orders = map[hang.Kind]int{}, map[hang.Action]int{}
	}
	switch {
	case a.Ask != nil && a.Ask.What == hang.TellVerdict && a.Ask.Again:
	case a.Ask != nil && a.Ask.What == hang.TellVerdict:
		s.now.Verdicts[a.Ask.Kind]++
		s.now.Detect = a.Ask.Age
	case a.Ask != nil && a.Ask.What == hang.TellOver:
		s.now.Withdrawn++
	case a.Note != nil && a.Note.Event == job.EventHangSuspected:
		s.now.Suspicions++
	case a.Order != nil:
		s.now.Orders[a.Order.Action]++
	}
}
