// Package metrics serves the metrics of a launcher.
package metrics

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"dlrover-run/internal/conns"
	"dlrover-run/internal/exposition"
	"dlrover-run/launcher"
)

// Server serves the metrics of this launcher, and those of features.
type Server struct {
	server *http.Server
	done   chan struct{}

	mu     sync.Mutex
	starts map[string]int // of the workers, by cause
	exits  map[exit]int
	world  int
	spent  int
	more   []func(*exposition.Scrape) // the metrics of parts
}

// exit is how a worker ended.
type exit struct {
	code    int
	stopped bool // by the launcher
}

// scrapers bounds the connections at --metrics-addr.
const scrapers = 64

// Serve serves /healthz at addr, and /metrics to requests with a token that is accepted; nil: to all. An address on
// loopback needs none.
func Serve(addr string, accepts func(token string) bool) (*Server, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("--metrics-addr=%s: %w", addr, err)
	}
	l = conns.Listen(l, conns.Limits{Total: scrapers, Unproven: scrapers}, slog.Default())
	if l.Addr().(*net.TCPAddr).IP.IsLoopback() {
		accepts = nil
	}
	m := newServer(accepts)
	go func() {
		defer close(m.done)
		if err := m.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			slog.Default().Warn("metrics", "err", err)
		}
	}()
	return m, nil
}

func newServer(accepts func(token string) bool) *Server {
	m := &Server{done: make(chan struct{}), starts: map[string]int{}, exits: map[exit]int{}}
	mux := http.NewServeMux()
	mux.Handle("/metrics", guarded(exposition.Handler(m.tell), accepts))
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	m.server = &http.Server{
		Handler: mux, ReadTimeout: 10 * time.Second, WriteTimeout: time.Minute, IdleTimeout: 3 * time.Minute,
	}
	return m
}

func guarded(next http.Handler, accepts func(token string) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		got, _ := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
		if accepts == nil || accepts(got) {
			next.ServeHTTP(w, req)
			return
		}
		http.Error(w, "metrics need the job token: Authorization: Bearer TOKEN, or --open-metrics", http.StatusUnauthorized)
	})
}

// Add adds a callback for every later scrape. Several goroutines may call it at once.
func (m *Server) Add(tell func(*exposition.Scrape)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.more = append(m.more, tell)
}

func (m *Server) tell(s *exposition.Scrape) {
	for _, tell := range m.tellOwn(s) {
		tell(s)
	}
}

// tellOwn writes the launcher's own metrics and returns the callbacks of the parts, which may take time.
func (m *Server) tellOwn(s *exposition.Scrape) (more []func(*exposition.Scrape)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for cause, n := range m.starts {
		s.Counter("dlrover_worker_group_starts_total",
			"Starts of this node's workers, by what ended the epoch before (empty for the first).",
			float64(n), exposition.Label{Name: "cause", Value: cause})
	}
	for e, n := range m.exits {
		s.Counter("dlrover_worker_exits_total",
			"Workers that ended, by exit code (-n for signal n) and whether the launcher had stopped them.", float64(n),
			exposition.Label{Name: "exit_code", Value: strconv.Itoa(e.code)},
			exposition.Label{Name: "stopped", Value: strconv.FormatBool(e.stopped)})
	}
	s.Gauge("dlrover_world_size", "Workers in the world that this node runs in.", float64(m.world))
	s.Gauge("dlrover_restart_count", "Restarts that the job has spent.", float64(m.spent))
	return slices.Clip(m.more)
}

// Observe counts an event of the launcher.
func (m *Server) Observe(e launcher.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch i := e.(type) {
	case launcher.StartInfo:
		m.starts[string(i.Epoch.Cause.Kind)]++
		m.world, m.spent = i.Epoch.Place.WorldSize, i.Epoch.Place.RestartCount
	case launcher.ExitInfo:
		m.exits[exit{i.ExitCode, i.Stopped}]++
	}
}

// Close ends the server.
func (m *Server) Close() error {
	err := m.server.Close()
	<-m.done
	return err
}
