package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/job"
	"dlrover-run/internal/runhost"
	"dlrover-run/rendezvous"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// served is a Hub behind HTTP on loopback.
type served struct {
	hub    *Hub
	client *Client
	addr   string
}

func serveHub(t testing.TB, token string) served { return serveConfig(t, ServerConfig{Token: token}) }

func serveConfig(t testing.TB, cfg ServerConfig) served {
	hub := NewHub(HubConfig{})
	s := httptest.NewServer(Handler(hub, cfg))
	addr := s.Listener.Addr().String()
	c := NewClient(addr, cfg.Token)
	t.Cleanup(func() { c.Close(); hub.Close(); _ = s.Config.Close(); s.CloseClientConnections(); s.Close() })
	return served{hub, c, addr}
}

func joinOf(id string, p rendezvous.Params) rendezvous.Join {
	return rendezvous.Join{Node: rendezvous.Node{ID: id, Name: id, Rank: -1, Slots: 2, Addr: "127.0.0.1"}, Params: p}
}

// Every Service obeys the same contract, in process and over HTTP.
func TestServiceContract(t *testing.T) {
	for name, open := range map[string]func(*testing.T) Service{
		"hub":  func(t *testing.T) Service { h := NewHub(HubConfig{}); t.Cleanup(h.Close); return h },
		"http": func(t *testing.T) Service { return serveHub(t, "0123456789abcdef").client },
	} {
		t.Run(name, func(t *testing.T) { contract(t, open(t)) })
	}
}

// The addresses of a node's connection are those that the daemon sees, whatever the node says.
func TestEndsOfTheConnection(t *testing.T) {
	s := serveHub(t, "")
	p := rendezvous.Params{Min: 2, Max: 2}
	ev := joinOf("a", p)
	ev.Node.Peer, ev.Node.Via = "10.0.0.2", "10.0.0.1"
	require.NoError(t, s.client.Join(t.Context(), "run", ev))
	require.NoError(t, s.hub.Join(t.Context(), "run", joinOf("b", p)))
	world, err := s.hub.World(t.Context(), "run")
	require.NoError(t, err)
	require.Equal(t, []string{"127.0.0.1", "127.0.0.1"}, []string{world[0].Addr, world[1].Addr}, "they are on one host")

	req := httptest.NewRequest(http.MethodPost, "/", nil)
	local := &net.TCPAddr{IP: net.ParseIP("fe80::1"), Port: 1, Zone: "eth0"}
	req = req.WithContext(context.WithValue(req.Context(), http.LocalAddrContextKey, net.Addr(local)))
	req.RemoteAddr = "[::ffff:10.0.0.2]:80"
	peer, own := ends(req)
	require.Equal(t, []string{"10.0.0.2", "fe80::1"}, []string{peer, own})
	req.RemoteAddr = "@"
	peer, own = ends(req.WithContext(t.Context()))
	require.Equal(t, []string{"", ""}, []string{peer, own})
}

func contract(t *testing.T, svc Service) {
	ctx := t.Context()
	p := rendezvous.Params{Min: 2, Max: 2}
	_, err := svc.Watch(ctx, "r", "a", Cursor{})
	require.ErrorIs(t, err, rendezvous.ErrUnknownNode)
	require.NoError(t, svc.Join(ctx, "r", joinOf("a", p)))
	b, c := joinOf("b", p), joinOf("c", rendezvous.Params{Min: 1, Max: 9})
	joined, err := svc.Watch(ctx, "r", "b", Cursor{Join: &b})
	require.NoError(t, err)
	require.Equal(t, job.Wait, joined.Kind)
	require.ErrorIs(t, svc.Join(ctx, "r", c), rendezvous.ErrRefused)
	_, err = svc.Watch(ctx, "r", "c", Cursor{Join: &c})
	require.ErrorIs(t, err, rendezvous.ErrRefused)
	lead, err := svc.Watch(ctx, "r", "a", Cursor{})
	require.NoError(t, err)
	require.Equal(t, job.Lead, lead.Kind)

	require.NoError(t, svc.Report(ctx, "r", rendezvous.Ready{ID: "a", EpochID: lead.EpochID, Addr: "10.0.0.1", Port: 7}))
	run, err := svc.Watch(ctx, "r", "b", Cursor{Directive: joined.Seq})
	require.NoError(t, err)
	require.Equal(t, job.Run, run.Kind)
	require.Equal(t, job.Place{
		GroupRank: 1, GroupWorldSize: 2, RankBase: 2, WorldSize: 4, RoleRankBase: 2, RoleWorldSize: 4,
		MasterAddr: "10.0.0.1", MasterPort: 7,
	}, *run.Place)

	world, err := svc.World(ctx, "r")
	require.NoError(t, err)
	require.Len(t, world, 2)

	at := time.Now().Add(-time.Second)
	require.NoError(t,
		svc.Report(ctx, "r", rendezvous.Failing{
			ID: "b", EpochID: run.EpochID, Decision: rendezvous.Permanent,
			Failures: []job.Failure{{Rank: 2, GroupRank: 1, Text: "boom", At: at, Detail: json.RawMessage(`{"x":1}`)}},
		}))
	fail := until(t, svc, "a", job.Fail)
	require.Equal(t, "boom", fail.Cause.Text)
	ev, err := svc.Leave(ctx, "r", rendezvous.Leave{ID: "a", Reason: "bye"})
	require.NoError(t, err)
	require.Equal(t, job.Failed, ev.Outcome)
	require.Len(t, ev.Failures, 1)
	require.WithinDuration(t, at, ev.Failures[0].At, 200*time.Millisecond)
	require.JSONEq(t, `{"x":1}`, string(ev.Failures[0].Detail))
	_, err = svc.Leave(ctx, "r", rendezvous.Leave{ID: "a"})
	require.ErrorIs(t, err, rendezvous.ErrUnknownNode)
}

// until watches until a directive of the kind arrives.
func until(t testing.TB, svc Service, id string, kind job.Kind) rendezvous.Directive {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var after uint64
	for {
		d, err := svc.Watch(ctx, "r", id, Cursor{Directive: after})
		if errors.Is(err, ErrNothingNew) {
			continue
		}
		require.NoError(t, err)
		if d.Kind == kind {
			return d.Directive
		}
		after = d.Seq
	}
}

func TestTimesAreShiftedToTheDaemonsClock(t *testing.T) {
	now := time.Unix(5000, 0)
	sent := now.Add(-time.Hour) // a sender whose clock is an hour slow
	fs := []job.Failure{{At: sent.Add(-2 * time.Second)}}
	shift(fs, sent, now)
	require.Equal(t, now.Add(-2*time.Second), fs[0].At)
}

func TestAgesSurviveTheWire(t *testing.T) {
	failed := time.Now()
	sent := failed.Add(3 * time.Second)
	fs := []job.Failure{{At: failed}}
	out := dated(fs, sent)
	require.Equal(t, 3*time.Second, sent.Round(0).Sub(out[0].At))
	require.Equal(t, failed, fs[0].At, "the caller's record is left alone")
	require.NotContains(t, out[0].At.String(), "m=", "a wall time, as it is read on the other side")
}

// What a daemon was told goes by its monotonic clock: setting the other one changes no length of time.
func TestTimesOfTheWireAreMonotonic(t *testing.T) {
	now := time.Now()
	sent := now.Add(-time.Hour).Round(0)
	at := shifted(wall(now.Add(time.Minute), now), now.Round(0), now)
	require.Contains(t, at.String(), "m=")
	fs := []job.Failure{{At: sent}}
	shift(fs, sent, now)
	require.Equal(t, now, fs[0].At)
	require.Zero(t, wall(time.Time{}, now))
}

func TestToken(t *testing.T) {
	s := serveHub(t, "the-right-token-0")
	for name, c := range map[string]struct{ token, want string }{
		"missing": {"", "carries none"},
		"wrong":   {"the-wrong-token-0", "differs"},
	} {
		t.Run(name, func(t *testing.T) {
			client := NewClient(s.addr, c.token)
			defer client.Close()
			err := client.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 1, Max: 1}))
			require.ErrorIs(t, err, ErrUnauthorized)
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), "the-right-token")
			_, err = client.Runs(t.Context())
			require.ErrorIs(t, err, ErrUnauthorized)
		})
	}
	resp, err := http.Get("http://" + s.addr + "/healthz")
	require.NoError(t, err)
	resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Empty(t, s.hub.Runs(false))
}

func TestBadRequests(t *testing.T) {
	s := serveHub(t, "")
	for name, c := range map[string]struct {
		method, path, body string
		status             int
	}{
		"not JSON":       {"POST", "/v1/runs/r/join", "nope", 400},
		"huge":           {"POST", "/v1/runs/r/join", `{"node":{"name":"` + strings.Repeat("x", maxBody) + `"}}`, 400},
		"no number":      {"GET", "/v1/runs/r/watch?node=a&after=x", "", 400},
		"control in run": {"POST", "/v1/runs/a%0Ab/join", "{}", 400},
		"escape in run":  {"POST", "/v1/runs/a%1b%5b2J/join", "{}", 400},
		"DEL in run":     {"POST", "/v1/runs/a%7f/join", "{}", 400},
		"C1 in run":      {"POST", "/v1/runs/a%c2%9b/join", "{}", 400},
		"bidi in run":    {"GET", "/v1/runs/a%e2%80%ae/world", "", 400},
		"bytes in run":   {"GET", "/v1/runs/a%ff/watch?node=a&after=0", "", 400},
		"hostile node": {"POST", "/v1/runs/r/join",
			`{"node":{"id":"a","name":"\u001b[2J","slots":1},"params":{"min":1,"max":1}}`, 409},
		"hostile role": {"POST", "/v1/runs/r/join",
			`{"node":{"id":"a","role":"\u202e","slots":1},"params":{"min":1,"max":1}}`, 409},
		"hostile id":    {"POST", "/v1/runs/r/join", `{"node":{"id":"\u009b","slots":1},"params":{"min":1,"max":1}}`, 409},
		"dots":          {"POST", "/v1/runs/%2e%2e/join", "{}", 400},
		"long run":      {"POST", "/v1/runs/" + strings.Repeat("r", 300) + "/join", "{}", 400},
		"wrong method":  {"GET", "/v1/runs/r/join", "", 405},
		"no such thing": {"GET", "/v1/other", "", 404},
	} {
		t.Run(name, func(t *testing.T) {
			req, err := http.NewRequest(c.method, "http://"+s.addr+c.path, strings.NewReader(c.body))
			require.NoError(t, err)
			resp, err := http.DefaultClient.Do(req)
			require.NoError(t, err)
			defer resp.Body.Close()
			require.Equal(t, c.status, resp.StatusCode)
		})
	}
	http.DefaultClient.CloseIdleConnections()
	require.Empty(t, s.hub.Runs(false))
}

func FuzzHandler(f *testing.F) {
	f.Add("join", `{"node":{"id":"a","slots":1},"params":{"min":1,"max":1}}`)
	f.Add("failing", `{"id":"a","round":1,"decision":"permanent","failures":[{"rank":1}]}`)
	f.Add("ready", `{"id":"a","round":1,"epoch":-1}`)
	f.Add("cleared", `{"id":"a","until":"2026-01-01T00:00:00Z","sent_at":"2026-01-01T00:00:00Z"}`)
	f.Add("barred", `{"id":"a","reason":"x"}`)
	f.Add("orders", `{"kind":"bar","node":"a","cause":"hang"}`)
	f.Add("notices", `{"node":"a","topic":"t","body":"b"}`)
	f.Add("leave", `{"id":"a","sent_at":"2026-01-01T00:00:00Z"}`)
	f.Add("join", `{"node":{"id":"b","slots":1},"params":{"min":1,"max":1},"resume":{"round":1,`+
		`"place":{"group_world_size":3,"group_rank":2}}}`)
	f.Fuzz(func(t *testing.T, verb, body string) {
		hub := NewHub(HubConfig{})
		defer hub.Close()
		h := Handler(hub, ServerConfig{})
		for range 2 {
			req, err := http.NewRequest("POST", "http://x/v1/runs/r/"+strings.Map(letters, verb), strings.NewReader(body))
			if err != nil {
				return
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, req)
			if w.Code == http.StatusInternalServerError {
				t.Fatalf("%s %s: %s", verb, body, w.Body)
			}
		}
	})
}

func letters(r rune) rune {
	if r < 'a' || r > 'z' {
		return -1
	}
	return r
}

// A client whose connection breaks is suspect at once, and lost soon.
func TestBrokenConnectionIsALoss(t *testing.T) {
	s := serveHub(t, "")
	p := rendezvous.Params{Min: 1, Max: 2}
	require.NoError(t, s.hub.Join(t.Context(), "r", joinOf("a", p)))
	require.NoError(t, s.client.Join(t.Context(), "r", joinOf("b", p)))
	require.NoError(t,
		s.hub.Report(t.Context(), "r", rendezvous.Ready{ID: "a", EpochID: until(t, s.hub, "a", job.Lead).EpochID}))
	run := until(t, s.hub, "a", job.Run)
	last := until(t, s.client, "b", job.Run).Seq
	ctx, die := context.WithCancel(t.Context())
	watching := make(chan error)
	go func() {
		_, err := s.client.Watch(ctx, "r", "b", Cursor{Directive: last})
		watching <- err
	}()
	attached := func() bool { return s.hub.Runs(true)[0].Nodes[1].Connected }
	require.Eventually(t, attached, 5*time.Second, time.Millisecond)
	die()
	require.Error(t, <-watching)
	require.Eventually(t, func() bool { return s.hub.Runs(true)[0].Nodes[1].Suspect }, 5*time.Second, time.Millisecond)
	start := time.Now()
	d, err := s.hub.Watch(t.Context(), "r", "a", Cursor{Directive: run.Seq})
	require.NoError(t, err)
	require.Equal(t, job.Stop, d.Kind)
	require.Equal(t, job.CauseLoss, d.Cause.Kind)
	require.InDelta(t, rendezvous.BrokenGrace.Seconds(), time.Since(start).Seconds(), 1.5)
}

func TestWatchIsHeldAndResumed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(HubConfig{})
		defer h.Close()
		require.NoError(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
		d, err := h.Watch(t.Context(), "r", "a", Cursor{})
		require.NoError(t, err)
		start := time.Now()
		_, err = h.Watch(t.Context(), "r", "a", Cursor{Directive: d.Seq})
		require.ErrorIs(t, err, ErrNothingNew)
		require.Equal(t, hold(1), time.Since(start))
	})
}

func TestHubForgetsAbandonedRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(HubConfig{})
		defer h.Close()
		require.NoError(t, h.Join(t.Context(), "old", joinOf("a", rendezvous.Params{Min: 1, Max: 1})))
		_, err := h.Leave(t.Context(), "old", rendezvous.Leave{ID: "a"})
		require.NoError(t, err)
		time.Sleep(2 * retention)
		require.NoError(t, h.Join(t.Context(), "new", joinOf("a", rendezvous.Params{Min: 1, Max: 1})))
		require.Len(t, h.Runs(false), 1)
	})
}

func TestHubBoundsItsRuns(t *testing.T) {
	h := NewHub(HubConfig{})
	defer h.Close()
	p := rendezvous.Params{Min: 1, Max: 1}
	for i := range runhost.MaxRuns {
		require.NoError(t, h.Join(t.Context(), fmt.Sprint(i), joinOf("a", p)))
	}
	require.ErrorIs(t, h.Join(t.Context(), "one more", joinOf("a", p)), errTooManyRuns)
}

// An address that begins runs without end leaves room for others.
func TestRunsOfOneAddressAreBounded(t *testing.T) {
	h := NewHub(HubConfig{})
	defer h.Close()
	join := func(run, from string) error {
		j := joinOf("a", rendezvous.Params{Min: 1, Max: 1})
		j.Node.Peer = from
		return h.Join(t.Context(), run, j)
	}
	for i := range runsOfOne {
		require.NoError(t, join(fmt.Sprint(i), "10.0.0.1"))
	}
	require.ErrorIs(t, join("one more", "10.0.0.1"), errTooManyRuns)
	require.NoError(t, join("0", "10.0.0.1"), "it is there")
	require.NoError(t, join("another", "10.0.0.2"))
}

// obedient is a launcher that does what it is told and has no workers.
func obedient(ctx context.Context, s *Session, runs chan<- rendezvous.Directive) error {
	for {
		select {
		case d, ok := <-s.Directives():
			if !ok {
				return s.Err()
			}
			if err := obey(ctx, s, d, runs); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

func obey(ctx context.Context, s *Session, d rendezvous.Directive, runs chan<- rendezvous.Directive) error {
	switch d.Kind {
	case job.Lead:
		return s.Report(ctx, rendezvous.Ready{ID: s.ID(), EpochID: d.EpochID, Addr: "127.0.0.1", Port: 1})
	case job.Run:
		s.Running(&rendezvous.Resume{EpochID: d.EpochID, Place: *d.Place})
		runs <- d
	case job.Stop:
		s.Running(nil)
		return s.Rejoin(ctx, d.EpochID, nil)
	}
	return nil
}

// swapped is a daemon that can be replaced by a new one without memory.
type swapped struct{ hub atomic.Pointer[Hub] }

func (s *swapped) Join(ctx context.Context, run string, ev rendezvous.Join) error {
	return away(s.hub.Load().Join(ctx, run, ev))
}

func (s *swapped) Report(ctx context.Context, run string, ev rendezvous.Event) error {
	return away(s.hub.Load().Report(ctx, run, ev))
}

func (s *swapped) Watch(ctx context.Context, run, id string, after Cursor) (News, error) {
	d, err := s.hub.Load().Watch(ctx, run, id, after)
	return d, away(err)
}

func (s *swapped) Leave(ctx context.Context, run string, ev rendezvous.Leave) (job.Evidence, error) {
	return s.hub.Load().Leave(ctx, run, ev)
}

func (s *swapped) World(ctx context.Context, run string) ([]job.Member, error) {
	ms, err := s.hub.Load().World(ctx, run)
	return ms, away(err)
}

// away makes a closed hub a daemon that cannot be reached.
func away(err error) error {
	if errors.Is(err, ErrClosed) {
		return errors.New("connection refused")
	}
	return err
}

// A second daemon without memory must not make a spare forget the world that the first
// one had sealed.
func TestSpareRemembersTheWorld(t *testing.T) {
	s := &Session{dirs: make(chan rendezvous.Directive, 1)}
	world := job.EpochID{Term: 7, Round: 3, Epoch: 1}
	s.deliver(rendezvous.Directive{Kind: job.Wait, EpochID: world, Restarts: 2})
	s.deliver(rendezvous.Directive{Kind: job.Wait, EpochID: job.EpochID{Term: 9}})
	require.Equal(t, world, s.seen)
	require.Equal(t, 2, s.spent)
}

func TestRefusedJoinLeavesNoRun(t *testing.T) {
	h := NewHub(HubConfig{})
	defer h.Close()
	require.Error(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 3, Max: 2})))
	require.Empty(t, h.Runs(false))
}

// A node that joins again reaches the new daemon before its watch does: the watch
// must not wait for the old daemon's sequence numbers.
func TestRejoinReachesANewDaemonFirst(t *testing.T) {
	for range 20 {
		synctest.Test(t, func(t *testing.T) {
			var svc swapped
			svc.hub.Store(NewHub(HubConfig{}))
			s := openSession(t, &svc, "a", rendezvous.Params{Min: 1, Max: 1, MaxRestarts: 9,
				Budget: rendezvous.Budget{SameFailures: -1}})
			defer s.Close()
			runs := make(chan rendezvous.Directive, 9)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- obedient(ctx, s, runs) }()
			for range 5 {
				d := <-runs
				require.NoError(t,
					s.Report(ctx, rendezvous.Failing{ID: "a", EpochID: d.EpochID, Decision: rendezvous.RestartCharged}))
			}
			first := <-runs
			old := svc.hub.Load()
			svc.hub.Store(NewHub(HubConfig{}))
			s.Running(nil)
			require.NoError(t, s.Rejoin(ctx, first.EpochID, nil))
			old.Close()
			again := <-runs
			require.NotEqual(t, first.EpochID, again.EpochID)
			require.Equal(t, 5, again.Place.RestartCount, "what was spent is remembered")
			cancel()
			require.NoError(t, <-done)
			svc.hub.Load().Close()
		})
	}
}

// Success is reported while the daemon is away: nobody runs again.
func TestSuccessDuringAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var svc swapped
		svc.hub.Store(NewHub(HubConfig{}))
		p := rendezvous.Params{Min: 2, Max: 2}
		ctx, cancel := context.WithCancel(t.Context())
		runs := make(chan rendezvous.Directive, 9)
		sessions := map[string]*Session{}
		var wg sync.WaitGroup
		for _, id := range []string{"a", "b"} {
			s := openSession(t, &svc, id, p)
			sessions[id] = s
			wg.Go(func() { _ = obedient(ctx, s, runs) })
		}
		epoch := (<-runs).EpochID
		<-runs
		svc.hub.Load().Close()
		for id, s := range sessions {
			s.Running(nil)
			wg.Go(func() { require.NoError(t, s.Report(ctx, rendezvous.Success{ID: id, EpochID: epoch})) })
		}
		time.Sleep(time.Minute)
		svc.hub.Store(NewHub(HubConfig{}))
		time.Sleep(time.Minute)
		require.Equal(t, string(job.Succeeded), svc.hub.Load().Runs(false)[0].Outcome)
		cancel()
		wg.Wait()
		for _, s := range sessions {
			s.Close()
		}
		svc.hub.Load().Close()
	})
}

func openSession(t *testing.T, svc Service, id string, p rendezvous.Params) *Session {
	s, err := Open(t.Context(), svc, SessionConfig{Run: "r", Node: joinOf(id, p).Node, Params: p, Where: "test"})
	require.NoError(t, err)
	return s
}

// The daemon dies and comes back without memory: nobody is told to stop.
func TestSessionSurvivesTheDaemon(t *testing.T) {
	p := rendezvous.Params{Min: 2, Max: 2, MaxRestarts: 1}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	hub, server := NewHub(HubConfig{}), &http.Server{}
	server.Handler = Handler(hub, ServerConfig{})
	go server.Serve(l)

	var log strings.Builder
	var logMu sync.Mutex
	logger := slog.New(slog.NewTextHandler(lockedWriter{&logMu, &log}, nil))
	ctx, cancel := context.WithCancel(t.Context())
	runs := make(chan rendezvous.Directive, 16)
	var wg sync.WaitGroup
	for _, id := range []string{"a", "b"} {
		c := NewClient(addr, "")
		s, err := Open(ctx, c, SessionConfig{Run: "r", Node: joinOf(id, p).Node, Params: p, Where: addr, Logger: logger})
		require.NoError(t, err)
		wg.Go(func() { defer c.Close(); defer s.Close(); _ = obedient(ctx, s, runs) })
	}
	first := []rendezvous.Directive{<-runs, <-runs}
	require.Equal(t, 1, first[0].Round)
	hub.Close()
	server.Close()

	require.Eventually(t, func() bool {
		logMu.Lock()
		defer logMu.Unlock()
		return strings.Contains(log.String(), "cannot reach the rendezvous daemon")
	}, 10*time.Second, 5*time.Millisecond)
	l, err = net.Listen("tcp", addr)
	require.NoError(t, err)
	hub = NewHub(HubConfig{})
	server = &http.Server{Handler: Handler(hub, ServerConfig{})}
	go server.Serve(l)
	again := []rendezvous.Directive{<-runs, <-runs}
	for _, d := range again {
		require.Equal(t, first[0].EpochID, d.EpochID, "the same epoch goes on")
	}
	require.Eventually(t, func() bool { return hub.Runs(false)[0].Phase == "running" }, 10*time.Second, time.Millisecond)
	cancel()
	wg.Wait()
	hub.Close()
	server.Close()
}

type lockedWriter struct {
	mu *sync.Mutex
	w  io.Writer
}

func (l lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

func TestOpenFailsClearly(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	l.Close()
	c := NewClient(addr, "")
	defer c.Close()
	p := rendezvous.Params{Min: 1, Max: 1}
	_, err = Open(t.Context(), c,
		SessionConfig{Run: "r", Node: joinOf("a", p).Node, Params: p, Where: addr, ConnectTimeout: 50 * time.Millisecond})
	require.ErrorContains(t, err, "no rendezvous daemon at "+addr)
	require.ErrorContains(t, err, "refused")
}

func TestClientAgainstAnotherService(t *testing.T) {
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") }))
	defer other.Close()
	c := NewClient(other.Listener.Addr().String(), "")
	defer c.Close()
	_, err := c.Watch(t.Context(), "r", "a", Cursor{})
	require.ErrorContains(t, err, "another service on this port")
}

// Two hundred nodes, each with its own long-poll over a real connection, meet, lose a
// member and meet again.
func TestManyNodes(t *testing.T) {
	const n = 200
	s := serveHub(t, "")
	p := rendezvous.Params{Min: 2, Max: n, LastCall: time.Minute}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	runs := make(chan rendezvous.Directive, 2*n)
	var sessions [n]*Session
	var opened atomic.Int64
	for i := range n {
		wg.Go(func() {
			c := NewClient(s.addr, "")
			defer c.Close()
			var err error
			sessions[i], err = Open(ctx, c,
				SessionConfig{Run: "r", Node: joinOf(fmt.Sprintf("n%04d", i), p).Node, Params: p, Where: s.addr})
			if err != nil {
				t.Error(err)
				return
			}
			defer sessions[i].Close()
			opened.Add(1)
			if err := obedient(ctx, sessions[i], runs); err != nil {
				t.Error(err)
			}
		})
	}
	ranks := map[int]bool{}
	for range n {
		d := <-runs
		ranks[d.Place.GroupRank] = true
		require.Equal(t, 2*n, d.Place.WorldSize)
	}
	require.Len(t, ranks, n)
	require.EqualValues(t, n, opened.Load())
	_, err := sessions[17].Leave(ctx, "test", nil)
	require.NoError(t, err)
	for range n - 1 {
		require.Equal(t, 2*(n-1), (<-runs).Place.WorldSize)
	}
	cancel()
	wg.Wait()
}

// provable is a listener whose connections record whether they have been proved.
type provable struct {
	net.Listener
	proved chan bool
}

type provableConn struct {
	net.Conn
	l *provable
}

func (p *provable) Accept() (net.Conn, error) {
	nc, err := p.Listener.Accept()
	return &provableConn{nc, p}, err
}

func (c *provableConn) Prove(ok bool) { c.l.proved <- ok }

// Only the right token makes a connection known; another ends it, and no body is waited for.
func TestTokenProvesAConnection(t *testing.T) {
	hub := NewHub(HubConfig{})
	l, err := Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	p := &provable{l, make(chan bool, 10)}
	s := NewServer(Handler(hub, ServerConfig{Token: "0123456789abcdef"}))
	done := make(chan error, 1)
	go func() { done <- s.Serve(p) }()
	defer func() { require.NoError(t, s.Close()); <-done; hub.Close() }()
	for token, proves := range map[string]bool{"": false, "another": false, "0123456789abcdef": true} {
		nc, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		defer nc.Close()
		_, err = fmt.Fprintf(nc, "GET /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n", token)
		require.NoError(t, err)
		r := bufio.NewReader(nc)
		resp, err := http.ReadResponse(r, nil)
		require.NoError(t, err)
		require.Equal(t, !proves, resp.Close)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		if proves {
			require.True(t, <-p.proved)
			continue
		}
		_, err = r.ReadByte()
		require.ErrorIs(t, err, io.EOF)
		require.Empty(t, p.proved)
	}
}

// A daemon that was started again hears the run's parameters, whoever introduces itself first.
func TestRunsParametersOutliveTheDaemon(t *testing.T) {
	svc := &swapped{}
	svc.hub.Store(NewHub(HubConfig{}))
	p := rendezvous.Params{Min: 2, Max: 2, MaxRestarts: 1, LastCall: time.Minute}
	require.NoError(t, svc.Join(t.Context(), "r", joinOf("a", p)))
	p.MaxRestarts, p.LastCall = 7, 0
	b := openSession(t, svc, "b", p)
	defer b.Close()
	require.Eventually(t, func() bool { return b.Params().MaxRestarts == 1 }, 10*time.Second, time.Millisecond)
	old := svc.hub.Swap(NewHub(HubConfig{}))
	old.Close()
	require.Eventually(t, func() bool { return len(svc.hub.Load().Runs(false)) == 1 }, 10*time.Second, time.Millisecond)
	require.Equal(t, rendezvous.Params{Min: 2, Max: 2, MaxRestarts: 1, LastCall: time.Minute}.WithDefaults(),
		svc.hub.Load().Runs(false)[0].Params)
	svc.hub.Load().Close()
}

// A server whose answer has no end costs a client no more than the largest answer.
func TestAnAnswerWithoutAnEnd(t *testing.T) {
	var sent atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for err := error(nil); err == nil; {
			var n int
			n, err = io.WriteString(w, strings.Repeat("[", 1<<20))
			sent.Add(int64(n))
		}
	}))
	defer s.Close()
	c := NewClient(s.Listener.Addr().String(), "")
	defer c.Close()
	_, err := c.Runs(t.Context())
	require.ErrorContains(t, err, "not ours")
	require.Less(t, sent.Load(), int64(2*maxReply))
}
