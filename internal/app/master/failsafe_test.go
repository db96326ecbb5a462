package master

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/etcd"
	"dlrover-run/internal/app/lease"
	"dlrover-run/internal/conns"
	"dlrover-run/rendezvous/lead"
)

// A leader has stopped before the word of a candidate ends: the answer to a question counts for less time than the
// word that follows the question.
func TestWordOutlastsAnswer(t *testing.T) {
	require.Less(t, fresh, word)
	synctest.Test(t, func(t *testing.T) {
		a, p := newAudience(7), promise{}
		require.False(t, a.vouch([]string{"b:1"}), "nobody has said anything")
		time.Sleep(time.Second)
		question := time.Since(a.began)
		time.Sleep(300 * time.Millisecond)
		require.True(t, p.give(7))
		a.hear("b:1", question)
		require.True(t, a.vouch([]string{"b:1"}))
		require.False(t, a.vouch([]string{"b:1", "c:1"}), "all are needed")
		a.hear("c:1", question+time.Hour)
		require.False(t, a.vouch([]string{"c:1"}), "a question that was never asked")
		p.refuse(true)
		require.False(t, p.give(7), "it is elected")
		for a.vouch([]string{"b:1"}) {
			require.Positive(t, p.rest())
			time.Sleep(time.Millisecond)
		}
		require.Positive(t, p.rest())
	})
}

func TestPromise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p promise
		require.True(t, p.give(3))
		require.False(t, p.give(4), "two leaders cannot have it at the same time")
		p.void(4)
		require.Positive(t, p.rest())
		p.void(3)
		require.LessOrEqual(t, p.rest(), time.Duration(0))
		require.True(t, p.give(4))
		time.Sleep(word)
		require.True(t, p.give(5))
	})
}

// stopped is an etcd that has elected this process after a leader with some vouchers.
type stopped struct {
	store
	failsafe
	vouchers   etcd.Vouchers
	candidates []string
	removed    *atomic.Bool // the vouchers were
}

func (s stopped) Vouchers(context.Context) (etcd.Vouchers, error) {
	if s.removed != nil && s.removed.Load() {
		return etcd.Vouchers{}, nil
	}
	return s.vouchers, nil
}

func (s stopped) Candidates() []string { return s.candidates }

// An elected master that waits for the end of one that it cannot ask serves once somebody has removed the key.
func TestVouchersRemoved(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	var removed atomic.Bool
	s := stopped{removed: &removed, vouchers: etcd.Vouchers{
		Leader: lead.Leader{Term: 1, Addr: silent.Addr().String()}, Candidates: []string{"b:1"}}}
	e := &election{store: s, addr: "me:1", log: slog.New(slog.DiscardHandler), began: time.Now().Add(-time.Hour)}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	time.AfterFunc(redial/2, func() { removed.Store(true) })
	require.NoError(t, e.permit(ctx))
	require.True(t, removed.Load())
}

// An elected master serves at once if no earlier one can go on without etcd, or if that is gone.
func TestPermit(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // it takes connections
	require.NoError(t, err)
	t.Cleanup(func() { _ = silent.Close() }) // after the parallel ones
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, dead.Close())
	lives, gone := silent.Addr().String(), dead.Addr().String()
	for name, c := range map[string]struct {
		before   string
		named    []string
		others   []string
		promised bool
		late     bool  // it waits for the end of its word
		err      error // it does not serve while the leader may
	}{
		"the first one":             {},
		"nobody was named":          {before: lives},
		"itself":                    {before: "me:1", named: []string{"b:1"}},
		"it was named":              {before: lives, named: []string{"b:1", "me:1"}},
		"it has given its word":     {before: lives, named: []string{"me:1"}, promised: true, late: true},
		"to one that is gone":       {before: gone, named: []string{"me:1"}, promised: true},
		"it was not named":          {before: lives, named: []string{"b:1"}, err: context.DeadlineExceeded},
		"by one that is gone":       {before: gone, named: []string{"b:1"}},
		"it leaves that to another": {before: lives, named: []string{"b:1"}, others: []string{"b:1"}, err: errYields},
		"others are unknown as well": {before: lives, named: []string{"b:1"}, others: []string{"c:1"},
			err: context.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := stopped{candidates: c.others}
			s.vouchers = etcd.Vouchers{Leader: lead.Leader{Term: 1, Addr: c.before}, Candidates: c.named}
			e := &election{store: s, addr: "me:1", log: slog.New(slog.DiscardHandler), began: time.Now().Add(-time.Hour)}
			if c.promised {
				require.True(t, e.promise.give(1))
			}
			ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
			defer cancel()
			err := e.permit(ctx)
			if errors.Is(c.err, context.DeadlineExceeded) {
				require.ErrorIs(t, ctx.Err(), c.err)
				require.ErrorIs(t, err, lead.ErrDeposed)
				return
			}
			require.Equal(t, c.err, err)
			if c.late {
				require.LessOrEqual(t, e.promise.rest(), time.Duration(0))
			} else if c.promised {
				require.Positive(t, e.promise.rest(), "it has waited")
			}
		})
	}
}

// A leader that answers no more is frozen once it has answered before.
func TestFrozenLeader(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		if req, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
			_ = req.Body.Close()
			fmt.Fprint(c, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
		}
		_, _ = io.Copy(io.Discard, c)
	}()
	e := &election{addr: "me:1", log: slog.New(slog.DiscardHandler)}
	require.ErrorIs(t, e.follow(t.Context(), lead.Leader{Term: 1, Addr: l.Addr().String()}), errFrozen)
}

// Each store says whether its leader may answer.
func TestStoresHold(t *testing.T) {
	for _, s := range []store{&etcd.Store{}, &lease.Store{}} {
		holds := (&tenure{election: &election{store: s}}).holds()
		require.NotNil(t, holds, "%T", s)
		require.False(t, holds(), "%T leads nobody", s)
	}
}

// A peer that has shown the token is no stranger, of whose connections the oldest are closed when there are many.
func TestGuardedConnectionsAreProven(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	held := guarded(l, func() bool { return true }, slog.New(slog.DiscardHandler))
	defer held.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer client.Close()
	c, err := held.Accept()
	require.NoError(t, err)
	defer c.Close()
	require.Implements(t, (*interface{ Prove(bool) })(nil), c)
	c.(interface{ Prove(bool) }).Prove(true)
	_, unproven := held.(*conns.Listener).Counts()
	require.Zero(t, unproven)
}

// Nothing is answered by a master whose time is over.
func TestHeldListener(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	holds := true
	held := heldListener{l, func() bool { return holds }}
	defer held.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer client.Close()
	c, err := held.Accept()
	require.NoError(t, err)
	_, err = c.Write([]byte("a"))
	require.NoError(t, err)
	holds = false
	_, err = c.Write([]byte("b"))
	require.ErrorIs(t, err, lead.ErrDeposed)
	got, err := io.ReadAll(client)
	require.NoError(t, err)
	require.Equal(t, "a", string(got))
}
