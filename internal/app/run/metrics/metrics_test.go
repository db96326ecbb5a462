package metrics

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/run/feature/featuretest"
)

// scrape is what m answers.
func scrape(m *Server) string {
	rec := httptest.NewRecorder()
	m.server.Handler.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	return rec.Body.String()
}

func TestMetricsObserve(t *testing.T) {
	m := newServer()
	require.Contains(t, scrape(m), "\ndlrover_world_size 0\n")
	for _, events := range featuretest.Events {
		for _, e := range events {
			m.Observe(e)
		}
	}
	for _, want := range []string{
		`dlrover_worker_group_starts_total{cause="worker-failure"} 1`,
		`dlrover_worker_exits_total{exit_code="-9",stopped="true"} 1`,
		`dlrover_world_size 4`,
		`dlrover_restart_count 3`,
	} {
		require.Contains(t, scrape(m), want+"\n")
	}
	featuretest.WellNamed(t, m.tell, 1) // dlrover_restart_count, which dashboards know
}
