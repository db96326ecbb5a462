package api

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// standingBy serves a hub while the returned pointer is nil, and else answers with its error.
func standingBy(t *testing.T, token string) (addr string, h *Hub, why *atomic.Pointer[error]) {
	h, why = NewHub(HubConfig{}), new(atomic.Pointer[error])
	t.Cleanup(h.Close)
	votes := Ask(func(run string, body map[string]int) (any, error) { return len(body), nil })
	srv := httptest.NewServer(Handler(h, ServerConfig{Token: token, Mounts: map[string]http.Handler{Vote: votes},
		Standby: func() error {
			if p := why.Load(); p != nil {
				return *p
			}
			return nil
		}}))
	t.Cleanup(srv.Close)
	return strings.TrimPrefix(srv.URL, "http://"), h, why
}

// A redirected request arrives once, at the server that it was redirected to, and so do all later ones.
func TestClientFollowsItsServer(t *testing.T) {
	from, old, why := standingBy(t, "secret")
	to, hub, _ := standingBy(t, "secret")
	c := NewClient(from, "secret")
	t.Cleanup(c.Close)
	moved := error(&MovedError{To: to})
	why.Store(&moved)
	require.NoError(t, c.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 1, Max: 1})))
	require.Empty(t, old.Runs(false))
	require.Len(t, hub.Runs(false), 1)
	why.Store(nil)
	_, err := c.World(t.Context(), "r")
	require.NoError(t, err)
}

// Servers that send each other's clients to and fro are given up.
func TestClientGivesUpCircles(t *testing.T) {
	a, _, whyA := standingBy(t, "secret")
	b, _, whyB := standingBy(t, "secret")
	toA, toB := error(&MovedError{To: a}), error(&MovedError{To: b})
	whyA.Store(&toB)
	whyB.Store(&toA)
	c := NewClient(a, "secret")
	t.Cleanup(c.Close)
	_, err := c.World(t.Context(), "r")
	require.ErrorIs(t, err, errMoved)
	require.False(t, Final(err))
}

// Who has no token learns of no address, and on standby only votes are taken.
func TestStandby(t *testing.T) {
	addr, _, why := standingBy(t, "secret")
	err := error(ErrStandby)
	why.Store(&err)
	c := NewClient(addr, "secret")
	t.Cleanup(c.Close)
	require.ErrorIs(t, c.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 1, Max: 1})), ErrStandby)
	_, runs := c.Runs(t.Context())
	require.ErrorIs(t, runs, ErrStandby)
	var n int
	require.NoError(t, c.Call(t.Context(), "r", Vote, map[string]int{"x": 1}, &n))
	require.Equal(t, 1, n)
	err = &MovedError{To: "10.0.0.9:1"}
	stranger := NewClient(addr, "wrong")
	t.Cleanup(stranger.Close)
	require.ErrorIs(t, stranger.Call(t.Context(), "r", Vote, map[string]int{}, nil), ErrUnauthorized)
	_, got := stranger.Runs(t.Context())
	require.ErrorIs(t, got, ErrUnauthorized)
	require.NotContains(t, got.Error(), "10.0.0.9")
}

// deputy is a Succession that a test writes.
type deputy struct {
	told  chan rendezvous.Directive
	bound atomic.Bool
	lost  atomic.Int32
	moved atomic.Bool
}

func (h *deputy) Told(d rendezvous.Directive)                    { h.told <- d }
func (h *deputy) Bound() bool                                    { return h.bound.Load() }
func (h *deputy) Parting(_ job.EpochID, join func() error) error { return join() }

func (h *deputy) Lost(context.Context, error) bool {
	h.lost.Add(1)
	return h.moved.Swap(false)
}

// A session asks no server while its vote may count for another one.
func TestSessionWaitsForElection(t *testing.T) {
	svc, h := newScript(), &deputy{told: make(chan rendezvous.Directive, 10)}
	s, err := Open(t.Context(), svc, SessionConfig{Run: "r", Node: joinOf("a", rendezvous.Params{Min: 1, Max: 1}).Node,
		Params: rendezvous.Params{Min: 1, Max: 1}, Where: "test", Succession: h, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(s.Close)
	<-svc.joins
	<-svc.asked
	d := rendezvous.Directive{Seq: 7, Kind: "run", Failover: &rendezvous.Failover{Term: 1}}
	svc.news <- News{Directive: d}
	require.Equal(t, d, <-h.told)
	<-svc.asked
	h.bound.Store(true)
	svc.news <- errors.New("gone")
	require.Eventually(t, func() bool { return h.lost.Load() > 3 }, 30*time.Second, time.Millisecond)
	require.Empty(t, svc.asked)
	h.bound.Store(false)
	h.moved.Store(true)
	<-svc.asked
	svc.news <- rendezvous.ErrUnknownNode
	require.Equal(t, "a", (<-svc.joins).Node.ID, "it introduces itself to the new server")
}
