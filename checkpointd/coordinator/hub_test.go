package coordinator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/runhost"
)

// wire is an HTTP connection in memory to a hub that can be restarted: synctest knows no sockets.
type wire struct {
	hub     atomic.Pointer[Hub]
	handler atomic.Pointer[http.Handler]
	away    atomic.Bool
	largest atomic.Int64 // reply
	asked   atomic.Int64
}

func newWire(t *testing.T) *wire {
	w := &wire{}
	w.serve(NewHub())
	t.Cleanup(func() { w.hub.Load().Close() })
	return w
}

func (w *wire) serve(h *Hub) {
	handler := h.Handler()
	w.hub.Store(h)
	w.handler.Store(&handler)
}

func (w *wire) RoundTrip(req *http.Request) (*http.Response, error) {
	if err := req.Context().Err(); err != nil {
		return nil, err
	}
	if w.away.Load() {
		return nil, errors.New("connection refused")
	}
	w.asked.Add(1)
	rec := httptest.NewRecorder()
	(*w.handler.Load()).ServeHTTP(rec, req)
	if err := req.Context().Err(); err != nil {
		return nil, err
	}
	if n := int64(rec.Body.Len()); n > w.largest.Load() {
		w.largest.Store(n)
	}
	return rec.Result(), nil
}

func (w *wire) client() Coordinator {
	return Client("http://hub", "r", nil, &http.Client{Transport: w})
}

// restart replaces the hub by one without memory, after an outage.
func (w *wire) restart(outage time.Duration) {
	w.away.Store(true)
	w.hub.Load().Close()
	time.Sleep(outage)
	w.serve(NewHub())
	w.away.Store(false)
}

// A hub that forgets everything, at any moment, stops no save.
func TestHubRestarts(t *testing.T) {
	steps := []string{"before anything", "while the follower waits for the intent", "after the leader knows all",
		"after the intent", "while the leader waits for the others", "after all are placed", "after the save is published"}
	for at, name := range steps {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWire(t)
				x := newWorld(t, [2]Coordinator{w.client(), w.client()})
				for _, b := range x.coordinators { // both know the first hub
					require.NoError(t, b.Ages(t.Context(), "", 0, nil))
				}
				reached := func(step int) {
					synctest.Wait()
					if step == at {
						w.restart(3 * time.Second)
						synctest.Wait()
					}
				}
				reached(0)
				follower := x.post(Prepared, 1)
				reached(1)
				require.Len(t, x.now(Prepared, 0), 2)
				reached(2)
				x.now(Intent, 0)
				reached(3)
				leader := x.post(Placed, 0)
				require.NoError(t, (<-follower).err)
				reached(4)
				follower = x.post(Placed, 1)
				require.NoError(t, (<-leader).err)
				reached(5)
				x.now(Published, 0)
				require.NoError(t, (<-follower).err)
				reached(6)
				require.NoError(t, x.coordinators[0].Ages(t.Context(), "", 0,
					nil)) // any later message of the leader
				x.now(Placed, 1)
			})
		})
	}
}

func TestNewHubLearnsOfFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		x := newWorld(t, [2]Coordinator{w.client(), w.client()})
		x.now(Failed, 1)
		w.restart(0)
		leader := x.post(Prepared, 0)
		synctest.Wait()
		x.waits(leader)
		require.NoError(t, x.coordinators[1].Ages(t.Context(), "", 1, nil))
		require.ErrorIs(t, (<-leader).err, ErrAborted)
	})
}

// A late node gets the answer that an earlier hub has given to the others.
func TestNewHubKeepsAnAgreement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		a, b := w.client(), w.client()
		p, ok, err := a.Agree(t.Context(), "k", 0, 2, []Holding{holding("old", 1, 1, 0, 1)}, time.Second)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, Plan{Save: "old", Dir: "/d", Step: 1, Mine: []int{0}, Leader: true}, p)
		w.restart(0)
		require.NoError(t, a.Ages(t.Context(), "", 0, nil))
		p, ok, err = b.Agree(t.Context(), "k", 1, 2,
			[]Holding{holding("new", 9, 9, 0, 1), holding("old", 1, 1, 0, 1)}, time.Second)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, Plan{Save: "old", Dir: "/d", Step: 1}, p)
	})
}

func TestRequestsAreHeldAndRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		x := newWorld(t, [2]Coordinator{w.client(), w.client()})
		follower := x.post(Prepared, 1)
		time.Sleep(4*hold + time.Second)
		synctest.Wait()
		require.EqualValues(t, 5, w.asked.Load())
		require.Len(t, x.now(Prepared, 0), 2)
		x.finish(follower)
	})
}

func TestClientOutlastsAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		w.away.Store(true)
		b := w.client()
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		done := make(chan error)
		go func() { done <- b.Ages(ctx, "", 0, []Age{{Rank: 1}}) }()
		time.Sleep(10 * time.Minute)
		w.away.Store(false)
		back := time.Now()
		require.NoError(t, <-done)
		require.LessOrEqual(t, time.Since(back), longestPause)

		w.away.Store(true)
		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := b.Ages(ctx, "", 0, nil)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "connection refused")
	})
}

func TestAgreements(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		b := w.client()
		agree := func(key string, node int, hs ...Holding) (Plan, bool) {
			p, ok, err := b.Agree(t.Context(), key, node, 3, hs, time.Minute)
			require.NoError(t, err)
			return p, ok
		}
		begin := time.Now()
		plans := make(chan Plan, 2)
		for node := range 2 {
			go func() {
				p, _ := agree("all", node, holding("s", 5, 5, node, 2))
				plans <- p
			}()
		}
		time.Sleep(time.Second)
		p, ok := agree("all", 2, copied(holding("s", 5, 5, 1, 2)))
		require.True(t, ok)
		require.Equal(t, Plan{Save: "s", Dir: "/d", Step: 5}, p)
		one, two := <-plans, <-plans
		if two.Leader {
			one, two = two, one
		}
		require.Equal(t, Plan{Save: "s", Dir: "/d", Step: 5, Mine: []int{0}, Leader: true}, one)
		require.Equal(t, []int{1}, two.Mine)
		require.Equal(t, time.Second, time.Since(begin))

		begin = time.Now()
		p, ok = agree("one", 0, holding("s", 5, 5, 0, 1))
		require.True(t, ok)
		require.Equal(t, time.Minute, time.Since(begin), "patience")
		late, _ := agree("one", 1, holding("newer", 6, 6, 0, 1))
		require.Equal(t, "s", late.Save, "frozen")
		require.Empty(t, late.Mine)
		again, _ := agree("one", 0)
		require.Equal(t, p, again)
		_, _, err := b.Agree(t.Context(), "one", 0, 4, nil, 0)
		require.ErrorIs(t, err, errBadRequest)
		_, ok, err = b.Agree(t.Context(), "nothing", 0, 1, nil, 0)
		require.NoError(t, err)
		require.False(t, ok)
	})
}

func TestAgreementMakesAnotherAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		x := newWorld(t, [2]Coordinator{w.client(), w.client()})
		x.now(Failed, 1) // and that node is gone: node 0 has a copy
		_, ok, err := x.coordinators[0].Agree(t.Context(), "k", 0, 1,
			[]Holding{holding(x.save.ID, 20, 1, 0, 2), copied(holding(x.save.ID, 20, 1, 1, 2))}, 0)
		require.NoError(t, err)
		require.True(t, ok)
		es, err := x.coordinators[0].Post(t.Context(), report(x.save, Prepared, 0, 1))
		require.NoError(t, err)
		require.Len(t, es, 2)
	})
}

func TestPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		b := w.client()
		first := Peer{Node: 0, Addr: "10.0.0.1:1", Switch: "s", Copies: []Copy{{Rank: 1, Shard: 1, Save: "x", Step: 4}}}
		got := make(chan []Peer)
		go func() {
			ps, err := b.Peers(t.Context(), "e", first, 2, time.Minute)
			require.NoError(t, err)
			got <- ps
		}()
		synctest.Wait()
		second := Peer{Node: 1, Addr: "10.0.0.2:1"}
		ps, err := b.Peers(t.Context(), "e", second, 2, time.Minute)
		require.NoError(t, err)
		require.Equal(t, []Peer{first, second}, ps)
		require.Equal(t, ps, <-got)

		second.Addr = "10.0.0.2:2" // its daemon was restarted
		ps, err = b.Peers(t.Context(), "e", second, 2, time.Minute)
		require.NoError(t, err)
		require.Equal(t, []Peer{first, second}, ps)

		begin := time.Now()
		ps, err = b.Peers(t.Context(), "incomplete", first, 2, time.Minute)
		require.NoError(t, err)
		require.Equal(t, []Peer{first}, ps)
		require.Equal(t, time.Minute, time.Since(begin))
	})
}

// A hub that has lost its memory learns the addresses of all nodes again, from their next requests.
func TestNewHubLearnsOfPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		bs := []Coordinator{w.client(), w.client()}
		found := make(chan []Peer, 2)
		for node, b := range bs {
			go func() {
				ps, err := b.Peers(t.Context(), "e", Peer{Node: node, Addr: fmt.Sprint("10.0.0.1:", node)}, 2,
					time.Minute)
				require.NoError(t, err)
				found <- ps
			}()
		}
		require.Equal(t, <-found, <-found)
		w.restart(time.Second)
		begin := time.Now()
		require.NoError(t, bs[0].Ages(t.Context(), "", 0, nil))
		require.Zero(t, time.Since(begin), "it does not wait for the others")
		moved := Peer{Node: 1, Addr: "10.0.0.1:9"}
		ps, err := w.client().Peers(t.Context(), "e", moved, 2, time.Minute) // a new daemon
		require.NoError(t, err)
		require.Equal(t, []Peer{{Node: 0, Addr: "10.0.0.1:0"}, moved}, ps)
		ps, err = bs[0].Peers(t.Context(), "e", Peer{Node: 0, Addr: "10.0.0.1:0"}, 2, time.Minute)
		require.NoError(t, err)
		require.Equal(t, moved, ps[1])
	})
}

// An epoch may last for days: the addresses of its nodes are not forgotten, neither by the hub nor for the next one.
func TestPeersAreRememberedWhileTheEpochRuns(t *testing.T) {
	for name, restart := range map[string]bool{"the same hub": false, "a new hub": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWire(t)
				b := w.client()
				_, err := b.Peers(t.Context(), "e", Peer{Addr: "10.0.0.1:1"}, 2, time.Second)
				require.NoError(t, err)
				for i := range 2 * maxReplays {
					time.Sleep(forgetAfter / maxReplays)
					require.NoError(t, b.Ages(t.Context(), "", 0, []Age{{Rank: 0}}))
					_, err := b.Post(t.Context(), report(Save{ID: fmt.Sprint(i), Step: 1, Shards: 1}, Published, 0))
					require.NoError(t, err)
				}
				if restart {
					w.restart(time.Second)
					require.NoError(t, b.Ages(t.Context(), "", 0, nil))
				}
				begin := time.Now()
				ps, err := w.client().Peers(t.Context(), "e", Peer{Node: 1, Addr: "10.0.0.1:2"}, 2,
					time.Minute) // a new daemon
				require.NoError(t, err)
				require.Len(t, ps, 2)
				require.Less(t, time.Since(begin), 3*time.Second)
				require.Equal(t, "10.0.0.1:1", ps[0].Addr)
			})
		})
	}
}

// A hub of an earlier release refuses unknown fields: the fields that it knows are enough.
func TestPeersAtAnEarlierHub(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		type copyBefore struct {
			Rank  int    `json:"rank"`
			Shard int    `json:"shard"`
			Save  string `json:"save"`
			Step  int64  `json:"step"`
		}
		var old http.Handler = http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
			data, err := io.ReadAll(req.Body)
			require.NoError(t, err)
			var body struct {
				Key  string `json:"key"`
				Self struct {
					Node   int          `json:"node"`
					Addr   string       `json:"addr"`
					Copies []copyBefore `json:"copies"`
				} `json:"self"`
				Nodes    int           `json:"nodes"`
				Patience time.Duration `json:"patience"`
			}
			if err := decode(data, &body); err != nil {
				wireErrors.Write(rw, err)
				return
			}
			writeJSON(rw, map[string]any{"peers": []any{body.Self}})
		})
		w.handler.Store(&old)
		b := w.client()
		self := Peer{Addr: "10.0.0.1:1", Copies: []Copy{{Rank: 1, Shard: 1, Save: "x", Step: 4, Dir: "/d", SavedNS: 5,
			Shards: 2}}}
		for range 2 {
			ps, err := b.Peers(t.Context(), "e", self, 1, time.Minute)
			require.NoError(t, err)
			require.Equal(t, []Peer{{Addr: "10.0.0.1:1", Copies: []Copy{{Rank: 1, Shard: 1, Save: "x", Step: 4}}}}, ps)
		}
	})
}

// The copies of a node are reported with all fields that identify them.
func TestPeersReportTheirCopies(t *testing.T) {
	self := Peer{Addr: "10.0.0.1:1", Copies: []Copy{{Rank: 1, Shard: 1, Save: "x", Step: 4, Dir: "/d", SavedNS: 5,
		Shards: 2}, {Save: "y"}}}
	ps, err := newWire(t).client().Peers(t.Context(), "e", self, 1, 0)
	require.NoError(t, err)
	require.Equal(t, []Peer{self}, ps)
}

// The daemon of a dead launcher still announces its holdings.
func TestLostLauncherWithADaemon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		found := make(chan bool)
		agree := func(node int) {
			_, ok, err := w.client().Agree(t.Context(), "breakpoint.7.2.0.abc", node, 2,
				[]Holding{holding("s", 5, 5, node, 2)}, time.Minute)
			require.NoError(t, err)
			found <- ok
		}
		go agree(0)
		synctest.Wait()
		w.hub.Load().Lost("r", 7, 2, 1)
		time.Sleep(lostGrace * 3 / 4)
		go agree(1)
		require.True(t, <-found)
		require.True(t, <-found)
	})
}

func TestNewHubLearnsParticipation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		a, b := w.client(), w.client()
		require.NoError(t, b.Announce(t.Context(), Participation{Of: "7.2.0", Node: 1}))
		w.restart(time.Second)
		require.NoError(t, b.Ages(t.Context(), "", 1, nil))
		begin := time.Now()
		_, ok, err := a.Agree(t.Context(), "breakpoint.7.2.0.abc", 0, 2, []Holding{holding("s", 5, 5, 0, 1)},
			time.Minute)
		require.NoError(t, err)
		require.True(t, ok)
		require.Zero(t, time.Since(begin))
	})
}

func says(t *testing.T, h *Hub, of string, node int, keys ...string) {
	t.Helper()
	w := &wire{}
	w.serve(h)
	require.NoError(t, w.client().Announce(t.Context(), Participation{of, node, keys}))
}

// The dead of a round are not waited for, whether the hub hears of them before, meanwhile or never.
func TestAgreementsWithoutTheDead(t *testing.T) {
	const key = "breakpoint.7.2.0.abc"
	for name, c := range map[string]struct {
		before, meanwhile func(*testing.T, *Hub)
		want              time.Duration
	}{
		"nobody knows": {want: time.Minute},
		"before":       {before: func(t *testing.T, h *Hub) { h.Lost("r", 7, 2, 2) }, want: time.Second},
		"meanwhile":    {meanwhile: func(t *testing.T, h *Hub) { h.Lost("r", 7, 2, 2) }, want: 3*time.Second + lostGrace},
		"another round": {before: func(t *testing.T, h *Hub) { h.Lost("r", 7, 1, 2); h.Lost("r", 6, 2, 2) },
			want: time.Minute},
		"another run":          {before: func(t *testing.T, h *Hub) { h.Lost("other", 7, 2, 2) }, want: time.Minute},
		"it has spoken before": {before: func(t *testing.T, h *Hub) { h.Lost("r", 7, 2, 0) }, want: time.Minute},
		"it had spoken":        {meanwhile: func(t *testing.T, h *Hub) { h.Lost("r", 7, 2, 0) }, want: time.Minute},
		"meanwhile elsewhere": {meanwhile: func(t *testing.T, h *Hub) {
			h.Lost("r", 7, 1, 2)
			says(t, h, "7.2.1", 2)
		}, want: time.Minute},
		"it speaks elsewhere": {before: func(t *testing.T, h *Hub) {
			says(t, h, "7.2.0", 2, "breakpoint.7.2.0.def")
		}, want: time.Second},
		"it says so meanwhile": {meanwhile: func(t *testing.T, h *Hub) { says(t, h, "7.2.0", 2) },
			want: 3 * time.Second},
		"it is going to speak": {before: func(t *testing.T, h *Hub) {
			says(t, h, "7.2.0", 2, "breakpoint.7.2.0.def", key)
		}, want: time.Minute},
		"it changes its mind": {before: func(t *testing.T, h *Hub) {
			says(t, h, "7.2.0", 2)
			says(t, h, "7.2.0", 2, key)
		}, want: time.Minute},
		"another epoch": {before: func(t *testing.T, h *Hub) { says(t, h, "7.2.1", 2) }, want: time.Minute},
		"dead before it spoke": {before: func(t *testing.T, h *Hub) {
			says(t, h, "7.2.0", 2, key)
			h.Lost("r", 7, 2, 2)
		}, want: time.Second},
		"no such node": {before: func(t *testing.T, h *Hub) { h.Lost("r", 7, 2, 3); h.Lost("r", 7, 2, -1) },
			want: time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWire(t)
				if c.before != nil {
					c.before(t, w.hub.Load())
				}
				begin, took := time.Now(), make(chan time.Duration, 2)
				for node := range 2 {
					go func() {
						time.Sleep(time.Duration(node) * time.Second)
						p, ok, err := w.client().Agree(t.Context(), key, node, 3,
							[]Holding{holding("s", 5, 5, node, 2)}, time.Minute)
						require.NoError(t, err)
						require.True(t, ok)
						require.Equal(t, []int{node}, p.Mine)
						took <- time.Since(begin)
					}()
				}
				time.Sleep(3 * time.Second)
				if c.meanwhile != nil {
					c.meanwhile(t, w.hub.Load())
				}
				require.Equal(t, [2]time.Duration{c.want, c.want}, [2]time.Duration{<-took, <-took})
			})
		})
	}
}

// The master knows the topology; the nodes need not.
func TestPeersLearnTheirSwitch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		w.hub.Load().SetSwitches(map[string]string{"10.0.0.1": "asw1", "10.0.0.2": "asw2"})
		ps, err := w.client().Peers(t.Context(), "e", Peer{Addr: "10.0.0.1:1"}, 1, time.Minute)
		require.NoError(t, err)
		require.Equal(t, []Peer{{Addr: "10.0.0.1:1", Switch: "asw1"}}, ps)
		ps, err = w.client().Peers(t.Context(), "f", Peer{Addr: "10.0.0.2:1", Switch: "own word"}, 1, time.Minute)
		require.NoError(t, err)
		require.Equal(t, "own word", ps[0].Switch)
	})
}

func TestSummary(t *testing.T) {
	w := newWire(t)
	x := newWorld(t, [2]Coordinator{w.client(), w.client()})
	require.NoError(t, x.coordinators[0].Ages(t.Context(), "", 0,
		[]Age{{Rank: 3, MemoryStep: 9}, {Rank: 1, MemoryStep: 8}}))
	x.now(Failed, 1)
	sum := w.hub.Load().Summary("r")
	require.Equal(t, []Age{{Rank: 1, MemoryStep: 8}, {Rank: 3, MemoryStep: 9}}, sum.Ages)
	require.Len(t, sum.Saves, 1)
	require.Equal(t, Failed, sum.Saves[0].Phase)
	require.Contains(t, sum.Saves[0].Error, "disk full")
	require.Equal(t, []string{"r"}, w.hub.Load().Runs())
	for _, path := range []string{"/v1/runs/r/checkpoints", "/v1/runs/r/checkpoints/"} {
		rec := httptest.NewRecorder()
		w.hub.Load().Handler().ServeHTTP(rec, httptest.NewRequest("GET", path, nil))
		require.Equal(t, http.StatusOK, rec.Code)
		require.Contains(t, rec.Body.String(), `"memory_step":8`)
	}
	require.Equal(t, Summary{Saves: []saveStatus{}, Ages: []Age{}}, w.hub.Load().Summary("unknown"))
}

func TestHubForgetsRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		x := newWorld(t, [2]Coordinator{w.client(), w.client()})
		x.now(Failed, 1)
		time.Sleep(forgetAfter + time.Minute)
		other := Client("http://hub", "other", nil, &http.Client{Transport: w})
		require.NoError(t, other.Ages(t.Context(), "", 0, []Age{{}}))
		require.Equal(t, []string{"other"}, w.hub.Load().Runs())
	})
}

func TestHubBoundsItsRuns(t *testing.T) {
	w := newWire(t)
	for i := range runhost.MaxRuns {
		_, err := w.hub.Load().run(fmt.Sprint(i))
		require.NoError(t, err)
	}
	require.ErrorIs(t, w.client().Ages(t.Context(), "", 0, nil), ErrLimit)
}

func TestBadRequests(t *testing.T) {
	good := `{"save":{"id":"a","step":1,"shards":1},"phase":"placed","shards":[0]`
	for name, c := range map[string]struct {
		method, path, body string
		status             int
		code               string
	}{
		"not JSON":   {"POST", "r/checkpoints/reports", "nope", 400, "bad_request"},
		"two values": {"POST", "r/checkpoints/reports", good + "}{}", 400, "bad_request"},
		"nothing":    {"POST", "r/checkpoints/reports", "", 400, "bad_request"},
		"no shard": {"POST", "r/checkpoints/reports",
			`{"save":{"id":"a","step":1,"shards":1},"phase":"placed"}`, 400, "bad_request"},
		"huge":           {"POST", "r/checkpoints/reports", `{"error":"` + strings.Repeat("x", maxBody) + `"}`, 429, "limit"},
		"node of none":   {"POST", "r/checkpoints/agree", `{"key":"k","node":0,"nodes":0}`, 400, "bad_request"},
		"no key":         {"POST", "r/checkpoints/peers", `{"nodes":1}`, 400, "bad_request"},
		"speaks of none": {"POST", "r/checkpoints/speaks", `{"node":1}`, 400, "bad_request"},
		"speaks a lot": {"POST", "r/checkpoints/speaks",
			`{"of":"k","keys":["` + strings.Repeat(`a","`, maxKeys) + `"]}`, 429, "limit"},
		"relative copy": {"POST", "r/checkpoints/peers", `{"key":"k","nodes":1,"self":{"copies":[{"dir":"d"}]}}`,
			400, "bad_request"},
		"negative rank":  {"POST", "r/checkpoints/ages", `{"ages":[{"rank":-1}]}`, 400, "bad_request"},
		"control in run": {"POST", "a%0Ab/checkpoints/ages", `{}`, 400, "bad_request"},
		"DEL in run":     {"POST", "a%7f/checkpoints/ages", `{}`, 400, "bad_request"},
		"bidi in run":    {"POST", "a%e2%80%ae/checkpoints/ages", `{}`, 400, "bad_request"},
		"bytes in run":   {"POST", "a%ff/checkpoints/ages", `{}`, 400, "bad_request"},
		"too many shards": {"POST", "r/checkpoints/reports",
			`{"save":{"id":"a","step":1,"shards":100001},"phase":"placed","shards":[0]}`, 429, "limit"},
		"wrong method":  {"GET", "r/checkpoints/reports", "", 405, ""},
		"no such thing": {"POST", "r/checkpoints/other", "", 404, ""},
	} {
		t.Run(name, func(t *testing.T) {
			hub := NewHub()
			rec := httptest.NewRecorder()
			hub.Handler().ServeHTTP(rec, httptest.NewRequest(c.method, "http://hub/v1/runs/"+c.path,
				strings.NewReader(c.body)))
			require.Equal(t, c.status, rec.Code)
			if c.code != "" {
				require.Contains(t, rec.Body.String(), `{"code":"`+c.code+`"`)
			}
			require.Empty(t, hub.Runs())
		})
	}
}

// TestNewerDaemon says more than this hub knows.
func TestNewerDaemon(t *testing.T) {
	hub := NewHub()
	body := `{"save":{"id":"a","step":1,"shards":2,"x":1},"phase":"placed","shards":[0],"note":true,"y":[2]}`
	rec := httptest.NewRecorder()
	hub.Handler().ServeHTTP(rec, httptest.NewRequest("POST", "http://hub/v1/runs/r/checkpoints/reports",
		strings.NewReader(body)))
	require.Equal(t, http.StatusOK, rec.Code, rec.Body)
	require.Equal(t, []string{"r"}, hub.Runs())
}

func TestClientAgainstAnotherService(t *testing.T) {
	for name, c := range map[string]struct {
		status     int
		body, want string
	}{
		"a page":      {200, "<html>", "another service"},
		"not found":   {404, "no", "another service"},
		"a bad token": {401, `{"code":"unauthorized","error":"the token differs"}`, "the token differs"},
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(c.status)
				fmt.Fprint(w, c.body)
			}))
			defer s.Close()
			transport := &http.Transport{}
			defer transport.CloseIdleConnections()
			b := Client(s.URL, "r", func() []string { return []string{"t"} }, &http.Client{Transport: transport})
			require.ErrorContains(t, b.Ages(t.Context(), "", 0, nil), c.want)
		})
	}
}

// A message that waits at a hub goes on at the one that takes its place elsewhere.
func TestMove(t *testing.T) {
	hold := make(chan struct{})
	frozen := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-hold }))
	defer frozen.Close()
	defer close(hold)
	hub := NewHub()
	defer hub.Close()
	s := httptest.NewServer(hub.Handler())
	defer s.Close()
	b := Client(frozen.URL, "r", nil, nil)
	defer b.(*client).hc.CloseIdleConnections()
	done := make(chan error, 1)
	go func() { done <- b.Ages(t.Context(), "", 0, nil) }()
	b.(Mover).Move(s.Listener.Addr().String())
	require.NoError(t, <-done)
}

// Two thousand nodes commit a save, each over its own client: only the leader gets a large reply.
func TestManyNodes(t *testing.T) {
	const n = 2000
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		s := Save{ID: "big", Step: 1, Shards: n}
		errs := make(chan error, n)
		leader := Client("http://hub", "r", nil, &http.Client{Transport: w})
		for shard := 1; shard < n; shard++ {
			go func() {
				b := w.client()
				_, err := b.Post(t.Context(), report(s, Prepared, shard))
				if err == nil {
					_, err = b.Post(t.Context(), report(s, Placed, shard))
				}
				errs <- err
			}()
		}
		synctest.Wait()
		require.Zero(t, w.largest.Load(), "nobody is told anything yet")
		es, err := leader.Post(t.Context(), report(s, Prepared, 0))
		require.NoError(t, err)
		require.Len(t, es, n)
		w.largest.Store(0)
		for _, p := range []Phase{Intent, Placed, Published} {
			_, err = leader.Post(t.Context(), report(s, p, 0))
			require.NoError(t, err)
		}
		for range n - 1 {
			require.NoError(t, <-errs)
		}
		require.Less(t, w.largest.Load(), int64(64))
		require.EqualValues(t, 2*(n-1)+4, w.asked.Load(), "one request for each phase of each node")
	})
}

func FuzzHandler(f *testing.F) {
	f.Add("reports", `{"save":{"id":"a","step":1,"shards":1},"phase":"prepared","shards":[0],"entries":[{"shard":0,`+
		`"files":[{"path":"p","size":1,"crc32":2,"shard":0}]}]}`)
	f.Add("reports", `{"save":{"id":"a","step":1,"shards":2},"phase":"failed","shards":[1],"error":"x","note":true}`)
	f.Add("agree", `{"key":"k","node":0,"nodes":1,"holdings":[{"save":"s","dir":"/d","step":1,`+
		`"saved":"2026-01-01T00:00:00Z","shard":0,"shards":1}],"patience":5}`)
	f.Add("agree",
		`{"key":"k","node":0,"nodes":2,"note":true,"patience":0,"answer":{"plan":{"save":"s","mine":[0,-1]},"found":true}}`)
	f.Add("peers", `{"key":"k","self":{"node":0,"addr":"a"},"nodes":1,"patience":0}`)
	f.Add("speaks", `{"of":"7.2.0","node":1,"keys":["breakpoint.7.2.0.abc"]}`)
	f.Add("agree", `{"key":"breakpoint.7.2.0.abc","node":0,"nodes":2}`)
	f.Add("peers", `{"key":"k","self":{"node":0,"copies":[{"rank":-1,"save":"s","dir":"/d","saved_ns":5,"shards":2}]},`+
		`"nodes":1,"note":true}`)
	f.Add("ages", `{"node":0,"ages":[{"rank":0,"memory_step":1}]}`)
	f.Fuzz(func(t *testing.T, path, body string) {
		hub := NewHub()
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // waits for nothing
		for range 2 {
			req, err := http.NewRequestWithContext(ctx, "POST",
				"http://x/v1/runs/r/checkpoints/"+strings.Map(letters, path), strings.NewReader(body))
			if err != nil {
				return
			}
			rec := httptest.NewRecorder()
			hub.Handler().ServeHTTP(rec, req)
			require.NotEqual(t, http.StatusInternalServerError, rec.Code, rec.Body)
		}
		hub.Summary("r")
	})
}

func letters(r rune) rune {
	if r < 'a' || r > 'z' {
		return -1
	}
	return r
}

func FuzzFiles(f *testing.F) {
	f.Add("shard-3.prepared", []byte(`{"shard":3,"files":[{"path":"p","size":1,"crc32":2,"shard":3,"tmp":"t"}]}`))
	f.Add("shard-03.placed", []byte(`{"shard":3,"error":"disk full"}`))
	f.Add("intent", []byte(`{"save":"a"}`))
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		shard, kind, ok := parseMarker(name)
		if ok {
			require.Equal(t, name, marker(shard, kind))
			require.GreaterOrEqual(t, shard, 0)
		}
		if e, err := parseEntry(data, shard); err == nil {
			require.Equal(t, shard, e.Shard)
		}
		require.NotEmpty(t, parseFailure(data).Error)
		manifestOf(data)
	})
}

// What a node says of its storage is one printable line, and stands until the node says otherwise.
func TestTroubleIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		c := w.client()
		long := Age{Rank: 3, Trouble: "full\n" + strings.Repeat("x", 2*maxTrouble)}
		require.NoError(t, c.Ages(t.Context(), "", 0, []Age{long}))
		told := w.hub.Load().Summary("r").Ages[0].Trouble
		require.LessOrEqual(t, len(told), maxTrouble)
		require.Regexp(t, "^full x+", told)
		require.NoError(t, c.Ages(t.Context(), "", 0, []Age{{Rank: 3}}))
		require.Empty(t, w.hub.Load().Summary("r").Ages[0].Trouble)
	})
}
