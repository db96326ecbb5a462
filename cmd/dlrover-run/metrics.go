package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"dlrover-run/checkpointd/conns"
	"dlrover-run/launcher"
)

// metrics are this launcher's own, served at --metrics-addr.
type metrics struct {
	launcher.NopObserver

	server *http.Server
	done   chan struct{}
	reg    *prometheus.Registry
	starts *prometheus.CounterVec
	exits  *prometheus.CounterVec
	world  prometheus.Gauge
	spent  prometheus.Gauge
}

// scrapers bounds the connections at --metrics-addr, which asks nobody who he is.
const scrapers = 64

func metricsFeature() feature {
	var addr string
	return feature{
		name:     "metrics",
		settings: func(r *resolver) error { addr = r.c.String("metrics-addr"); return nil },
		open: func(j *job) (launcher.Part, error) {
			if addr == "" {
				return nil, nil
			}
			m, err := serveMetrics(addr)
			if err != nil {
				return nil, unusableOption(err)
			}
			j.metrics = m.reg
			return m, nil
		},
	}
}

// serveMetrics serves /metrics and /healthz at addr.
func serveMetrics(addr string) (*metrics, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("--metrics-addr=%s: %w", addr, err)
	}
	l = conns.Listen(l, conns.Limits{Total: scrapers, Unproven: scrapers}, slog.Default())
	m := newMetrics()
	go func() {
		defer close(m.done)
		if err := m.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			slog.Default().Warn("metrics", "err", err)
		}
	}()
	return m, nil
}

func newMetrics() *metrics {
	m := &metrics{
		done: make(chan struct{}),
		starts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dlrover_worker_group_starts_total",
			Help: "Starts of this node's workers, by what ended the epoch before (empty for the first).",
		}, []string{"cause"}),
		exits: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dlrover_worker_exits_total",
			Help: "Workers that ended, by exit code (-n for signal n) and whether the launcher had stopped them.",
		}, []string{"exit_code", "stopped"}),
		world: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "dlrover_world_size", Help: "Workers in the world that this node runs in.",
		}),
		spent: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "dlrover_restart_count", Help: "Restarts that the job has spent.",
		}),
	}
	m.reg = prometheus.NewRegistry()
	m.reg.MustRegister(m.starts, m.exits, m.world, m.spent)
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(m.reg, promhttp.HandlerOpts{}))
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	m.server = &http.Server{
		Handler: mux, ReadTimeout: 10 * time.Second, WriteTimeout: time.Minute, IdleTimeout: 3 * time.Minute,
	}
	return m
}

// Started implements launcher.Observer.
func (m *metrics) Started(i launcher.StartInfo) {
	m.starts.WithLabelValues(i.Epoch.CauseKind).Inc()
	m.world.Set(float64(i.Epoch.Place.WorldSize))
	m.spent.Set(float64(i.Epoch.Place.RestartCount))
}

// Exited implements launcher.Observer.
func (m *metrics) Exited(i launcher.ExitInfo) {
	m.exits.WithLabelValues(strconv.Itoa(i.ExitCode), strconv.FormatBool(i.Stopped)).Inc()
}

// Name implements launcher.Part.
func (m *metrics) Name() string { return "metrics" }

func (m *metrics) close() error {
	err := m.server.Close()
	<-m.done
	return err
}
