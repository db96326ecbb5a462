package exposition

import (
	"bytes"
	"math"
	"net/http"
	"net/http/httptest"
	"testing"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"
)

// clients is what Prometheus' own client writes of what its registry holds.
func clients(t *testing.T, collectors ...prometheus.Collector) string {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(collectors...)
	families, err := reg.Gather()
	require.NoError(t, err)
	var b bytes.Buffer
	for _, f := range families {
		_, err := expfmt.MetricFamilyToText(&b, f)
		require.NoError(t, err)
	}
	return b.String()
}

func TestTextIsThatOfPrometheusClient(t *testing.T) {
	const help = "Help with \\ and \n and \"."
	exits := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "exits_total", Help: help}, []string{"code", "why"})
	exits.WithLabelValues("-9", "a\\b\n\"c\"").Add(2)
	exits.WithLabelValues("1", "").Inc()
	world := prometheus.NewGauge(prometheus.GaugeOpts{Name: "aworld", Help: "Workers."})
	world.Set(-1.5e-9)
	large := prometheus.NewGauge(prometheus.GaugeOpts{Name: "large_bytes", Help: "Bytes."})
	large.Set(1 << 60)

	var s Scrape
	s.Gauge("large_bytes", "Bytes.", 1<<60)
	s.Counter("exits_total", help, 1, Label{"code", "1"}, Label{"why", ""})
	s.Counter("exits_total", help, 1, Label{"code", "-9"}, Label{"why", "a\\b\n\"c\""})
	s.Counter("exits_total", help, 2, Label{"code", "-9"}, Label{"why", "a\\b\n\"c\""})
	s.Gauge("aworld", "Workers.", -1.5e-9)
	require.Equal(t, clients(t, exits, world, large), string(s.Text()))
}

func TestHandler(t *testing.T) {
	n := 0.0
	h := Handler(func(s *Scrape) { n++; s.Counter("scrapes_total", "Scrapes.", n) })
	for _, want := range []string{"scrapes_total 1\n", "scrapes_total 2\n"} {
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		require.Contains(t, rec.Body.String(), want)
		format := expfmt.ResponseFormat(rec.Header())
		require.Equal(t, expfmt.TypeTextPlain, format.FormatType())
		require.Equal(t, string(expfmt.NewFormat(expfmt.TypeTextPlain)), string(format))
	}
}

func TestNothingToTell(t *testing.T) {
	var s Scrape
	require.Empty(t, s.Text())
}

// FuzzText has Prometheus read what was written.
func FuzzText(f *testing.F) {
	f.Add("a\\\n\"b\xff", "help \\ \n", 1.5)
	f.Add("", "", math.Inf(-1))
	f.Add("{}", "# TYPE x counter", math.NaN())
	f.Fuzz(func(t *testing.T, value, help string, v float64) {
		var s Scrape
		s.Gauge("x", help, v, Label{"l", value}, Label{"m", ""})
		parser := expfmt.NewTextParser(model.LegacyValidation)
		families, err := parser.TextToMetricFamilies(bytes.NewReader(s.Text()))
		require.NoError(t, err, "%s", s.Text())
		require.Len(t, families, 1)
		require.Len(t, families["x"].Metric, 1)
		m := families["x"].Metric[0]
		require.Equal(t, math.Float64bits(v) == math.Float64bits(m.GetGauge().GetValue()) || math.IsNaN(v), true)
		if utf8.ValidString(value) {
			require.Equal(t, value, m.Label[0].GetValue())
		}
	})
}
