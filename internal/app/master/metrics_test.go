package master

import (
	"log/slog"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/app/service"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// Two requests within a second get the same bytes.
func TestThePageOfMetricsIsShared(t *testing.T) {
	m := newMetrics()
	p, now := &exposed{reg: m.reg}, time.Now()
	first, err := p.fresh(now)
	require.NoError(t, err)
	m.note(rendezvous.Note{Event: "join"})
	again, err := p.fresh(now.Add(pageTime - 1))
	require.NoError(t, err)
	require.Same(t, &first[0], &again[0])
	later, err := p.fresh(now.Add(pageTime))
	require.NoError(t, err)
	require.NotContains(t, string(first), `dlrover_rendezvous_events_total{event="join"} 1`)
	require.Contains(t, string(later), `dlrover_rendezvous_events_total{event="join"} 1`)
}

// What is registered has one prefix, beside the collectors of Go's client, and is in the reference.
func TestNamesOfMetrics(t *testing.T) {
	quiet := slog.New(slog.DiscardHandler)
	s, err := service.New(service.Config{Token: "0123456789abcdef", Log: quiet})
	require.NoError(t, err)
	t.Cleanup(func() { s.Close(0) })
	k, err := marks.Open(marks.Config{Log: quiet})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	m := newMetrics()
	m.watchAll(s, k)
	m.note(rendezvous.Note{Event: "join"})
	families, err := m.reg.Gather()
	require.NoError(t, err)
	docs, err := os.ReadFile("../../../docs/reference/reference.md")
	require.NoError(t, err)
	ours := 0
	for _, f := range families {
		if regexp.MustCompile(`^(go|process)_`).MatchString(f.GetName()) {
			continue
		}
		ours++
		require.True(t, strings.HasPrefix(f.GetName(), "dlrover_"), f.GetName())
		require.Contains(t, string(docs), "`"+f.GetName()+"`", "make docs")
	}
	require.Greater(t, ours, 20)
}

// The time of a run is in one class at a time.
func TestTimeOfRuns(t *testing.T) {
	s, err := service.New(service.Config{Token: "0123456789abcdef", Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { s.Close(0) })
	require.NoError(t, s.Hub.Join(t.Context(), "job", rendezvous.Join{
		Node: rendezvous.Node{ID: "n1", Name: "n1", Rank: -1, Slots: 1}, Params: rendezvous.Params{Min: 2, Max: 2}}))
	m := newMetrics()
	m.reg.MustRegister(runs{s.Hub, s.Checkpoints})
	time.Sleep(10 * time.Millisecond)
	text, err := (&exposed{reg: m.reg}).fresh(time.Now())
	require.NoError(t, err)
	require.Regexp(t, `dlrover_run_seconds\{class="waiting"\} \d*\.?\d*[1-9]`, string(text))
	require.Contains(t, string(text), `dlrover_run_seconds{class="training"} 0`)
	require.Contains(t, string(text), `dlrover_runs{class="waiting"} 1`)
	require.Contains(t, string(text), `dlrover_runs{class="training"} 0`)
}

// The age of checkpoints is that of what runs: the work of a run that is over is safe, or lost already.
func TestAgeOfCheckpoints(t *testing.T) {
	s, err := service.New(service.Config{Token: "0123456789abcdef", Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { s.Close(0) })
	require.NoError(t, s.Hub.Join(t.Context(), "job", rendezvous.Join{
		Node: rendezvous.Node{ID: "n1", Name: "n1", Rank: -1, Slots: 1}, Params: rendezvous.Params{Min: 1, Max: 1}}))
	server := httptest.NewServer(s.Checkpoints.Handler())
	t.Cleanup(server.Close)
	require.NoError(t, coordinator.Client(server.URL, "job", func() []string { return nil }, server.Client()).
		Ages(t.Context(), "", 0, []coordinator.Age{{DurableStep: 5, DurableAt: time.Now().Add(-time.Hour)}}))
	m := newMetrics()
	m.reg.MustRegister(runs{s.Hub, s.Checkpoints})
	told := func(at time.Time) string {
		text, err := (&exposed{reg: m.reg}).fresh(at)
		require.NoError(t, err)
		return string(text)
	}
	require.Regexp(t, `(?m)^dlrover_checkpoint_disk_age_seconds 36`, told(time.Now()))
	_, err = s.Hub.Leave(t.Context(), "job", rendezvous.Leave{ID: "n1"})
	require.NoError(t, err)
	require.Regexp(t, `(?m)^dlrover_checkpoint_disk_age_seconds 0$`, told(time.Now()))
}

func TestSpentShareOfRestarts(t *testing.T) {
	for name, c := range map[string]struct {
		s    rendezvous.Status
		want float64
	}{
		"none allowed": {rendezvous.Status{Budget: &rendezvous.BudgetStatus{Limit: -1, Streak: 4}}, 0},
		"in all":       {rendezvous.Status{Params: rendezvous.Params{MaxRestarts: 4}, Restarts: 3}, 0.75},
		"in a row":     {rendezvous.Status{Budget: &rendezvous.BudgetStatus{Limit: 10, Streak: 2, Sum: 9}}, 0.2},
		"all count":    {rendezvous.Status{Budget: &rendezvous.BudgetStatus{Limit: 10, Sum: 9, SumCounts: true}}, 0.9},
		"the larger": {rendezvous.Status{Params: rendezvous.Params{MaxRestarts: 4}, Restarts: 1,
			Budget: &rendezvous.BudgetStatus{Limit: 10, Streak: 9}}, 0.9},
		"ended": {rendezvous.Status{Params: rendezvous.Params{MaxRestarts: 4}, Restarts: 4, Outcome: "failed"}, 0},
	} {
		t.Run(name, func(t *testing.T) { require.InDelta(t, c.want, spent(api.RunStatus{Status: c.s}), 1e-9) })
	}
}
