package service

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/netcheck"
	"dlrover-run/netcheck/node"
	"dlrover-run/netcheck/serve"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// wire is a network without one: every test takes its time, and finds what rate says of a direction between two nodes.
type wire struct {
	me   string
	addr string
	took time.Duration
	rate func(from, to string) float64
}

func (w wire) Serve(ctx context.Context, a netcheck.Assignment, ready func([]string) error) netcheck.Result {
	if err := ready([]string{w.addr + ":4000"}); err != nil {
		return netcheck.Result{Class: netcheck.Canceled}
	}
	return w.Dial(ctx, a)
}

func (w wire) Listen(context.Context) []string { return []string{w.addr + ":4000"} }

func (wire) Close() {}

func (w wire) Dial(ctx context.Context, a netcheck.Assignment) netcheck.Result {
	if len(a.Key) != 32 {
		return netcheck.Result{Class: netcheck.Auth}
	}
	select {
	case <-time.After(w.took):
	case <-ctx.Done():
		return netcheck.Result{Class: netcheck.Canceled}
	}
	mbps := w.rate(a.Peer.Name, w.me)
	if mbps == 0 {
		return netcheck.Result{Class: netcheck.Stalled, Text: "no data for 2 s"}
	}
	return netcheck.Result{Flows: []netcheck.Flow{{NIC: "eth0", Mbps: mbps, P50: 50}}}
}

// launchers are nodes n0 ... of a run that check themselves when they are told to, until they have their places.
type launchers struct {
	svc       api.Service
	transport serve.Transport
	params    rendezvous.Params
	run       string
	addr      func(i int) string
	took      time.Duration // of a test
	rate      func(from, to string) float64
	mute      string                        // the name of a node that does nothing when it is to be checked
	findings  map[string][]netcheck.Finding // of the local checks of nodes, by their names

	mu    sync.Mutex
	fates map[string]string // by name: "run", or why not
	ran   time.Time         // when a node ran last
}

// start makes a node join and follow its directives, as a launcher does: a newer one ends a check.
func (l *launchers) start(ctx context.Context, i int) {
	n := rendezvous.Node{
		ID: fmt.Sprintf("id-n%d", i), Name: fmt.Sprintf("n%d", i), Rank: -1, Addr: l.addr(i), IP: l.addr(i), Slots: 1,
		Can: []rendezvous.Ability{rendezvous.CanGate},
	}
	session, err := api.Open(ctx, l.svc, api.SessionConfig{Run: l.run, Node: n, Params: l.params})
	if err != nil {
		l.ends(n.Name, err.Error())
		return
	}
	defer session.Close()
	stop := func() {}
	for {
		select {
		case d, more := <-session.Directives():
			stop()
			if !more {
				l.ends(n.Name, session.Err().Error())
				return
			}
			if d.Kind == job.Check && n.Name != l.mute {
				stop = l.check(ctx, session, n)
			}
			if l.follow(ctx, session, n, d) {
				return
			}
		case <-ctx.Done():
			stop()
			l.ends(n.Name, context.Cause(ctx).Error())
			return
		}
	}
}

func (l *launchers) ends(name, how string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fates[name] = how
	if how == "run" {
		l.ran = time.Now()
	}
}

// follow reports whether it was the last directive of interest.
func (l *launchers) follow(ctx context.Context, s *api.Session, n rendezvous.Node, d rendezvous.Directive) bool {
	switch d.Kind {
	case job.Lead:
		_ = s.Report(ctx, rendezvous.Ready{ID: n.ID, EpochID: d.EpochID, Addr: n.Addr, Port: 1})
	case job.Run:
		l.ends(n.Name, "run")
		return true
	case job.Bar, job.Fail:
		l.ends(n.Name, d.Cause.Text)
		_, _ = s.Leave(ctx, d.Cause.Text, nil)
		return true
	}
	return false
}

// check begins the check of a node and returns what ends it.
func (l *launchers) check(ctx context.Context, s *api.Session, n rendezvous.Node) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		v, err := node.Run(ctx, node.Config{
			Run: l.run, Transport: l.transport, Prober: wire{n.Name, n.Addr, l.took, l.rate}, Final: api.Final,
			Node: netcheck.Node{ID: n.ID, Name: n.Name, Addr: n.Addr, NICs: []netcheck.NIC{
				{Name: "eth0", Addr: n.IP, Mbps: 1000},
			}, Findings: l.findings[n.Name]},
		})
		switch {
		case err != nil:
		case v.Excluded:
			_ = s.Report(ctx, rendezvous.Barred{ID: n.ID, Reason: v.Reason, Aspect: v.Aspect(), Again: v.Again})
		default:
			_ = s.Report(ctx, rendezvous.Cleared{ID: n.ID, Covered: v.Covered})
		}
	}()
	return func() { cancel(); <-done }
}

// healthy: every direction has 950 Mbit/s.
func healthy(string, string) float64 { return 950 }

func checking(lo, hi int) rendezvous.Params {
	spec := netcheck.Spec{
		Level: netcheck.LevelHost, ExcludeStraggler: true, TTL: time.Hour, Timeout: netcheck.DefaultTimeout,
	}
	return rendezvous.Params{Min: lo, Max: hi, LastCall: time.Second, Gate: true, Check: spec.String()}
}

func newLaunchers(s *Service, p rendezvous.Params) *launchers {
	return &launchers{
		svc: s.Hub, transport: s.Checks, params: p, run: "r", took: time.Second, rate: healthy, fates: map[string]string{},
		addr: func(i int) string { return fmt.Sprintf("10.0.0.%d", i) },
	}
}

// meet lets n nodes meet and returns how each ended.
func (l *launchers) meet(t *testing.T, n int) map[string]string {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { l.start(ctx, i) })
	}
	wg.Wait()
	return l.fates
}

func timeline(t *testing.T, s *Service) (lines []string) {
	es, err := s.Hub.Events(t.Context(), "r", 0)
	require.NoError(t, err)
	for _, e := range es.Events {
		lines = append(lines, strings.TrimSpace(string(e.Event)+" "+e.Node))
	}
	return lines
}

func newService(t *testing.T) *Service {
	s, err := New(Config{Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { s.Close(0) })
	return s
}

func TestNodesAreCheckedBeforeTheyRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		began := time.Now()
		require.Equal(t, map[string]string{"n0": "run", "n1": "run", "n2": "run", "n3": "run"},
			newLaunchers(s, checking(4, 4)).meet(t, 4))
		require.Less(t, time.Since(began), 10*time.Second)
		synctest.Wait()
		require.Subset(t, timeline(t, s), []string{"gate", "check-began", "check-ended", "run"})
		p, err := s.Checks.Picture("r")
		require.NoError(t, err)
		require.Len(t, p.Nodes, 4)
		require.Len(t, p.Pairs, 12, "both directions of every pair")
		require.Equal(t, map[netcheck.State]int{"ok": 4}, s.Checks.Stats().Verdicts)
	})
}

func TestASlowNodeIsLeftOutAndTheOthersRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		l := newLaunchers(s, checking(3, 4))
		l.rate = func(from, _ string) float64 {
			if from == "n2" {
				return 300
			}
			return 950
		}
		fates := l.meet(t, 4)
		require.Contains(t, fates["n2"], "send")
		delete(fates, "n2")
		require.Equal(t, map[string]string{"n0": "run", "n1": "run", "n3": "run"}, fates)
		synctest.Wait()
		require.Subset(t, timeline(t, s), []string{"check-verdict n2", "barred n2"})
	})
}

// without is the rate between nodes of which some reach no others.
func without(dead ...string) func(from, to string) float64 {
	return func(from, to string) float64 {
		if slices.Contains(dead, from) || slices.Contains(dead, to) {
			return 0
		}
		return 950
	}
}

// Many nodes that reach no others are not marked for it, and the world goes without them.
func TestManyDeadNodesAreLeftOutUnmarked(t *testing.T) {
	for name, c := range map[string]struct {
		n, lo   int
		timeout time.Duration
		took    time.Duration
		dead    []string
	}{
		"three of eight":    {8, 4, netcheck.DefaultTimeout, 2 * time.Second, []string{"n1", "n4", "n6"}},
		"the time was over": {6, 4, 10 * time.Second, 3900 * time.Millisecond, []string{"n1", "n4"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newService(t)
				p := checking(c.lo, c.n)
				spec := netcheck.Spec{Level: netcheck.LevelHost, TTL: time.Hour, Timeout: c.timeout}
				p.Check = spec.String()
				l := newLaunchers(s, p)
				l.took, l.rate = c.took, without(c.dead...)
				for node, fate := range l.meet(t, c.n) {
					require.Equal(t, slices.Contains(c.dead, node), fate != "run", "%s: %s", node, fate)
				}
				synctest.Wait()
				if len(c.dead) > 2 {
					require.Subset(t, timeline(t, s), []string{"undecided n1", "undecided n4", "undecided n6"})
					require.NotContains(t, strings.Join(timeline(t, s), "\n"), "barred")
				}
			})
		})
	}
}

// Where there is no world without it, a node of which nothing is proved is checked again with the others.
func TestAnUndecidedNodeIsCheckedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		l := newLaunchers(s, checking(6, 6))
		begun, bad := time.Now(), without("n1", "n3", "n4")
		l.rate = func(from, to string) float64 {
			if time.Since(begun) > 15*time.Second { // it was not the nodes
				return 950
			}
			return bad(from, to)
		}
		for node, fate := range l.meet(t, 6) {
			require.Equal(t, "run", fate, node)
		}
		require.Less(t, l.ran.Sub(begun), time.Minute)
		require.Subset(t, timeline(t, s), []string{"undecided n1", "undecided n3", "undecided n4", "cleared n1", "run"})
	})
}

// A launcher that is alive and does not answer is barred without its help.
func TestASilentNodeIsLeftOutAndTheOthersRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		l := newLaunchers(s, checking(3, 4))
		l.mute = "n1"
		began := time.Now()
		fates := l.meet(t, 4)
		require.Contains(t, fates["n1"], "told to be checked")
		delete(fates, "n1")
		require.Equal(t, map[string]string{"n0": "run", "n2": "run", "n3": "run"}, fates)
		require.Less(t, l.ran.Sub(began), 40*time.Second)
		for _, line := range timeline(t, s) {
			require.NotContains(t, line, "id-")
		}
		es, err := s.Hub.Events(t.Context(), "r", 0)
		require.NoError(t, err)
		for _, e := range es.Events {
			require.NotContains(t, e.Text, "id-n1", "an ID is for nobody else")
		}
		p, err := s.Checks.Picture("r")
		require.NoError(t, err)
		require.Len(t, p.Nodes, 4)
		silent := p.Nodes[slices.IndexFunc(p.Nodes, func(n netcheck.NodePicture) bool { return n.Verdict.Excluded })]
		require.Equal(t, "n1", silent.Node.Name, "who never came is called by its name")
	})
}

func TestANodeThatDiesInItsCheckIsNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		l := newLaunchers(s, checking(3, 4))
		l.mute = "n3"
		time.AfterFunc(3*time.Second, func() {
			_, _ = s.Hub.Leave(context.Background(), "r", rendezvous.Leave{ID: "id-n3", Reason: "killed"})
		})
		began := time.Now()
		fates := l.meet(t, 4)
		delete(fates, "n3")
		require.Equal(t, map[string]string{"n0": "run", "n1": "run", "n2": "run"}, fates)
		require.Less(t, l.ran.Sub(began), 12*time.Second)
		require.Zero(t, s.Checks.Stats().Excluded)
	})
}

// Without a Check in its parameters a run has nothing of it.
func TestARunWithoutChecksHasNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		p := checking(1, 1)
		p.Check = ""
		require.NoError(t, s.Hub.Join(t.Context(), "r", rendezvous.Join{Params: p, Node: rendezvous.Node{
			ID: "a", Name: "a", Rank: -1, Slots: 1, Can: []rendezvous.Ability{rendezvous.CanGate},
		}}))
		_, err := s.Checks.Picture("r")
		require.ErrorIs(t, err, serve.ErrUnknownRun)
		d, err := s.Hub.Watch(t.Context(), "r", "a", api.Cursor{})
		require.NoError(t, err)
		require.Equal(t, job.Check, d.Kind, "the node alone answers")
	})
}

// Words of a newer version are no reason to hold the job up; the timeline says it.
func TestNodesThatCannotBeCheckedAreLetThrough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		p := checking(2, 2)
		p.Check = "level=galactic"
		l := newLaunchers(s, p)
		l.mute = "n0"
		require.Equal(t, map[string]string{"n0": "run", "n1": "run"}, l.meet(t, 2))
		es, err := s.Hub.Events(t.Context(), "r", 0)
		require.NoError(t, err)
		i := slices.IndexFunc(es.Events, func(e api.Event) bool { return e.Event == "check-ended" })
		require.Contains(t, es.Events[i].Text, "galactic")
	})
}

func TestTheTopologyLabelsWhoIsChecked(t *testing.T) {
	s := newService(t)
	s.setSwitches(rendezvous.Topology{"10.0.0.1": "leaf-1", "10.1.0.2": "leaf-2"})
	require.Equal(t, "leaf-1", s.switchOf(netcheck.Node{Addr: "10.0.0.1"}))
	require.Equal(t, "leaf-2", s.switchOf(netcheck.Node{Addr: "host", NICs: []netcheck.NIC{{}, {Addr: "10.1.0.2"}}}))
	require.Empty(t, s.switchOf(netcheck.Node{Addr: "host"}))
}

// The daemon dies while nodes test each other, and another one takes its place: the nodes are checked anew, and nobody
// is blamed.
func TestADaemonThatIsKilledInMidCheck(t *testing.T) {
	first, err := New(Config{Token: secret, Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	at := l.Addr().String()
	end := serveOn(t, first, l)
	client := api.NewClient(at, secret)
	defer client.Close()
	ls := newLaunchers(first, checking(4, 4))
	ls.svc, ls.transport, ls.took = client, node.Over(client), 300*time.Millisecond
	fates := make(chan map[string]string, 1)
	go func() { fates <- ls.meet(t, 4) }()
	require.Eventually(t, func() bool {
		p, err := first.Checks.Picture("r")
		return err == nil && len(p.Pairs) >= 4
	}, 20*time.Second, time.Millisecond)
	end()
	second, err := New(Config{Token: secret, Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	l, err = net.Listen("tcp", at)
	require.NoError(t, err)
	defer serveOn(t, second, l)()
	require.Equal(t, map[string]string{"n0": "run", "n1": "run", "n2": "run", "n3": "run"}, <-fates)
	p, err := second.Checks.Picture("r")
	require.NoError(t, err)
	tested := map[int]bool{}
	for _, pair := range p.Pairs {
		tested[pair.From], tested[pair.To] = true, true
	}
	require.Len(t, tested, 4, "the second daemon has checked every node anew")
	require.Equal(t, map[netcheck.State]int{"ok": 4}, second.Checks.Stats().Verdicts)
}

// serveOn serves until the returned function is called, which breaks every connection.
func serveOn(t *testing.T, s *Service, l net.Listener) (end func()) {
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	return func() {
		s.Close(0)
		require.ErrorIs(t, <-done, http.ErrServerClosed)
	}
}

func TestTwoRunsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		one, other := newLaunchers(s, checking(4, 4)), newLaunchers(s, checking(3, 3))
		other.run = "q"
		other.rate = func(from, to string) float64 { return 100 } // slower than those of the other run, and healthy
		var wg sync.WaitGroup
		wg.Go(func() { one.meet(t, 4) })
		wg.Go(func() { other.meet(t, 3) })
		wg.Wait()
		require.Equal(t, map[string]string{"n0": "run", "n1": "run", "n2": "run", "n3": "run"}, one.fates)
		require.Equal(t, map[string]string{"n0": "run", "n1": "run", "n2": "run"}, other.fates)
	})
}

// A node may watch over the connection on which its check was asked for. The rendezvous knows it as any other one: it
// hears at once that the node has hung up, with no request under way.
func TestAConnectionIsKnownAfterACheck(t *testing.T) {
	s, err := New(Config{Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	at := serving(t, s)
	join := joining("a", "10.0.0.1")
	require.NoError(t, s.Hub.Join(t.Context(), "r", join))
	require.NoError(t, s.Checks.Expect("r", []string{"a"}, nil))
	nc, err := net.Dial("tcp", at)
	require.NoError(t, err)
	defer nc.Close()
	r := bufio.NewReader(nc)
	ask := func(method, path, body string) {
		_, err := fmt.Fprintf(nc, "%s /v1/runs/r/%s HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s",
			method, path, len(body), body)
		require.NoError(t, err)
		resp, err := http.ReadResponse(r, nil)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, resp.StatusCode, path)
	}
	for range 2 {
		ask(http.MethodPost, "checks/next", `{"id":"a","visit":"v","no_wait":true}`)
	}
	ask(http.MethodGet, "watch?node=a&after=0", "")
	require.NoError(t, nc.Close())
	require.Eventually(t, func() bool { return s.Hub.Runs(true)[0].Nodes[0].Suspect }, 10*time.Second, time.Millisecond)
}
