package hangs

import (
	"cmp"
	"slices"
	"strconv"
	"sync"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/rankset"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/exposition"
	"dlrover-run/internal/stable"
)

// hangMetrics holds the metrics of hangs on this node, as of the newest look. The methods of nil do nothing.
type hangMetrics struct {
	job, pod, ip string

	mu         sync.Mutex
	ranks      map[int]*hangRank // of this epoch
	suspicions int
	alarms     int // suspicions that were withdrawn
	verdicts   map[hang.Kind]int
}

// hangRank is one worker.
type hangRank struct {
	local     int
	sample    hang.Sample
	moved     time.Duration // when it was last seen to make progress
	suspected bool
	hung      bool // the others wait for it
	waits     bool // in a hang, for others
}

func newHangMetrics(j *feature.Job) *hangMetrics {
	return &hangMetrics{job: j.RunID, pod: j.Node.Name, ip: j.Node.Addr, ranks: map[int]*hangRank{},
		verdicts: map[hang.Kind]int{}}
}

// looked takes the observer's samples and suspicions.
func (m *hangMetrics) looked(samples []hang.Sample, suspected []hang.Suspicion) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := map[int]*hangRank{}
	for _, s := range samples {
		r := m.ranks[s.Rank]
		if r == nil || r.sample.PID != s.PID || r.sample.Start != s.Start {
			r = &hangRank{moved: s.At}
		} else if hang.Progressed(r.sample, s) {
			r.moved, r.hung = s.At, false
			r.waits = r.waits && s.Page == nil // from outside, a wait for a device looks like work
		}
		was := r.suspected
		r.local, r.sample = s.Local, s
		r.suspected = slices.ContainsFunc(suspected, func(x hang.Suspicion) bool { return x.Rank == s.Rank })
		switch {
		case r.suspected && !was:
			m.suspicions++
		case was && !r.suspected:
			m.alarms++
		}
		now[s.Rank] = r
	}
	m.ranks = now
}

func (m *hangMetrics) verdict(a hang.Ask) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !a.Again {
		m.verdicts[a.Kind]++
	}
	if !a.Counts() {
		return // alerts and DLRover's master act upon the metric, so it waits for a verdict that counts
	}
	waiting := rankset.Named(a.Waiting)
	for rank, r := range m.ranks { // a.Waiting may be shortened if there are many ranks
		r.hung = r.hung || slices.Contains(a.Suspects, rank)
		r.waits = r.waits || r.suspected || waiting.Has(rank)
	}
}

func (m *hangMetrics) over() {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.ranks {
		r.hung, r.waits = false, false
	}
}

// State of a worker, the value of dlrover_hang_state.
const (
	hangInit = iota // no step yet
	hangRuns
	hangSuspect
	hangHung
	_         // slow: launchers do not report it
	hangPhase // it does other work than training
)

func (r *hangRank) state() int {
	p := r.sample.Page
	switch {
	case r.hung:
		return hangHung
	case r.suspected:
		return hangSuspect
	case p == nil:
		return hangRuns
	case p.Phase != hang.PhaseTrain && p.Phase != hang.PhaseUnknown:
		return hangPhase
	case p.Steps == 0:
		return hangInit
	}
	return hangRuns
}

// tell implements the callback of metrics.with.
func (m *hangMetrics) tell(s *exposition.Scrape) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for kind, n := range m.verdicts {
		s.Counter("dlrover_hang_verdicts_total", "Verdicts about hangs of the job that this node was told, by kind.",
			float64(n), exposition.Label{Name: "kind", Value: string(kind)})
	}
	s.Counter("dlrover_hang_suspicions_total", "Workers of this node that made no progress for unusually long.",
		float64(m.suspicions))
	s.Counter("dlrover_hang_false_alarms_total",
		"Workers of this node that were suspected of a hang, and went on by themselves.", float64(m.alarms))
	for rank, r := range m.ranks {
		m.tellRank(s, rank, r)
	}
}

func (m *hangMetrics) tellRank(s *exposition.Scrape, rank int, r *hangRank) {
	label := exposition.Label{Name: "rank", Value: strconv.Itoa(rank)}
	s.Gauge("dlrover_hang_state",
		"State of the worker: 0 no step yet, 1 runs, 2 suspected, 3 hung, 5 in another phase than training.",
		float64(r.state()), label)
	s.Gauge("dlrover_hang_progress_age_seconds", "Time since the worker was last seen to make progress.",
		(r.sample.At - r.moved).Seconds(), label)
	shim := 0.0
	if p := r.sample.Page; p != nil {
		shim = 1
		s.Gauge("dlrover_hang_optimizer_steps", "Optimizer steps that the worker has made.", float64(p.Steps), label)
		m.tellGroups(s, p.Groups, label)
	}
	s.Gauge("dlrover_hang_shim", "1 if the shim of hang detection tells of the worker.", shim, label)
	s.Gauge("XPU_TIMER_COMMON_HANG",
		"1 for each worker that stands still in a hang, or waits for others that do; the name is xpu_timer's.",
		still(r), label, exposition.Label{Name: "local_rank", Value: strconv.Itoa(r.local)},
		exposition.Label{Name: "ip", Value: m.ip}, exposition.Label{Name: "pod_name", Value: m.pod},
		exposition.Label{Name: "job_name", Value: m.job})
}

func still(r *hangRank) float64 {
	if r.hung || r.waits {
		return 1
	}
	return 0
}

// toldGroups bounds the series of a worker.
const toldGroups = 8

// tellGroups reports the groups with the most collectives done.
func (m *hangMetrics) tellGroups(s *exposition.Scrape, groups []hang.GroupState, rank exposition.Label) {
	groups = slices.Clone(groups)
	stable.Sort(groups, func(a, b hang.GroupState) int {
		return cmp.Or(cmp.Compare(b.Since, a.Since), cmp.Compare(a.ID,
			b.ID))
	})
	for _, g := range groups[:min(len(groups), toldGroups)] {
		s.Gauge("dlrover_hang_collective_seq", "Sequence number of the newest collective of a process group.", float64(g.Seq),
			rank, exposition.Label{Name: "group", Value: strconv.FormatUint(g.ID, 16)})
	}
}
