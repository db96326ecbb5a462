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

// An address on a network needs the token.
func TestWhoMayScrape(t *testing.T) {
	accepts := func(token string) bool { return token == "right" }
	for _, c := range []struct {
		addr    string
		accepts func(string) bool
		token   string
		status  int
	}{
		{"0.0.0.0:0", accepts, "", 401}, {"0.0.0.0:0", accepts, "wrong", 401}, {"0.0.0.0:0", accepts, "right", 200},
		{"0.0.0.0:0", nil, "", 200}, {"127.0.0.1:0", accepts, "", 200},
	} {
		m, err := Serve(c.addr, c.accepts)
		require.NoError(t, err)
		rec, req := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/metrics", nil)
		req.Header.Set("Authorization", "Bearer "+c.token)
		m.server.Handler.ServeHTTP(rec, req)
		require.Equal(t, c.status, rec.Code, "%+v", c)
		rec = httptest.NewRecorder()
		m.server.Handler.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/healthz", nil))
		require.Equal(t, "ok\n", rec.Body.String())
		require.NoError(t, m.Close())
	}
}

func TestMetricsObserve(t *testing.T) {
	m := newServer(nil)
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
