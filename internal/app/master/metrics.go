package master

import (
	"bytes"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/common/expfmt"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/hang"
	hangs "dlrover-run/hang/serve"
	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/app/traces"
	"dlrover-run/internal/job"
	checks "dlrover-run/netcheck/serve"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/keeper"
	"dlrover-run/rendezvous/ledger"
)

// metrics are the daemon's: counters of events, and gauges that are read from the hub on request.
type metrics struct {
	reg    *prometheus.Registry
	events *prometheus.CounterVec
}

func newMetrics() *metrics {
	events := prometheus.CounterOpts{
		Name: "dlrover_rendezvous_events_total",
		Help: `State changes of runs, by kind: join, seal, run, break, node-loss, node-leave, succeeded, failed and others.`,
	}
	m := &metrics{reg: prometheus.NewRegistry(), events: prometheus.NewCounterVec(events, []string{"event"})}
	for _, e := range []job.Event{job.EventBreak, job.EventNodeLoss, job.EventFailed, job.EventSucceeded} {
		m.events.WithLabelValues(string(e)) // 0 before the first one, which is an increase
	}
	process := collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})
	m.reg.MustRegister(m.events, collectors.NewGoCollector(), process)
	return m
}

func (m *metrics) note(n rendezvous.Note) { m.events.WithLabelValues(string(n.Event)).Inc() }

// exposed is the metrics as text, made once in pageTime at most: a reader that is slow, or one of many, takes no
// memory of its own.
type exposed struct {
	reg prometheus.Gatherer

	mu   sync.Mutex
	at   time.Time
	text []byte // read-only
}

const pageTime = time.Second

func (m *metrics) handler() http.Handler { return &exposed{reg: m.reg} }

// ServeHTTP implements http.Handler.
func (p *exposed) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	text, err := p.fresh(time.Now())
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", string(textFormat))
	_, _ = w.Write(text) // the reader may be gone
}

var textFormat = expfmt.NewFormat(expfmt.TypeTextPlain)

func (p *exposed) fresh(now time.Time) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.text != nil && now.Sub(p.at) < pageTime {
		return p.text, nil
	}
	families, err := p.reg.Gather()
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	enc := expfmt.NewEncoder(&b, textFormat)
	for _, f := range families {
		if err := enc.Encode(f); err != nil {
			return nil, err
		}
	}
	p.at, p.text = now, b.Bytes()
	return p.text, nil
}

// watchElection adds those of a master that was elected among several.
func (m *metrics) watchElection(t *tenure) {
	gauge := func(name, help string, value func() float64) {
		m.reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value))
	}
	counter := func(name, help string, value func() int64) {
		m.reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help},
			func() float64 { return float64(value()) }))
	}
	e := t.election
	gauge("dlrover_election_leader", "1 on the one of several masters that serves; the others serve no metrics.",
		func() float64 { return 1 })
	gauge("dlrover_election_term", "Number of this leadership; each has a higher one than all before it.",
		func() float64 { return float64(t.term) })
	counter("dlrover_election_won_total", "Leaderships of this process.", e.elected.Load)
	counter("dlrover_election_lost_total", "Leaderships of this process that ended against its will.", e.lost.Load)
	counter("dlrover_election_depositions_total",
		"Other masters that this process has deposed, because they were gone or frozen.", e.deposed.Load)
	if s, ok := e.store.(reporter); ok {
		counter("dlrover_election_store_errors_total", "Requests of this process to the masters' store that have failed.",
			s.Failed)
		gauge("dlrover_election_store_silence_seconds", "Time since the masters' store has answered this leader.",
			func() float64 { return s.Silence().Seconds() })
	}
	if s, ok := e.store.(failsafe); ok {
		gauge("dlrover_election_candidates", "Other masters that wait; without any, or while one of them does not follow "+
			"it, the leader stops when the masters' store is away.", func() float64 { return float64(len(s.Candidates())) })
	}
}

// reporter is a store that tells how it fares.
type reporter interface {
	Failed() int64          // requests
	Silence() time.Duration // since this leader was answered
}

// watchAll adds the metrics of the daemon's parts; k is nil without marks.
func (m *metrics) watchAll(s *service.Service, k *marks.Manager) {
	m.reg.MustRegister(runs{s.Hub, s.Checkpoints})
	m.watchChecks(s.Checks)
	m.watchHangs(s.Hangs)
	if k != nil {
		m.watchMarks(k)
	}
}

// runs are the gauges of the hub's runs, of one look at them. The run's name is not a label: names come from users, and
// every new one would be a new time series for ever.
type runs struct {
	hub   *api.Hub
	saves *coordinator.Hub
}

// Describe implements prometheus.Collector.
func (r runs) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(r, ch) }

// Collect implements prometheus.Collector. The times can become less, because runs are forgotten.
func (r runs) Collect(ch chan<- prometheus.Metric) {
	all := r.hub.Runs(false)
	members, waiting, restarts, most := 0, 0, 0, 0.0
	now, times := map[ledger.Class]int{}, ledger.Times{}
	memory, disk := 0.0, 0.0
	for _, s := range all {
		members, waiting, restarts, most = members+s.Members, waiting+s.Waiting, restarts+s.Restarts, max(most, spent(s))
		if s.Members > 0 && s.Outcome == "" {
			for _, a := range r.saves.Summary(s.Run).Ages {
				memory, disk = max(memory, age(a.MemoryAt)), max(disk, age(a.DurableAt))
			}
		}
		if s.Ledger == nil {
			continue
		}
		now[s.Ledger.Class]++
		for class, d := range s.Ledger.Times {
			times[class] += d
		}
	}
	tell := func(name, help string, value float64, class ...string) {
		d := prometheus.NewDesc(name, help, []string{"class"}[:len(class)], nil)
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, class...)
	}
	tell("dlrover_rendezvous_runs", "Runs that this daemon keeps, finished ones included.", float64(len(all)))
	tell("dlrover_rendezvous_members", "Nodes that are members of a world, over all runs.", float64(members))
	tell("dlrover_rendezvous_waiting", "Nodes that wait for a world or as spares, over all runs.", float64(waiting))
	tell("dlrover_rendezvous_restarts", "Restarts spent, over all runs.", float64(restarts))
	tell("dlrover_restart_budget_spent_ratio", "Spent share of the restarts that a run may make, in all or in a row "+
		"without progress; of the run that has spent most, and has not ended.", most)
	tell("dlrover_checkpoint_memory_age_seconds",
		"Age of the oldest rank's newest checkpoint in memory, over all runs with a world; 0 without any.", memory)
	tell("dlrover_checkpoint_disk_age_seconds",
		"Age of the oldest rank's newest checkpoint on disk, over all runs with a world; 0 without any.", disk)
	for _, class := range ledger.Classes() {
		tell("dlrover_runs", "Runs that have not ended, by what they do now: the classes are those of dlrover_run_seconds.",
			float64(now[class]), string(class))
		tell("dlrover_run_seconds", "Time of the runs that this daemon keeps, by class: training, waiting and others.",
			times[class].Seconds(), string(class))
	}
}

// age is that of a checkpoint, in seconds; 0 without one.
func age(at time.Time) float64 {
	if at.IsZero() {
		return 0
	}
	return time.Since(at).Seconds()
}

// spent is the share of its restarts that a run has spent; 0 for one that may make none, or has ended.
func spent(s api.RunStatus) (share float64) {
	if s.Outcome != "" {
		return 0
	}
	if s.Params.MaxRestarts > 0 {
		share = float64(s.Restarts) / float64(s.Params.MaxRestarts)
	}
	if b := s.Budget; b != nil && b.Limit > 0 {
		count := b.Streak
		if b.SumCounts {
			count = b.Sum
		}
		share = max(share, float64(count)/float64(b.Limit))
	}
	return share
}

// watchChecks adds the results of node checks. Neither runs nor nodes are labels.
func (m *metrics) watchChecks(h *checks.Hub) {
	for _, state := range checks.States {
		m.reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "dlrover_check_verdicts_total", Help: "Nodes that a check has decided about, by verdict.",
			ConstLabels: prometheus.Labels{"state": string(state)},
		}, func() float64 { return float64(h.Stats().Verdicts[state]) }))
	}
	m.reg.MustRegister(
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "dlrover_check_excluded_total", Help: "Nodes that a check has left out of their jobs.",
		}, func() float64 { return float64(h.Stats().Excluded) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "dlrover_check_ended_total", Help: "Checks of nodes that have ended, of all runs.",
		}, func() float64 { return float64(h.Stats().Checks) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "dlrover_check_newest_seconds", Help: "How long the check of nodes took that ended last; 0 before any.",
		}, func() float64 { return h.Stats().Newest.Seconds() }))
}

// watchKeeper adds what is kept of the runs for later leaders.
func (m *metrics) watchKeeper(k *keeper.Keeper) {
	m.reg.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "dlrover_decisions_pending",
			Help: "Runs with changes that are not in the store yet, so that the next leader would not know them.",
		}, func() float64 { return float64(k.Stats().Pending) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "dlrover_decisions_failed_total",
			Help: "Writes of decisions about runs that have failed. They are tried again.",
		}, func() float64 { return float64(k.Stats().Failed) }))
}

// watchTraces adds those of --otlp-endpoint.
func (m *metrics) watchTraces(e *traces.Exporter) {
	m.reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "dlrover_trace_spans_lost_total", Help: "Spans that the collector of --otlp-endpoint has not taken.",
	}, func() float64 { return float64(e.Lost()) }))
}

// watchHangs adds suspicions and verdicts about the runs' workers. Neither runs nor nodes are labels.
func (m *metrics) watchHangs(h *hangs.Hub) {
	counter := func(name, help string, labels prometheus.Labels, value func(hangs.Stats) int) {
		m.reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels},
			func() float64 { return float64(value(h.Stats())) }))
	}
	for _, kind := range hangs.Kinds {
		counter("dlrover_hang_incident_verdicts_total", "Verdicts about hangs of all runs, by kind.",
			prometheus.Labels{"kind": string(kind)}, func(s hangs.Stats) int { return s.Verdicts[kind] })
	}
	for _, action := range []hang.Action{hang.ActRestart, hang.ActStop} {
		counter("dlrover_hang_orders_total", "Restarts and stops of runs because of hangs.",
			prometheus.Labels{"action": string(action)}, func(s hangs.Stats) int { return s.Orders[action] })
	}
	counter("dlrover_hang_incidents_total", "Incidents that were opened because nodes suspected a hang.", nil,
		func(s hangs.Stats) int { return s.Suspicions })
	counter("dlrover_hang_withdrawn_total", "Incidents that were no hang, or ended by themselves.", nil,
		func(s hangs.Stats) int { return s.Withdrawn })
	counter("dlrover_hang_reports_total", "Reports of nodes about their workers.", nil,
		func(s hangs.Stats) int { return s.Reports })
	counter("dlrover_hang_evidence_refused_total", "Reports whose evidence was dropped for lack of room.", nil,
		func(s hangs.Stats) int { return s.Refused })
	m.reg.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "dlrover_hang_runs", Help: "Runs that stand still: a hang of theirs counts, and is not over.",
		}, func() float64 { return float64(h.Standing()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "dlrover_hang_evidence_bytes", Help: "Bytes of memory that the kept evidence takes, about.",
		}, func() float64 { return float64(h.Stats().Held) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "dlrover_hang_detect_seconds", Help: "Time from the last progress to the newest verdict; 0 before any.",
		}, func() float64 { return h.Stats().Detect.Seconds() }))
}
