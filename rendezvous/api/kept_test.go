package api

import (
	"fmt"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/internal/runhost"
	"dlrover-run/rendezvous"
)

// work is what the nodes of these tests were started to execute.
const work = "w"

// completes has a run of one node end, and the node leave.
func completes(t *testing.T, h *Hub, id string, o job.Outcome) {
	t.Helper()
	j := joinOf("a", rendezvous.Params{Min: 1, Max: 1})
	j.Work = work
	require.NoError(t, h.Join(t.Context(), id, j))
	n, err := h.Watch(t.Context(), id, "a", Cursor{})
	require.NoError(t, err)
	require.NoError(t, h.Report(t.Context(), id, rendezvous.Ready{ID: "a", EpochID: n.Directive.EpochID}))
	if o == job.Succeeded {
		require.NoError(t, h.Report(t.Context(), id, rendezvous.Success{ID: "a", EpochID: n.Directive.EpochID}))
	} else {
		require.NoError(t, h.Report(t.Context(), id, rendezvous.Failing{ID: "a", EpochID: n.Directive.EpochID,
			Decision: rendezvous.Permanent, Failures: []job.Failure{{Text: "boom"}}}))
	}
	_, err = h.Leave(t.Context(), id, rendezvous.Leave{ID: "a"})
	require.NoError(t, err)
}

func TestEndedRunsAreKeptForADay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(HubConfig{Keep: 24 * time.Hour})
		defer h.Close()
		completes(t, h, "good", job.Succeeded)
		completes(t, h, "bad", job.Failed)
		time.Sleep(23 * time.Hour)
		for id, want := range map[string]string{"good": "succeeded", "bad": "failed"} {
			s, err := h.Run(id)
			require.NoError(t, err)
			require.Equal(t, want, s.Outcome)
			require.Empty(t, s.Nodes, "nobody is here")
			require.Len(t, s.Ended, 1)
			require.Equal(t, want, s.Ended[0].State)
			require.Equal(t, 23*time.Hour, time.Since(s.EndedAt))
			es, err := h.Events(t.Context(), id, 0)
			require.NoError(t, err)
			require.NotEmpty(t, es.Events)
			proof, err := h.Evidences(id)
			require.NoError(t, err)
			require.Len(t, proof, 1)
			world, err := h.World(t.Context(), id)
			require.NoError(t, err)
			require.Empty(t, world, "which takes more room")
		}

		time.Sleep(time.Hour + time.Minute)
		require.Empty(t, h.Runs(true))
	})
}

// Who comes to what has succeeded, and is of the same job, is told so; what else comes begins anew.
func TestNodesThatComeAfterTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(HubConfig{Keep: 24 * time.Hour})
		defer h.Close()
		count := 0
		comes := func(id, work string, nodes int) rendezvous.Directive {
			t.Helper()
			count++
			node := fmt.Sprint("b", count)
			j := joinOf(node, rendezvous.Params{Min: nodes, Max: nodes})
			j.Work = work
			require.NoError(t, h.Join(t.Context(), id, j))
			n, err := h.Watch(t.Context(), id, node, Cursor{})
			require.NoError(t, err)
			if n.Directive.Kind == job.Done {
				require.ErrorIs(t, h.Forget(id), rendezvous.ErrFinishing)
			}
			_, err = h.Leave(t.Context(), id, rendezvous.Leave{ID: node})
			require.NoError(t, err)
			return n.Directive
		}
		for _, c := range []struct {
			name, work string
			o          job.Outcome
			after      time.Duration
			want       job.Kind
		}{
			{"same", work, job.Succeeded, 9 * time.Minute, job.Done},
			{"late", work, job.Succeeded, 10 * time.Minute, job.Lead},
			{"another", "x", job.Succeeded, time.Minute, job.Lead},
			{"old", "", job.Succeeded, time.Minute, job.Lead},
			{"failed", work, job.Failed, time.Minute, job.Lead},
		} {
			completes(t, h, c.name, c.o)
			time.Sleep(c.after)
			d := comes(c.name, c.work, 1)
			require.Equal(t, c.want, d.Kind, c.name)
			if c.want == job.Done {
				require.Equal(t, &job.Cause{Kind: job.CauseEnded, Text: "run same has succeeded, 9m ago: nothing " +
					"is started; to do it again, give another --rdzv-id or, first, dlroverctl forget same"}, d.Cause)
				require.Equal(t, job.Done, comes(c.name, c.work, 1).Kind, "once more")
			}
		}
		completes(t, h, "other size", job.Succeeded)
		require.Equal(t, job.Wait, comes("other size", work, 2).Kind)
	})
}

func TestForget(t *testing.T) {
	h := NewHub(HubConfig{Keep: time.Hour})
	defer h.Close()
	server := httptest.NewServer(Handler(h, ServerConfig{Insecure: true}))
	defer func() { _ = server.Config.Close(); server.Close() }() // a watch that waits has gone to its pool
	c := NewClient(server.Listener.Addr().String(), "")
	defer c.Close()
	completes(t, h, "r", job.Succeeded)
	completes(t, h, nameless, job.Succeeded)
	require.NoError(t, h.Join(t.Context(), "runs", joinOf("a", rendezvous.Params{Min: 1, Max: 1})))
	require.ErrorIs(t, c.Forget(t.Context(), "runs"), ErrNotEnded)
	require.ErrorIs(t, c.Forget(t.Context(), "no"), ErrUnknownRun)

	require.NoError(t, c.Forget(t.Context(), "r"))
	for _, id := range []string{"r", nameless} {
		require.NoError(t, c.Join(t.Context(), id, joinOf("b", rendezvous.Params{Min: 1, Max: 1})))
		n, err := c.Watch(t.Context(), id, "b", Cursor{})
		require.NoError(t, err)
		require.Equal(t, job.Lead, n.Directive.Kind, "the name %q is free", id)
	}
}

// What is kept is bounded: who was left first goes first, and never hinders new runs.
func TestKeptRunsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(HubConfig{Keep: 24 * time.Hour})
		defer h.Close()
		for i := range maxLeftRuns + 10 {
			completes(t, h, fmt.Sprint("r", i), job.Succeeded)
			time.Sleep(time.Second)
		}
		time.Sleep(2 * time.Minute)
		require.Len(t, h.Runs(false), maxLeftRuns)
		_, err := h.Run("r9")
		require.ErrorIs(t, err, ErrUnknownRun)
		_, err = h.Run("r10")
		require.NoError(t, err)
		for i := range runhost.MaxRuns - maxLeftRuns + 100 {
			require.NoError(t, h.Join(t.Context(), fmt.Sprint("n", i), joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
		}
		require.Len(t, h.Runs(false), runhost.MaxRuns)
		_, err = h.Run("r10")
		require.ErrorIs(t, err, ErrUnknownRun)

		r, err := h.existing("r1033")
		require.NoError(t, err)
		l, ok := r.left()
		require.True(t, ok)
		require.Equal(t, 1, l.nodes)
	})
}

// So are their nodes: large runs go sooner, but for the one that was left last.
func TestNodesOfKeptRunsAreBounded(t *testing.T) {
	h := NewHub(HubConfig{Keep: time.Hour})
	defer h.Close()
	const size = maxLeftNodes/2 + 1
	params := rendezvous.Params{Min: size + 1, Max: size + 1}
	for _, run := range []string{"old", "new"} {
		for i := range size {
			require.NoError(t, h.Join(t.Context(), run, joinOf(fmt.Sprint("n", i), params)))
		}
		require.NoError(t, h.Order(run, rendezvous.Order{Kind: rendezvous.OrderStop}))
		for i := range size {
			_, err := h.Leave(t.Context(), run, rendezvous.Leave{ID: fmt.Sprint("n", i)})
			require.NoError(t, err)
		}
	}
	h.prune(time.Now(), true)
	s, err := h.Run("new")
	require.NoError(t, err)
	require.Len(t, s.Ended, size)
	_, err = h.Run("old")
	require.ErrorIs(t, err, ErrUnknownRun)
}
