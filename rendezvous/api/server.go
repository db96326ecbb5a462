package api

import (
	"cmp"
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/longpoll"
	"dlrover-run/internal/plainhttp"
	"dlrover-run/internal/secure"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
)

// ServerConfig describes the HTTP side of a Hub.
type ServerConfig struct {
	// Token, when not empty, must come as "Authorization: Bearer <token>" with every request but /healthz and those of
	// Extra. Without one only processes of the same user, on this host, are served.
	Token string
	// Accepted are the tokens that are right now, where that changes; nil: Token alone is.
	Accepted func() []string
	// Insecure serves everyone without a Token.
	Insecure bool
	// Peers are other hosts with launchers that are served, too, without a Token; nil: none. PeerCalls are the requests of
	// launchers to Mounts, by method and path after the run, such as "POST checks/next".
	Peers     *Peers
	PeerCalls []string
	// Standby is why requests that have shown the token are not served, but for those to the mount Vote; nil: they are.
	Standby func() error
	// Name is a name by which callers reach this server, besides localhost and the host's.
	Name string
	// Mounts serve /v1/runs/{run}/NAME and all paths below, with the token and the run's id checked: a handler finds the
	// id as PathValue("run") and the whole path in the URL, and bounds bodies, and times to read them, itself. A NAME is
	// one segment of a path, and not one of the API's own.
	Mounts map[string]http.Handler
	// Python serves agents of DLRover, which know no token, at /get and /report, and below /elastic.Master/, which alone
	// is served by HTTP/2; nil serves none.
	Python http.Handler
	// Global serves /v1/NAME and all paths below, with the token checked: as Mounts, but for no run.
	Global map[string]http.Handler
	// Metrics serves /metrics with the token checked; nil: Extra may serve it without.
	Metrics http.Handler
	// Page serves browsers, below /ui/. It checks tokens itself; without one only browsers of the same user, on this host,
	// get there. Nil serves none.
	Page http.Handler
	// Extra serves paths outside the API; nil serves nothing.
	Extra http.Handler
}

// route is one request that the API knows.
type route struct {
	method, path string
	serve        http.HandlerFunc
}

const runPath = "/v1/runs/{run}/"

func (s *server) routes() []route {
	return []route{
		{http.MethodPost, runPath + "join", s.join},
		{http.MethodGet, runPath + "watch", s.watch},
		{http.MethodPost, runPath + "ready", s.answer(s.ready)},
		{http.MethodPost, runPath + "failing", s.answer(s.failing)},
		{http.MethodPost, runPath + "success", s.answer(s.success)},
		{http.MethodPost, runPath + "stepped", s.answer(s.stepped)},
		{http.MethodPost, runPath + "cleared", s.answer(s.cleared)},
		{http.MethodPost, runPath + "barred", s.answer(s.barred)},
		{http.MethodPost, runPath + "doubt", s.answer(s.doubt)},
		{http.MethodPost, runPath + "leaving", s.answer(s.leaving)},
		{http.MethodPost, runPath + "leave", s.answer(s.leave)},
		{http.MethodGet, runPath + "world", s.answer(s.world)},
		{http.MethodGet, runPath + "events", s.events},
		{http.MethodPost, runPath + "orders", s.answer(s.order)},
		{http.MethodPost, runPath + "notices", s.answer(s.notify)},
		{http.MethodPost, runPath + "forget", s.answer(s.forget)},
		{http.MethodGet, "/v1/runs", s.answer(s.runs)},
		{http.MethodGet, plainhttp.LeaderPath, s.answer(s.leader)},
	}
}

// Handler serves h over HTTP. It panics when a name of cfg.Mounts or cfg.Global cannot be one.
func Handler(h *Hub, cfg ServerConfig) http.Handler {
	s := &server{hub: h, cfg: cfg, limits: newLimits()}
	api := http.NewServeMux()
	for _, r := range s.routes() {
		api.HandleFunc(r.method+" "+r.path, r.serve)
		api.HandleFunc(r.path, s.wrongMethod(r.method))
	}
	for name, m := range cfg.Mounts {
		if name == "" || strings.ContainsAny(name, "/{} \t") {
			panic(fmt.Sprintf("api: mount %q: need one segment of a path", name))
		}
		api.HandleFunc(runPath+name, s.mounted(m))
		api.HandleFunc(runPath+name+"/", s.mounted(m))
	}
	for name, g := range cfg.Global {
		if name == "" || name == "runs" || strings.ContainsAny(name, "/{} \t") {
			panic(fmt.Sprintf("api: global %q: need one segment of a path, and not runs", name))
		}
		api.Handle("/v1/"+name, g)
		api.Handle("/v1/"+name+"/", g)
	}
	api.HandleFunc("/", s.answer(func(req *http.Request) (any, error) {
		return nil, fmt.Errorf("%w: %s %s", ErrNotFound, req.Method, req.URL.Path)
	}))
	programs := programsOnly(s.guard(api))
	top := http.NewServeMux()
	top.HandleFunc("/healthz", s.wrongMethod(http.MethodGet))
	top.HandleFunc("GET /healthz", brief(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") }))
	if cfg.Metrics != nil {
		top.HandleFunc("GET /metrics", brief(s.guard(cfg.Metrics)))
	}
	if cfg.Page != nil {
		top.HandleFunc("/ui/", s.visitors(cfg.Page))
	}
	if cfg.Extra != nil {
		top.HandleFunc("/", brief(cfg.Extra.ServeHTTP))
	}
	const calls = "/elastic.Master/"
	if cfg.Python != nil {
		for _, path := range []string{calls, "/get", "/report"} {
			top.Handle(path, programsOnly(cfg.Python))
		}
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch {
		case req.ProtoMajor > 1 && !strings.HasPrefix(req.URL.Path, calls):
			w.WriteHeader(http.StatusHTTPVersionNotSupported) // without a body, for which the peer may have no window
		case strings.HasPrefix(req.URL.Path, "/v1/"): // nearly all requests
			programs.ServeHTTP(w, req)
		default:
			top.ServeHTTP(w, req)
		}
	})
}

// brief bounds the time to read an unwanted body.
func brief(f http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		limitBody(w)
		f(w, req)
	}
}

// Trust marks the connection of a request as trusted: its peer has authenticated itself by other means than the token.
func Trust(ctx context.Context) {
	if c := lineOf(ctx); c != nil {
		c.Prove(true)
	} else if p, ok := ctx.Value(proverKey{}).(prover); ok {
		p.Prove(true)
	}
}

// limitBody bounds the reading of this request; net/http sets the deadline anew for the next one.
func limitBody(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(requestTimeout))
}

// NewServer returns an http.Server with timeouts that suit long-polls. A peer must send its header promptly, and may
// then wait for as long as a Watch is held, a minute at most. It has another minute to take the answer, unless its
// handler gives it more. An idle connection outlives the pause between two polls. If a connection has a method
// Prove(bool), it is called once its peer has shown the token.
func NewServer(handler http.Handler) *http.Server {
	return &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, WriteTimeout: answerTime, IdleTimeout: 3 * time.Minute,
		MaxHeaderBytes: 16 << 10,
		ConnContext: func(ctx context.Context, nc net.Conn) context.Context {
			if c, ok := nc.(*line); ok {
				return context.WithValue(ctx, lineKey{}, c)
			}
			if p, ok := nc.(prover); ok {
				ctx = context.WithValue(ctx, proverKey{}, p)
			}
			return ctx
		},
	}
}

// answerTime is from a request's header to the end of its answer.
const answerTime = 2 * time.Minute

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
	hub    *Hub
	cfg    ServerConfig
	held   longpoll.Pool // of watches
	limits *limits
}

// guard is the one place where the token is checked, and requests are counted. A connection that showed the right token
// is known from then on, and any other ends.
func (s *server) guard(next http.Handler) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		err := certified(req)
		if err == nil {
			err = s.checkToken(req)
		}
		if err == nil {
			err = checkMedia(req)
		}
		if err != nil {
			turnAway(w, s.limits.refused(req, err))
			return
		}
		Trust(req.Context())
		if err = s.limits.served(req); err == nil {
			err = s.standby(req)
		}
		if err != nil {
			turnAway(w, err)
			return
		}
		s.limits.serve(next, w, req)
	}
}

// errCertificate: the server requires a certificate of its callers.
var errCertificate = errors.New("TLS")

// certified returns why a launcher is not served whose server requires a certificate. It may try again: files change.
func certified(req *http.Request) error {
	if c := lineOf(req.Context()); c != nil {
		if err := secure.Check(c); err != nil {
			return fmt.Errorf("%w: %w", errCertificate, err)
		}
	}
	return nil
}

// Vote is the name of the mount at which launchers elect the one that serves. It is served on standby, too.
const Vote = "vote"

func (s *server) standby(req *http.Request) error {
	rest, isRun := strings.CutPrefix(req.URL.EscapedPath(), "/v1/runs/")
	_, call, _ := strings.Cut(rest, "/")
	if s.cfg.Standby == nil || isRun && call == Vote {
		return nil
	}
	return s.cfg.Standby()
}

// answer turns the returned value or error into JSON.
func (s *server) answer(f func(*http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		if req.Method != http.MethodGet && req.Method != http.MethodHead { // which may be held
			limitBody(w)
		}
		v, err := f(req)
		writeAnswer(w, v, err)
	}
}

func (s *server) wrongMethod(right string) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		limitBody(w)
		refuseMethod(w, req, right)
	}
}

// mounted passes on paths that the rendezvous does not serve.
func (s *server) mounted(next http.Handler) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		if _, err := runName(req); err != nil {
			limitBody(w)
			wireErrors.Write(w, err)
			return
		}
		next.ServeHTTP(w, req)
	}
}

func writeAnswer(w http.ResponseWriter, v any, err error) {
	switch {
	case errors.Is(err, ErrNothingNew):
		w.WriteHeader(http.StatusNoContent)
	case err != nil:
		wireErrors.Write(w, err)
	default:
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v) // the peer may be gone; it asks again
	}
}

func (s *server) checkToken(req *http.Request) error {
	if s.cfg.Token == "" {
		if err := s.checkHost(req, "none"); err != nil {
			return err
		}
		return s.checkUser(req)
	}
	got, ok := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
	if !ok {
		const fix = "set DLROVER_TOKEN, DLROVER_TOKEN_FILE or --token-file on every node"
		return fmt.Errorf("%w: the request carries none; %s", ErrUnauthorized, fix)
	}
	if !s.accepts(got) {
		return fmt.Errorf("%w: it differs from the daemon's; use the same token on every node", ErrUnauthorized)
	}
	return nil
}

func (s *server) accepts(got string) (ok bool) {
	all := []string{s.cfg.Token}
	if s.cfg.Accepted != nil {
		all = s.cfg.Accepted()
	}
	for _, token := range all {
		ok = subtle.ConstantTimeCompare([]byte(got), []byte(token)) == 1 || ok
	}
	return ok
}

// maxRunName bounds a run id, which is any text that text.Printable takes.
const maxRunName = 256

func runName(req *http.Request) (string, error) {
	name := req.PathValue("run")
	if name == "" || name == "." || name == ".." || len(name) > maxRunName || !text.Printable(name) {
		return "", fmt.Errorf("%w: run id %.40q: %s, 1 to %d bytes, and neither \".\" nor \"..\" alone",
			ErrBadRequest, name, text.PrintableRule, maxRunName)
	}
	return name, nil
}

func decode[T any](req *http.Request) (run string, body T, err error) {
	if run, err = runName(req); err != nil {
		return run, body, err
	}
	if err = readJSON(req, &body); err != nil {
		err = fmt.Errorf("%w: %s %s: %w", ErrBadRequest, req.Method, req.URL.Path, err)
	}
	return run, body, err
}

func readJSON(req *http.Request, into any) (bad error) {
	err := longpoll.ReadBody(http.MaxBytesReader(nil, req.Body, maxBody),
		func(body []byte) { bad = json.Unmarshal(body, into) })
	return cmp.Or(err, bad)
}

// number reads a sequence number from a query. An absent one is 0 if that is allowed.
func number(q url.Values, name string, optional bool) (uint64, error) {
	if optional && !q.Has(name) {
		return 0, nil
	}
	n, err := strconv.ParseUint(q.Get(name), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%w: %s=%.40q: need a number", ErrBadRequest, name, q.Get(name))
	}
	return n, nil
}

// join answers at once or, if the query has a cursor, as watch does.
func (s *server) join(w http.ResponseWriter, req *http.Request) {
	limitBody(w)
	q := watchQuery{}
	var err error
	values := req.URL.Query()
	watches := values.Has("after")
	if watches {
		q, err = readWatch(req, values)
	}
	if err == nil {
		q.run, q.node, err = s.enter(req)
	}
	if err != nil || !watches {
		writeAnswer(w, struct{}{}, err)
		return
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // that of the body
	s.await(w, req, q)
}

// enter has a node join a run.
func (s *server) enter(req *http.Request) (run, id string, err error) {
	run, b, err := decode[joinBody](req)
	if err != nil {
		return run, "", err
	}
	b.Node.Peer, b.Node.Via = ends(req)
	now := time.Now()
	shift(b.Failures, b.SentAt, now)
	if b.Resume != nil {
		shift(b.Resume.Failures, b.SentAt, now)
	}
	if err = s.hub.Join(req.Context(), run, b.Join); err == nil && !req.Close {
		lineOf(req.Context()).watched(s.hub, run, b.Node.ID)
	}
	return run, b.Node.ID, err
}

// ends are the addresses of a request's connection: the peer's and our own.
func ends(req *http.Request) (peer, own string) {
	local, _ := req.Context().Value(http.LocalAddrContextKey).(net.Addr)
	return bare(req.RemoteAddr), bare(fmt.Sprint(local))
}

// bare is the address in text, without its port and zone; "" if there is none.
func bare(text string) string {
	a, err := netip.ParseAddrPort(text)
	if err != nil {
		return ""
	}
	return a.Addr().Unmap().WithZone("").String()
}

func (s *server) watch(w http.ResponseWriter, req *http.Request) {
	q, err := readWatch(req, req.URL.Query())
	if err != nil {
		writeAnswer(w, nil, err)
		return
	}
	s.await(w, req, q)
}

// await answers when there are news.
func (s *server) await(w http.ResponseWriter, req *http.Request, q watchQuery) {
	v, hold, err := begin(s.hub, q.run, q.node, q.after, lineOf(req.Context()))
	if err != nil {
		writeAnswer(w, nil, err)
		return
	}
	n, err := v.run.news(q.node, v.after)
	if n == nil && err == nil {
		if c := s.held.Take(w, req); c != nil {
			v.hold(c, hold)
			return
		}
		n, err = v.run.await(req.Context(), q.node, v.after, hold)
	}
	n, err = v.end(n, err, err != nil && req.Context().Err() != nil)
	writeAnswer(w, n, err)
}

type watchQuery struct {
	run, node string
	after     Cursor
}

func readWatch(req *http.Request, q url.Values) (w watchQuery, err error) {
	if w.run, err = runName(req); err != nil {
		return w, err
	}
	w.node = q.Get("node")
	if w.after.Directive, err = number(q, "after", false); err != nil {
		return w, err
	}
	w.after.WithNotices = q.Has("notices")
	if w.after.Notices, err = number(q, "notices", true); err != nil {
		return w, err
	}
	ms, err := number(q, "waits", true)
	w.after.Waits = time.Duration(min(ms, 60_000)) * time.Millisecond
	return w, err
}

// report decodes a body and reports the event that is in it.
func report[B any](s *server, req *http.Request, event func(B) rendezvous.Event) (any, error) {
	run, b, err := decode[B](req)
	if err != nil {
		return nil, err
	}
	return struct{}{}, s.hub.Report(req.Context(), run, event(b))
}

func (s *server) ready(req *http.Request) (any, error) {
	return report(s, req, func(b readyBody) rendezvous.Event { return b.Ready })
}

func (s *server) success(req *http.Request) (any, error) {
	return report(s, req, func(b successBody) rendezvous.Event { return b.Success })
}

func (s *server) stepped(req *http.Request) (any, error) {
	return report(s, req, func(b rendezvous.Stepped) rendezvous.Event { return b })
}

func (s *server) failing(req *http.Request) (any, error) {
	return report(s, req, func(b failingBody) rendezvous.Event {
		shift(b.Failures, b.SentAt, time.Now())
		return b.Failing
	})
}

func (s *server) cleared(req *http.Request) (any, error) {
	return report(s, req, func(b clearedBody) rendezvous.Event {
		b.Until = shifted(b.Until, b.SentAt, time.Now())
		return b.Cleared
	})
}

func (s *server) barred(req *http.Request) (any, error) {
	return report(s, req, func(b rendezvous.Barred) rendezvous.Event { return b })
}

func (s *server) doubt(req *http.Request) (any, error) {
	return report(s, req, func(b rendezvous.Doubt) rendezvous.Event { return b })
}

func (s *server) leaving(req *http.Request) (any, error) {
	return report(s, req, func(b rendezvous.Leaving) rendezvous.Event { return b })
}

func (s *server) leave(req *http.Request) (any, error) {
	run, b, err := decode[leaveBody](req)
	if err != nil {
		return nil, err
	}
	shift(b.Failures, b.SentAt, time.Now())
	return s.hub.Leave(req.Context(), run, b.Leave)
}

func (s *server) world(req *http.Request) (any, error) {
	run, err := runName(req)
	if err != nil {
		return nil, err
	}
	return s.hub.World(req.Context(), run)
}

func (s *server) order(req *http.Request) (any, error) {
	run, o, err := decode[rendezvous.Order](req)
	if err != nil {
		return nil, err
	}
	if o.Command != nil && s.cfg.Token == "" {
		return nil, fmt.Errorf("%w: whoever gives a command executes it on all nodes, so the daemon needs a job token for it",
			rendezvous.ErrBadOrder)
	}
	return struct{}{}, s.hub.Order(run, o)
}

func (s *server) notify(req *http.Request) (any, error) {
	run, b, err := decode[noticeBody](req)
	if err != nil {
		return nil, err
	}
	return struct{}{}, s.hub.Notify(run, b.Node, b.Topic, b.Body)
}

func (s *server) forget(req *http.Request) (any, error) {
	run, err := runName(req)
	if err != nil {
		return nil, err
	}
	return struct{}{}, s.hub.Forget(run)
}

// leader answers, which no other process of an election does.
func (s *server) leader(*http.Request) (any, error) { return nil, ErrNothingNew }

func (s *server) runs(*http.Request) (any, error) { return s.hub.Runs(true), nil }
