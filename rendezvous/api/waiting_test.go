package api

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// A launcher that waits is told what for: at once, and then as often as it wants. A run with workers tells nobody.
func TestWaitingLaunchersAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		made := 0
		h := NewHub(HubConfig{Waits: func(s RunStatus) []string {
			made++
			return []string{fmt.Sprintf("%d of %d nodes", s.Params.Min-len(s.Nodes), s.Params.Min), strings.Repeat("x", 600)}
		}})
		defer h.Close()
		p := rendezvous.Params{Min: 3, Max: 3, JoinTimeout: time.Minute}
		require.NoError(t, h.Join(t.Context(), "r", joinOf("a", p)))
		ask := Cursor{Waits: 5 * time.Second}
		n, err := h.Watch(t.Context(), "r", "a", ask)
		require.NoError(t, err)
		require.Regexp(t, "^2 of 3 nodes; x+…$", n.Waiting.For)
		require.Len(t, n.Waiting.For, maxWaiting)
		require.Equal(t, "the run fails, unless enough nodes are there", n.Waiting.Due)
		require.Equal(t, time.Minute, n.Waiting.In)

		require.NoError(t, h.Join(t.Context(), "r", joinOf("b", p)))
		began := time.Now()
		ask.Directive = n.Seq
		_, err = h.Watch(t.Context(), "r", "b", Cursor{Waits: time.Second})
		require.NoError(t, err)
		require.Equal(t, 1, made, "all of a second are told the same")
		n, err = h.Watch(t.Context(), "r", "a", ask)
		require.NoError(t, err)
		require.Equal(t, 5*time.Second, time.Since(began))
		require.Equal(t, 2, made)
		require.Equal(t, job.Wait, n.Kind)
		require.Contains(t, n.Waiting.For, "1 of 3 nodes")
		require.Equal(t, 55*time.Second, n.Waiting.In.Truncate(time.Second))

		began = time.Now()
		_, err = h.Watch(t.Context(), "r", "a", Cursor{Directive: n.Seq})
		require.ErrorIs(t, err, ErrNothingNew, "whoever does not ask is told nothing")
		require.Equal(t, hold(2), time.Since(began))

		for _, id := range []string{"b", "c"} { // b has been silent
			require.NoError(t, h.Join(t.Context(), "r", joinOf(id, p)))
		}
		ask.Directive = n.Seq
		n, err = h.Watch(t.Context(), "r", "a", ask)
		require.NoError(t, err)
		require.Equal(t, job.Lead, n.Kind)
		require.Nil(t, n.Waiting)
	})
}

// However many nodes wait, they ask no more often than the idle nodes of a run of 10,000.
func TestWaitingLaunchersDoNotLoadTheDaemon(t *testing.T) {
	h := NewHub(HubConfig{Waits: func(RunStatus) []string { return nil }})
	defer h.Close()
	r, err := h.open("r", "")
	require.NoError(t, err)
	for n := 1; n <= 10_000; n++ {
		p := rendezvous.Params{Min: 10_001, Max: 10_001}
		require.NoError(t, h.Join(t.Context(), "r", joinOf(fmt.Sprint(n), p)))
		if n != 1 && n != 100 && n != 2000 && n != 10_000 {
			continue
		}
		held, err := r.attach("1", &Cursor{Waits: time.Millisecond})
		require.NoError(t, err)
		require.LessOrEqual(t, float64(n)/held.Seconds(), 170.0, "%d nodes", n)
		require.GreaterOrEqual(t, held, time.Second)
		require.LessOrEqual(t, held, hold(n))
	}
}

// Over HTTP, a request is held without a goroutine, and ends with the same.
func TestWaitingOverHTTP(t *testing.T) {
	s := serveHub(t, "")
	s.hub.cfg.Waits = func(RunStatus) []string { return []string{"b"} }
	require.NoError(t, s.client.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
	n, err := s.client.Watch(t.Context(), "r", "a", Cursor{Waits: time.Second})
	require.NoError(t, err)
	require.Equal(t, "b", n.Waiting.For)
	again, err := s.client.Watch(t.Context(), "r", "a", Cursor{Directive: n.Seq, Waits: time.Second})
	require.NoError(t, err)
	require.Equal(t, n.Directive, again.Directive)
	require.Equal(t, "b", again.Waiting.For)
	require.Equal(t, []string{"b"}, s.hub.Runs(true)[0].Waits)
}

// A session asks from the first request until it has workers, and again when they have to stop.
func TestSessionsAskWhileTheyWait(t *testing.T) {
	svc := newScript()
	told := make(chan *Waiting, 10)
	s, err := Open(t.Context(), svc, SessionConfig{Run: "r", Node: joinOf("a", rendezvous.Params{Min: 1, Max: 1}).Node,
		Params: rendezvous.Params{Min: 1, Max: 1}, WaitingEvery: time.Second, Waiting: func(w *Waiting) { told <- w }})
	require.NoError(t, err)
	defer s.Close()
	seq := uint64(0)
	for _, c := range []struct {
		kind    job.Kind
		waiting *Waiting
		asks    time.Duration
	}{{job.Wait, &Waiting{For: "b"}, time.Second}, {job.Check, &Waiting{For: "checks"}, time.Second},
		{job.Run, nil, 0}, {job.Stop, nil, time.Second}} {
		seq++
		svc.news <- News{Directive: rendezvous.Directive{Seq: seq, Kind: c.kind}, Waiting: c.waiting}
		require.Equal(t, c.waiting, <-told)
		asked := <-svc.asked
		for asked.Directive != seq {
			asked = <-svc.asked
		}
		require.Equal(t, c.asks, asked.Waits, c.kind)
		<-s.Directives()
	}
}
