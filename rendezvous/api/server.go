package api

import (
	"context"
	"crypto/subtle"
	"dlrover-run/rendezvous"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// ServerConfig describes the HTTP side of a Hub.
type ServerConfig struct {
	// Token, when not empty, must come as "Authorization: Bearer <token>" with every
	// request but /healthz and those of Extra.
	Token string
	// Checkpoints serves what is below /v1/runs/{run}/checkpoints, with the token
	// checked; nil serves nothing.
	Checkpoints http.Handler
	// Extra serves what is not part of the API, such as /metrics; nil serves nothing.
	Extra http.Handler
}

// Handler serves h over HTTP.
func Handler(h *Hub, cfg ServerConfig) http.Handler {
	s := &server{hub: h, cfg: cfg}
	api := http.NewServeMux()
	api.HandleFunc("POST /v1/runs/{run}/join", s.wrap(s.join))
	api.HandleFunc("GET /v1/runs/{run}/watch", s.wrap(s.watch))
	api.HandleFunc("POST /v1/runs/{run}/ready", s.wrap(s.report))
	api.HandleFunc("POST /v1/runs/{run}/failing", s.wrap(s.report))
	api.HandleFunc("POST /v1/runs/{run}/success", s.wrap(s.report))
	api.HandleFunc("POST /v1/runs/{run}/leave", s.wrap(s.leave))
	api.HandleFunc("GET /v1/runs/{run}/world", s.wrap(s.world))
	api.HandleFunc("GET /v1/runs", s.wrap(s.runs))
	if cfg.Checkpoints != nil {
		api.HandleFunc("/v1/runs/{run}/checkpoints/", s.checkpoints)
		api.HandleFunc("/v1/runs/{run}/checkpoints", s.checkpoints)
	}
	top := http.NewServeMux()
	top.Handle("/v1/", api)
	top.HandleFunc("GET /healthz", brief(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") }))
	if cfg.Extra != nil {
		top.HandleFunc("/", brief(cfg.Extra.ServeHTTP))
	}
	return top
}

// brief bounds how long a body is read that nobody asked for.
func brief(f http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		limitBody(w)
		f(w, req)
	}
}

// limitBody bounds the reading of this request; net/http sets the deadline anew for the next one.
func limitBody(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(requestTimeout))
}

// NewServer returns an http.Server with timeouts that suit long-polls: a peer must
// send its header promptly, may then wait for as long as a Watch is held, and an
// idle connection outlives the pause between two polls. A connection that has a method
// Prove(bool) hears when its peer has shown the token.
func NewServer(handler http.Handler) *http.Server {
	return &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 3 * time.Minute, MaxHeaderBytes: 16 << 10,
		ConnContext: func(ctx context.Context, nc net.Conn) context.Context {
			if p, ok := nc.(prover); ok {
				ctx = context.WithValue(ctx, proverKey{}, p)
			}
			return ctx
		},
	}
}

type (
	prover    interface{ Prove(bool) }
	proverKey struct{}
)

// keepAlive makes the kernel notice a peer that is gone without a word after 14
// seconds: five of silence and three unanswered probes.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 3 * time.Second, Count: 3}

// Listen binds a TCP address for Handler.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	return lc.Listen(ctx, "tcp", addr)
}

type server struct {
	hub *Hub
	cfg ServerConfig
}

// wrap checks the token and turns the returned value or error into JSON.
func (s *server) wrap(f func(*http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodPost {
			limitBody(w)
		}
		v, err := any(nil), s.authorize(w, req)
		if err == nil {
			v, err = f(req)
		}
		switch {
		case errors.Is(err, ErrNothingNew):
			w.WriteHeader(http.StatusNoContent)
		case err != nil:
			status, code := statusOf(err)
			writeJSON(w, status, errorBody{Code: code, Error: err.Error()})
		default:
			writeJSON(w, http.StatusOK, v)
		}
	}
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the peer may be gone; it asks again
}

// authorize checks the token. A connection that showed the right one is known from then on, and any other ends.
func (s *server) authorize(w http.ResponseWriter, req *http.Request) error {
	err := s.checkToken(req)
	if err != nil {
		w.Header().Set("Connection", "close")
		limitBody(w)
	} else if p, ok := req.Context().Value(proverKey{}).(prover); ok {
		p.Prove(true)
	}
	return err
}

func (s *server) checkToken(req *http.Request) error {
	if s.cfg.Token == "" {
		return nil
	}
	got, ok := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
	if !ok {
		return fmt.Errorf("%w: the request carries none; set DLROVER_TOKEN, DLROVER_TOKEN_FILE or --token-file on every node", ErrUnauthorized)
	}
	if subtle.ConstantTimeCompare([]byte(got), []byte(s.cfg.Token)) != 1 {
		return fmt.Errorf("%w: it differs from the daemon's; use the same token on every node", ErrUnauthorized)
	}
	return nil
}

// maxRunName bounds a run id, which is any text that rendezvous.Printable takes.
const maxRunName = 256

func runName(req *http.Request) (string, error) {
	name := req.PathValue("run")
	if name == "" || name == "." || name == ".." || len(name) > maxRunName || !rendezvous.Printable(name) {
		return "", fmt.Errorf("%w: run id %.40q: %s, 1 to %d bytes, and neither \".\" nor \"..\" alone", ErrBadRequest, name, rendezvous.PrintableRule, maxRunName)
	}
	return name, nil
}

func decode[T any](req *http.Request) (run string, body T, err error) {
	if run, err = runName(req); err != nil {
		return run, body, err
	}
	if err = json.NewDecoder(http.MaxBytesReader(nil, req.Body, MaxBody)).Decode(&body); err != nil {
		err = fmt.Errorf("%w: %s %s: %w", ErrBadRequest, req.Method, req.URL.Path, err)
	}
	return run, body, err
}

// checkpoints passes on what the rendezvous does not understand.
func (s *server) checkpoints(w http.ResponseWriter, req *http.Request) {
	if err := s.authorize(w, req); err != nil {
		status, code := statusOf(err)
		writeJSON(w, status, errorBody{Code: code, Error: err.Error()})
		return
	}
	s.cfg.Checkpoints.ServeHTTP(w, req)
}

func (s *server) join(req *http.Request) (any, error) {
	run, b, err := decode[joinBody](req)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	ev := rendezvous.Join{Node: b.Node, Params: b.Params, Failures: shift(b.Failures, b.SentAt, now), Stopped: b.Stopped, Seen: b.Seen, Restarts: b.Restarts, Resume: b.Resume}
	if b.Resume != nil {
		shift(b.Resume.Failures, b.SentAt, now)
	}
	return struct{}{}, s.hub.Join(req.Context(), run, ev)
}

func (s *server) watch(req *http.Request) (any, error) {
	run, err := runName(req)
	if err != nil {
		return nil, err
	}
	q := req.URL.Query()
	after, err := strconv.ParseUint(q.Get("after"), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%w: after=%q: need a number", ErrBadRequest, q.Get("after"))
	}
	return s.hub.Watch(req.Context(), run, q.Get("node"), after)
}

func (s *server) report(req *http.Request) (any, error) {
	run, b, err := decode[reportBody](req)
	if err != nil {
		return nil, err
	}
	return struct{}{}, s.hub.Report(req.Context(), run, eventOf(req.URL.Path, b))
}

func eventOf(path string, b reportBody) rendezvous.Event {
	switch path[strings.LastIndexByte(path, '/')+1:] {
	case "ready":
		return rendezvous.Ready{ID: b.ID, EpochID: b.EpochID, Addr: b.Addr, Port: b.Port}
	case "success":
		return rendezvous.Success{ID: b.ID, EpochID: b.EpochID}
	default:
		return rendezvous.Failing{ID: b.ID, EpochID: b.EpochID, Decision: b.Decision, Failures: shift(b.Failures, b.SentAt, time.Now())}
	}
}

func (s *server) leave(req *http.Request) (any, error) {
	run, b, err := decode[reportBody](req)
	if err != nil {
		return nil, err
	}
	return s.hub.Leave(req.Context(), run, rendezvous.Leave{ID: b.ID, Reason: b.Reason, Failures: shift(b.Failures, b.SentAt, time.Now())})
}

func (s *server) world(req *http.Request) (any, error) {
	run, err := runName(req)
	if err != nil {
		return nil, err
	}
	return s.hub.World(req.Context(), run)
}

func (s *server) runs(*http.Request) (any, error) { return s.hub.Runs(true), nil }
