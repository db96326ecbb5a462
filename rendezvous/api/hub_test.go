package api

import (
	"context"
	"fmt"
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

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// perform carries out actions as if a step had returned them.
func perform(t *testing.T, h *Hub, acts ...rendezvous.Action) {
	r, err := h.existing("r")
	require.NoError(t, err)
	r.Lock()
	for _, a := range acts {
		r.performLocked(time.Now(), a)
	}
	r.Unlock()
}

// The gate is called in the order of the steps and without locks, one call at a time, also when it calls the Hub
// itself.
func TestGateIsToldInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h *Hub
		var mu sync.Mutex
		var told []string
		h = NewHub(HubConfig{Gate: func(run string, ids, _ []string) {
			require.Len(t, h.Runs(true), 1, "no lock is held")
			time.Sleep(time.Second) // others come meanwhile
			mu.Lock()
			told = append(told, run+":"+strings.Join(ids, ","))
			again := len(told) == 1
			mu.Unlock()
			if again {
				perform(t, h, rendezvous.Action{Gate: []string{"inner"}})
			}
		}})
		defer h.Close()
		require.NoError(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
		var wg sync.WaitGroup
		for i := range 3 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * time.Millisecond)
				perform(t, h, rendezvous.Action{Gate: []string{fmt.Sprint(i), "x"}},
					rendezvous.Action{Gate: []string{fmt.Sprint(i), "y"}})
			})
		}
		wg.Wait()
		time.Sleep(time.Minute)
		require.Equal(t, []string{"r:0,x", "r:0,y", "r:1,x", "r:1,y", "r:2,x", "r:2,y", "r:inner"}, told)
	})
}

// Nobody is told to be checked whose answer the gate has at once: in a large run that is a request of every node.
func TestWhoIsToldToCheck(t *testing.T) {
	for name, c := range map[string]struct {
		answers bool
		want    job.Kind
	}{"at once": {true, job.Lead}, "later": {false, job.Check}} {
		t.Run(name, func(t *testing.T) {
			var h *Hub
			h = NewHub(HubConfig{Gate: func(run string, ids, _ []string) {
				for _, id := range ids {
					if c.answers {
						require.NoError(t, h.Report(t.Context(), run, rendezvous.Cleared{ID: id}))
					}
				}
			}})
			defer h.Close()
			require.NoError(t, h.Join(t.Context(), "r", gated("a")))
			wait, err := h.Watch(t.Context(), "r", "a", Cursor{})
			require.NoError(t, err)
			require.Equal(t, job.Wait, wait.Kind)
			next := make(chan job.Kind, 1)
			go func() {
				d, _ := h.Watch(t.Context(), "r", "a", Cursor{Directive: wait.Seq})
				next <- d.Kind
			}()
			held := func() bool { return h.Runs(true)[0].Nodes[0].Connected }
			require.Eventually(t, held, 10*time.Second, time.Millisecond)
			require.NoError(t, h.Join(t.Context(), "r", gated("b")))
			require.Equal(t, c.want, <-next)
		})
	}
}

func TestNoGateIsToldNothing(t *testing.T) {
	h := NewHub(HubConfig{})
	defer h.Close()
	require.NoError(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
	perform(t, h, rendezvous.Action{Gate: []string{"a"}})
	r, err := h.existing("r")
	require.NoError(t, err)
	require.Empty(t, r.unsent)
}

// A gate that a closed hub has not told is not told any more.
func TestClosedHubTellsNoGate(t *testing.T) {
	told := 0
	var h *Hub
	h = NewHub(HubConfig{Gate: func(_ string, _, _ []string) { told++; h.Close() }})
	require.NoError(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
	perform(t, h, rendezvous.Action{Gate: []string{"a"}}, rendezvous.Action{Gate: []string{"b"}})
	require.Equal(t, 1, told)
}

// Orders arrive at the Round, and what is wrong with them comes back as itself.
func TestOrders(t *testing.T) {
	served := serveHub(t, testToken)
	inside := NewHub(HubConfig{})
	defer inside.Close()
	for name, c := range map[string]struct {
		svc   Service
		order func(rendezvous.Order) error
	}{
		"hub":  {inside, func(o rendezvous.Order) error { return inside.Order("r", o) }},
		"http": {served.client, func(o rendezvous.Order) error { return served.client.Order(t.Context(), "r", o) }},
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorIs(t, c.order(rendezvous.Order{Kind: rendezvous.OrderStop}), ErrUnknownRun)
			require.NoError(t, c.svc.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 1, Max: 1})))
			lead := until(t, c.svc, "a", job.Lead)
			for _, step := range []struct {
				order rendezvous.Order
				want  error
			}{
				{rendezvous.Order{Kind: "explode"}, rendezvous.ErrBadOrder},
				{rendezvous.Order{Kind: rendezvous.OrderBar}, rendezvous.ErrBadOrder},
				{rendezvous.Order{Kind: rendezvous.OrderUnbar, Node: "a"}, rendezvous.ErrUnknownNode},
				{rendezvous.Order{Kind: rendezvous.OrderResume}, rendezvous.ErrNotPaused},
				{rendezvous.Order{Kind: rendezvous.OrderPause, Text: "maintenance"}, nil},
			} {
				err := c.order(step.order)
				require.ErrorIs(t, err, step.want)
				require.Equal(t, step.want == nil, err == nil)
			}
			stop := until(t, c.svc, "a", job.Stop)
			require.Equal(t, "maintenance", stop.Paused.Text)
			require.Equal(t, job.CauseOperator, stop.Paused.Kind)
			j := joinOf("a", rendezvous.Params{Min: 1, Max: 1})
			j.Stopped = lead.EpochID
			require.NoError(t, c.svc.Join(t.Context(), "r", j))
			require.NotNil(t, until(t, c.svc, "a", job.Wait).Paused)
			require.ErrorIs(t, c.order(rendezvous.Order{Kind: rendezvous.OrderRestart}), rendezvous.ErrNotRunning)
			require.NoError(t, c.order(rendezvous.Order{Kind: rendezvous.OrderResume}))
			until(t, c.svc, "a", job.Lead)
			require.NoError(t,
				c.order(rendezvous.Order{Kind: rendezvous.OrderStop, Cause: job.CauseDeadline, Text: "24 h are over"}))
			fail := until(t, c.svc, "a", job.Fail)
			require.Equal(t, job.Cause{Kind: job.CauseDeadline, Text: "24 h are over"}, *fail.Cause)
			require.ErrorIs(t, c.order(rendezvous.Order{Kind: rendezvous.OrderPause}), rendezvous.ErrFinished)
		})
	}
}

// gated is a node of a run with a gate.
func gated(id string) rendezvous.Join {
	j := joinOf(id, rendezvous.Params{Min: 2, Max: 2, Gate: true})
	j.Node.Can = []rendezvous.Ability{rendezvous.CanGate}
	return j
}

// Nodes of a run with a gate are named to who checks them, and the answers may come from the nodes or from there.
func TestGate(t *testing.T) {
	asked := make(chan string, 9)
	hub := NewHub(HubConfig{Gate: func(run string, ids, _ []string) { asked <- run + ":" + strings.Join(ids, ",") }})
	server := httptest.NewServer(Handler(hub, ServerConfig{}))
	c := NewClient(server.Listener.Addr().String(), "")
	defer func() {
		c.Close()
		hub.Close()
		_ = server.Config.Close()
		server.CloseClientConnections()
		server.Close()
	}()
	require.NoError(t, c.Join(t.Context(), "r", gated("a")))
	require.NoError(t, c.Join(t.Context(), "r", gated("b")))
	require.Equal(t, "r:a,b", <-asked)
	until(t, c, "a", job.Check)
	require.NoError(t, c.Report(t.Context(), "r", rendezvous.Cleared{ID: "a", Until: time.Now().Add(time.Hour)}))
	require.NoError(t, c.Report(t.Context(), "r", rendezvous.Barred{ID: "b", Reason: "slow link"}))
	bar := until(t, c, "b", job.Bar)
	require.Equal(t, job.CauseCheck, bar.Cause.Kind)
	require.Contains(t, bar.Cause.Text, "slow link")
	require.NoError(t, hub.Join(t.Context(), "r", gated("c")))
	require.NoError(t, hub.Report(t.Context(), "r", rendezvous.Cleared{ID: "c"}))
	until(t, c, "a", job.Lead)
	rs, err := c.Runs(t.Context())
	require.NoError(t, err)
	require.Contains(t, rs[0].Nodes[2].Barred.Text, "slow link")
}

// A node that happens to ask does not hear of a check before the check has heard of the node: it would come too early,
// and be checked alone.
func TestNoNodeComesToACheckTooEarly(t *testing.T) {
	var hub *Hub
	early := make(chan rendezvous.Directive, 9)
	hub = NewHub(HubConfig{Gate: func(run string, ids, _ []string) {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		if d, err := hub.Watch(ctx, run, ids[0], Cursor{}); err == nil {
			early <- d.Directive
		}
	}})
	defer hub.Close()
	require.NoError(t, hub.Join(t.Context(), "r", gated("a")))
	require.NoError(t, hub.Join(t.Context(), "r", gated("b")))
	require.Empty(t, early)
	until(t, hub, "a", job.Check)
	until(t, hub, "b", job.Check)
}

// A clearance is for a length of time, whatever the clock of the node says.
func TestClearanceIsShifted(t *testing.T) {
	now := time.Unix(5000, 0)
	for name, c := range map[string]struct{ until, sent, want time.Time }{
		"slow clock":   {now.Add(-59 * time.Minute), now.Add(-time.Hour), now.Add(time.Minute)},
		"same clock":   {now.Add(time.Minute), now, now.Add(time.Minute)},
		"for good":     {time.Time{}, now.Add(-time.Hour), time.Time{}},
		"no send time": {now.Add(time.Minute), time.Time{}, now.Add(time.Minute)},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, c.want, shifted(c.until, c.sent, now)) })
	}
}

// A topology counts for runs that are here from their next seal on, and for those to come.
func TestSetTopology(t *testing.T) {
	h := NewHub(HubConfig{Topology: rendezvous.Topology{"1": "x", "2": "y", "3": "x"}})
	defer h.Close()
	join := func(run, id string, stopped job.EpochID) {
		j := joinOf(id, rendezvous.Params{Min: 3, Max: 3, MaxRestarts: 1})
		j.Node.IP, j.Stopped = id, stopped
		require.NoError(t, h.Join(t.Context(), run, j))
	}
	world := func(run string) (names []string) {
		ms, err := h.World(t.Context(), run)
		require.NoError(t, err)
		for _, m := range ms {
			names = append(names, m.Node)
		}
		return names
	}
	ids := []string{"1", "2", "3"}
	for _, id := range ids {
		join("r", id, job.EpochID{})
	}
	require.Equal(t, []string{"1", "3", "2"}, world("r"))
	h.SetTopology(rendezvous.Topology{"1": "x", "2": "x", "3": "y"})
	require.Equal(t, []string{"1", "3", "2"}, world("r"), "a sealed world stays")
	require.NoError(t, h.Order("r", rendezvous.Order{Kind: rendezvous.OrderRestart}))
	stop, err := h.Watch(t.Context(), "r", "1", Cursor{})
	require.NoError(t, err)
	for _, id := range ids {
		join("r", id, stop.EpochID)
		join("new", id, job.EpochID{})
	}
	want := []string{"1", "2", "3"}
	require.ElementsMatch(t, want[:2], world("r")[:2])
	require.Equal(t, want, world("new"))
}

// What ended an epoch is kept, and what happened is in the timeline.
func TestHubKeepsWhatHappened(t *testing.T) {
	h := NewHub(HubConfig{})
	defer h.Close()
	_, err := h.Evidences("r")
	require.ErrorIs(t, err, ErrUnknownRun)
	j := joinOf("a", rendezvous.Params{Min: 1, Max: 1, MaxRestarts: 3, Budget: rendezvous.Budget{BackoffMax: -1}})
	require.NoError(t, h.Join(t.Context(), "r", j))
	for i := range 2 {
		lead := until(t, h, "a", job.Lead)
		require.NoError(t, h.Report(t.Context(), "r", rendezvous.Ready{ID: "a", EpochID: lead.EpochID}))
		require.NoError(t, h.Report(t.Context(), "r", rendezvous.Failing{
			ID: "a", EpochID: lead.EpochID, Decision: rendezvous.RestartCharged,
			Failures: []job.Failure{{Text: fmt.Sprint("boom ", i)}},
		}))
		j.Stopped = lead.EpochID
		require.NoError(t, h.Join(t.Context(), "r", j))
	}
	got, err := h.Evidences("r")
	require.NoError(t, err)
	require.Len(t, got, 2)
	for i, e := range got {
		require.Equal(t, i, e.Epoch)
		require.Equal(t, fmt.Sprint("boom ", i), e.Failures[0].Text)
	}
	es, err := h.Events(t.Context(), "r", 0)
	require.NoError(t, err)
	var names []string
	for _, e := range es.Events {
		if e.Event != job.EventCost { // of a restart that takes a millisecond
			names = append(names, string(e.Event))
		}
	}
	require.Equal(t, []string{"join", "seal", "run", "break", "seal", "run", "break", "seal"}, names)
}

// A node that is refused takes no run away from the others, nor what an order has left in it.
func TestRefusalKeepsTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(HubConfig{})
		defer h.Close()
		require.NoError(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 1, Max: 1})))
		require.NoError(t, h.Order("r", rendezvous.Order{Kind: rendezvous.OrderBar, Node: "x"}))
		_, err := h.Leave(t.Context(), "r", rendezvous.Leave{ID: "a"})
		require.NoError(t, err)
		require.Error(t, h.Join(t.Context(), "r", joinOf("b", rendezvous.Params{Min: 3, Max: 2})))
		time.Sleep(retention / 2)
		require.NoError(t, h.Join(t.Context(), "other", joinOf("a", rendezvous.Params{Min: 1, Max: 1}))) // prunes
		runs := h.Runs(false)
		require.Len(t, runs, 2)
		require.Equal(t, "other", runs[0].Run, "by name")
		require.Contains(t, runs[1].Bars, "x")
	})
}

// A run with a node in it is kept, however long it lasts, and keeps the hub from being idle.
func TestRunWithANodeIsKept(t *testing.T) {
	h := NewHub(HubConfig{})
	defer h.Close()
	require.True(t, h.Idle())
	require.NoError(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
	r, err := h.existing("r")
	require.NoError(t, err)
	require.False(t, h.Idle())
	require.False(t, r.Idle(time.Now().Add(24*time.Hour)))
	_, err = h.Leave(t.Context(), "r", rendezvous.Leave{ID: "a"})
	require.NoError(t, err)
	require.True(t, h.Idle())
	require.True(t, r.Idle(time.Now().Add(24*time.Hour)))
}

// A report beside a watch has a connection that is closed; without a watch it leaves its connection to that.
func TestReportsKeepNoSecondConnection(t *testing.T) {
	closes, watching := make(chan bool, 1), make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodGet {
			close(watching)
			<-req.Context().Done()
			return
		}
		closes <- req.Close
	}))
	c := NewClient(server.Listener.Addr().String(), "")
	defer func() { c.Close(); server.Close() }()
	require.NoError(t, c.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 1, Max: 1})))
	require.False(t, <-closes)
	ctx, stop := context.WithCancel(t.Context())
	watched := make(chan error)
	go func() { _, err := c.Watch(ctx, "r", "a", Cursor{}); watched <- err }()
	<-watching
	require.NoError(t, c.Report(t.Context(), "r", rendezvous.Cleared{ID: "a"}))
	require.True(t, <-closes)
	stop()
	require.Error(t, <-watched)
	require.NoError(t, c.Report(t.Context(), "r", rendezvous.Cleared{ID: "a"}))
	require.False(t, <-closes)
}

// Nodes restart without new connections: 10,000 at once overflow the daemon's queue, and some wait for seconds. The
// answer of a join is the next directive, but that of an older daemon, which knows no such join.
func TestRestartMakesNoConnection(t *testing.T) {
	for name, old := range map[string]bool{"this version": false, "an older daemon": true} {
		t.Run(name, func(t *testing.T) { restarts(t, old) })
	}
}

func restarts(t *testing.T, old bool) {
	const times = 3
	var joins, watches atomic.Int32
	s, session, dials := restartable(t, func(handler http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if req.Method == http.MethodGet {
				watches.Add(1)
			} else {
				joins.Add(1)
				if old {
					req.URL.RawQuery = ""
				}
			}
			handler.ServeHTTP(w, req)
		})
	})
	for range times {
		require.NoError(t, session.Rejoin(t.Context(), s.restart(t, session).EpochID, nil))
		s.release(t, session)
	}
	require.EqualValues(t, 1, dials.Load())
	require.EqualValues(t, 1+times, joins.Load())
	want := 3 + 2*times // lead, run, and the next stop
	if old {
		want += times
	}
	require.Eventually(t, func() bool { return int(watches.Load()) == want }, time.Minute, time.Millisecond)
}

// A node that ends its workers dials again at once if its connection closes: it is given up soon.
func TestNodeThatStopsKeepsAConnection(t *testing.T) {
	s, session, dials := restartable(t, func(h http.Handler) http.Handler { return h })
	s.restart(t, session)
	began := time.Now()
	require.Eventually(t, func() bool {
		s.client.Close() // the idle connection, once the answer of the watch has been read
		return dials.Load() > 1
	}, 20*time.Second, time.Millisecond)
	require.Less(t, time.Since(began), stopLull)
}

// restartable is a session of one node that runs, with the number of its connections. Its requests come through a
// handler.
func restartable(t *testing.T, through func(http.Handler) http.Handler) (served, *Session, *atomic.Int32) {
	t.Helper()
	hub, dials := NewHub(HubConfig{}), &atomic.Int32{}
	server := httptest.NewServer(through(Handler(hub, ServerConfig{Token: testToken})))
	s := served{hub, NewClient(server.Listener.Addr().String(), testToken), server.Listener.Addr().String()}
	t.Cleanup(func() { s.client.Close(); hub.Close(); _ = server.Config.Close(); server.Close() })
	s.client.WhenDialed(func(net.Addr) { dials.Add(1) })
	session, err := Open(t.Context(), s.client, SessionConfig{Run: "r", Node: joinOf("a", rendezvous.Params{}).Node,
		Params: rendezvous.Params{Min: 1, Max: 1, MaxRestarts: 3}})
	require.NoError(t, err)
	t.Cleanup(session.Close)
	s.release(t, session)
	return s, session, dials
}

// directed waits for a directive.
func directed(t *testing.T, session *Session, kind job.Kind) rendezvous.Directive {
	t.Helper()
	for d := range session.Directives() {
		if d.Kind == kind {
			return d
		}
	}
	t.Fatal(session.Err())
	return rendezvous.Directive{}
}

func (s served) release(t *testing.T, session *Session) {
	t.Helper()
	d := directed(t, session, job.Lead)
	ready := rendezvous.Ready{ID: "a", EpochID: d.EpochID, Addr: "127.0.0.1", Port: 1}
	require.NoError(t, s.hub.Report(t.Context(), "r", ready))
	directed(t, session, job.Run)
}

func (s served) restart(t *testing.T, session *Session) rendezvous.Directive {
	t.Helper()
	require.NoError(t, s.hub.Order("r", rendezvous.Order{Kind: rendezvous.OrderRestart}))
	return directed(t, session, job.Stop)
}

// An order may reach a run between its making for a node and the refusal of the node.
func TestRefusalKeepsAnOrderThatWasFaster(t *testing.T) {
	h := NewHub(HubConfig{})
	defer h.Close()
	r, err := h.open("r", "")
	require.NoError(t, err)
	require.NoError(t, h.Order("r", rendezvous.Order{Kind: rendezvous.OrderPause}))
	h.forgetUnused(r)
	require.Len(t, h.Runs(false), 1)
	require.NoError(t, h.Order("r", rendezvous.Order{Kind: rendezvous.OrderResume}))
	h.forgetUnused(r)
	require.Empty(t, h.Runs(false))
}

// What is mounted beside a run writes into its timeline, and observers hear of it.
func TestSeatAndCrew(t *testing.T) {
	h := NewHub(HubConfig{})
	t.Cleanup(h.Close)
	_, _, err := h.Crew("r")
	require.ErrorIs(t, err, ErrUnknownRun)
	_, err = h.Seat("r", "a")
	require.ErrorIs(t, err, rendezvous.ErrUnknownNode)
	require.NoError(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 1, Max: 1})))
	_, _, err = h.Crew("r")
	require.ErrorIs(t, err, rendezvous.ErrNotRunning)
	seat, err := h.Seat("r", "a")
	require.NoError(t, err)
	require.False(t, seat.Running)
	require.NoError(t, h.Report(t.Context(), "r", rendezvous.Ready{ID: "a", EpochID: seat.EpochID}))
	require.Equal(t, []string{"a"}, h.IDs("r"))
	require.Empty(t, h.IDs("other"))
	epoch, crew, err := h.Crew("r")
	require.NoError(t, err)
	require.Equal(t, seat.EpochID, epoch)
	require.Len(t, crew, 1)
	seat, err = h.Seat("r", "a")
	require.NoError(t, err)
	require.Equal(t, rendezvous.Seat{EpochID: epoch, Name: "a", Running: true}, seat)
}

func TestAnnotate(t *testing.T) {
	var seen []rendezvous.Note
	h := NewHub(HubConfig{Observe: func(run string, n rendezvous.Note) { seen = append(seen, n) }})
	require.ErrorIs(t, h.Annotate("r", "check-began", "", ""), ErrUnknownRun)
	_, err := h.Params("r")
	require.ErrorIs(t, err, ErrUnknownRun)
	j := gated("a")
	j.Params.Check = "level=host"
	require.NoError(t, h.Join(t.Context(), "r", j))
	p, err := h.Params("r")
	require.NoError(t, err)
	require.Equal(t, j.Params.WithDefaults(), p)
	es, err := h.Events(t.Context(), "r", 0)
	require.NoError(t, err)
	require.NoError(t, h.Annotate("r", "check-verdict", "a", "slow"))
	es, err = h.Events(t.Context(), "r", es.Next)
	require.NoError(t, err)
	want := rendezvous.Note{Event: "check-verdict", Node: "a", Text: "slow", Nodes: 1}
	require.Len(t, es.Events, 1)
	want.Term, want.Rank = es.Events[0].Term, -1
	require.Equal(t, want, es.Events[0].Note)
	require.Equal(t, want, seen[len(seen)-1])
	r, err := h.existing("r")
	require.NoError(t, err)
	h.Close()
	require.ErrorIs(t, h.Annotate("r", "check-verdict", "a", "slow"), ErrClosed)
	_, err = h.Params("r")
	require.ErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, r.Err(), ErrClosed)
}

// What is found before anybody has joined begins the run, which keeps it for the nodes that come.
func TestToldEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(HubConfig{})
		defer h.Close()
		require.NoError(t, h.Told("r", "node-error", "b", "no GPU"))
		time.Sleep(retention / 2)
		require.NoError(t, h.Told("r", "node-error", "c", "no GPU"))
		time.Sleep(retention - time.Second)
		require.Error(t, h.Join(t.Context(), "r", rendezvous.Join{}))
		require.NoError(t, h.Join(t.Context(), "other", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
		require.Len(t, h.Runs(false), 2)
		require.NoError(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
		require.NoError(t, h.Told("r", "node-error", "d", "no GPU"))
		es, err := h.Events(t.Context(), "r", 0)
		require.NoError(t, err)
		var told []string
		for _, e := range es.Events {
			if e.Event == "node-error" {
				told = append(told, e.Node)
			}
		}
		require.Equal(t, []string{"b", "c", "d"}, told)

		require.NoError(t, h.Told("lost", "node-error", "b", "no GPU"))
		time.Sleep(retention + time.Second)
		require.NoError(t, h.Join(t.Context(), "last", joinOf("z", rendezvous.Params{Min: 2, Max: 2})))
		_, err = h.Params("lost")
		require.ErrorIs(t, err, ErrUnknownRun)
	})
}

// Helpers are named apart, and wake up like the others.
func TestGateHearsOfHelpers(t *testing.T) {
	var told []string
	h := NewHub(HubConfig{Gate: func(run string, subjects, helpers []string) {
		told = append(told, fmt.Sprint(run, subjects, helpers))
	}, Released: func(run string, ids []string) { told = append(told, fmt.Sprint(run, " free ", ids)) }})
	defer h.Close()
	require.NoError(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
	perform(t, h, rendezvous.Action{Gate: []string{"a"}, Helpers: []string{"b", "c"}},
		rendezvous.Action{Helpers: []string{"d"}}, rendezvous.Action{Released: []string{"d"}},
		rendezvous.Action{Gate: []string{"e"}, Released: []string{"a"}})
	require.Equal(t, []string{"r[a] [b c]", "r[] [d]", "r free [d]", "r free [a]", "r[e] []"}, told)
	h.cfg.Released = nil
	perform(t, h, rendezvous.Action{Released: []string{"d"}})
	require.Len(t, told, 5)
}

// What checkpoint daemons have told is progress, whatever the launchers know.
func TestHubKnowsWhatIsSaved(t *testing.T) {
	saved := int64(0)
	h := NewHub(HubConfig{Saved: func(string) (int64, bool) { return saved, true }})
	defer h.Close()
	budget := rendezvous.Budget{BackoffMax: -1, NoProgress: 1}
	j := joinOf("a", rendezvous.Params{Min: 1, Max: 1, MaxRestarts: 9, Budget: budget})
	require.NoError(t, h.Join(t.Context(), "r", j))
	fails := func() {
		lead := until(t, h, "a", job.Lead)
		require.NoError(t, h.Report(t.Context(), "r", rendezvous.Ready{ID: "a", EpochID: lead.EpochID}))
		require.NoError(t, h.Report(t.Context(), "r", rendezvous.Failing{
			ID: "a", EpochID: lead.EpochID, Decision: rendezvous.RestartCharged,
		}))
		j.Stopped = lead.EpochID
	}
	again := func() { require.NoError(t, h.Join(t.Context(), "r", j)) }
	fails() // nothing is saved yet
	for range 5 {
		again()
		saved++
		fails()
	}
	again()
	fails()
	until(t, h, "a", job.Fail)
}

// A node that has stopped its workers on request, and joined again, is not told to wait: the next answer is its place
// in the next world or, where there is none, comes when the Watch ends.
func TestWaitAfterStopIsNoNews(t *testing.T) {
	for name, c := range map[string]struct {
		back  bool // the other node is
		want  job.Kind
		after time.Duration
	}{"a world forms": {true, job.Lead, time.Second}, "none does": {false, job.Wait, hold(2)}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := NewHub(HubConfig{})
				defer h.Close()
				p := rendezvous.Params{Min: 2, Max: 2, MaxRestarts: 1, Budget: rendezvous.Budget{BackoffMax: -1}}
				for _, id := range []string{"a", "b"} {
					require.NoError(t, h.Join(t.Context(), "r", joinOf(id, p)))
				}
				lead := until(t, h, "a", job.Lead)
				require.NoError(t, h.Report(t.Context(), "r", rendezvous.Ready{ID: "a", EpochID: lead.EpochID}))
				require.NoError(t, h.Report(t.Context(), "r", rendezvous.Failing{ID: "b", EpochID: lead.EpochID,
					Decision: rendezvous.RestartCharged}))
				stop, again := until(t, h, "a", job.Stop), time.Now()
				rejoin := func(id string) {
					ev := joinOf(id, p)
					ev.Stopped = stop.EpochID
					require.NoError(t, h.Join(t.Context(), "r", ev))
				}
				rejoin("a")
				if c.back {
					time.AfterFunc(time.Second, func() { rejoin("b") })
				}
				n, err := h.Watch(t.Context(), "r", "a", Cursor{Directive: stop.Seq})
				require.NoError(t, err)
				require.Equal(t, c.want, n.Directive.Kind)
				require.Equal(t, c.after, time.Since(again))
			})
		})
	}
}
