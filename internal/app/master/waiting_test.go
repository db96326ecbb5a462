package master

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/marks"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/lead"
	"dlrover-run/rendezvous/lead/journal"
)

// A master that only checks its options knows no marks, and those of the master that leads have the same owner: it
// changes no node.
func TestMasterThatWaitsChangesNoNode(t *testing.T) {
	s := inPod(t, taintRights...)
	s.Requests()
	a := app(io.Discard)
	a.Action = func(c *cli.Context) error {
		d, err := newDaemon(c, nil)
		if err != nil {
			return err
		}
		defer d.close(0)
		require.NoError(t, d.marks.Mark(t.Context(), "gpu-01", "me", "smoke"))
		require.Nil(t, d.marks.List().Nodes[0].Record, "nobody acts on it")
		for _, r := range s.Requests() {
			require.Equal(t, "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews", r, "it only asks what it may do")
		}
		return nil
	}
	require.NoError(t, a.Run([]string{"dlrover-master", "--ha=lease", "--node-action=taint"}))
}

// alone is a store without other masters.
type alone struct{ *journal.Journal }

func (alone) Close() error { return nil }
func (alone) Holds() bool  { return true }

// A master has asked what it may do to nodes before it was elected: a take-over waits for no API server.
func TestTakeoverAsksNothing(t *testing.T) {
	s := inPod(t, taintRights...)
	t.Setenv("DLROVER_TOKEN", secret)
	j, err := journal.Open(t.TempDir(), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	at := free.Addr().String()
	require.NoError(t, free.Close())
	a := app(io.Discard)
	a.Action = func(c *cli.Context) error {
		e := &election{store: alone{j}, addr: at, log: slog.New(slog.DiscardHandler)}
		checked, err := newDaemon(c, nil)
		require.NoError(t, err)
		s.Requests()
		s.Intercept(func(w http.ResponseWriter, _ *http.Request) bool {
			http.Error(w, "away", http.StatusServiceUnavailable)
			return true
		})
		defer s.Intercept(nil)
		ctx, end := context.WithCancel(t.Context())
		defer end()
		ended := make(chan struct{})
		go func() { defer close(ended); require.NoError(t, serveElected(ctx, c, e, checked)) }()
		client := api.NewClient(at, secret)
		defer client.Close()
		var known marks.Known
		require.Eventually(t, func() bool { return client.Global(t.Context(), "nodes", nil, &known) == nil }, soon,
			10*time.Millisecond)
		require.Equal(t, "taint", known.Action)
		require.NotContains(t, strings.Join(s.Requests(), " "), "selfsubjectaccessreviews")
		end()
		<-ended
		return nil
	}
	require.NoError(t, a.Run([]string{"dlrover-master", "--listen=" + at, "--ha=lease", "--node-action=taint"}))
}

// watched is a store whose leaders the test names.
type watched struct {
	store
	leaders chan lead.Leader
	deposed chan lead.Leader
}

func (w watched) Watch(context.Context) <-chan lead.Leader      { return w.leaders }
func (w watched) Depose(_ context.Context, l lead.Leader) error { w.deposed <- l; return nil }

// A master that has deposed one whose process is gone deposes the next one as well when that is gone, but not the same
// one again and again.
func TestTwoLeadersAreGone(t *testing.T) {
	w := watched{leaders: make(chan lead.Leader), deposed: make(chan lead.Leader, 4)}
	e := &election{store: w, addr: "me:1", log: slog.New(slog.DiscardHandler)}
	var wg sync.WaitGroup
	wg.Go(func() { require.NoError(t, e.deposeTheDead(t.Context())) })
	serves := func(term lead.Term, at string) lead.Leader {
		l, err := net.Listen("tcp", at)
		require.NoError(t, err)
		next := lead.Leader{Term: term, Addr: l.Addr().String()}
		w.leaders <- next
		c, err := l.Accept()
		require.NoError(t, err)
		require.NoError(t, l.Close())
		require.NoError(t, c.Close())
		return next
	}
	deposes := func(l lead.Leader) {
		select {
		case gone := <-w.deposed:
			require.Equal(t, l, gone)
		case <-time.After(soon):
			require.Fail(t, "it was not deposed", l)
		}
	}
	a := serves(1, "127.0.0.1:0")
	deposes(a)
	deposes(serves(2, "127.0.0.1:0"))
	serves(3, a.Addr)
	select {
	case <-w.deposed:
		require.Fail(t, "it was deposed twice in a row")
	case <-time.After(2 * redial):
	}
	close(w.leaders)
	wg.Wait()
}

func (watched) Campaign(ctx context.Context, _ string) (lead.Term, <-chan struct{}, error) {
	<-ctx.Done()
	return 0, nil, ctx.Err()
}

func (watched) Close() error { return nil }

// A master ends if another one that serves has its address. An earlier process of it may lead still, but is gone.
func TestTwoMastersOfOneAddress(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	at := l.Addr().String()
	require.NoError(t, l.Close())
	w := watched{leaders: make(chan lead.Leader, 1), deposed: make(chan lead.Leader, 1)}
	e := &election{store: w, addr: at, log: slog.New(slog.DiscardHandler)}
	w.leaders <- lead.Leader{Term: 7, Addr: at}
	ended := make(chan error, 1)
	go func() { ended <- e.run(t.Context(), nil) }()
	select {
	case err := <-ended:
		require.Fail(t, "nobody is there", err)
	case <-time.After(2 * redial):
	}
	l, err = net.Listen("tcp", at)
	require.NoError(t, err)
	other := &tenure{term: 7, election: &election{}, audience: newAudience(7)}
	mux := http.NewServeMux()
	mux.Handle("/v1/standby", other.standby())
	s := &http.Server{Handler: mux}
	go func() { _ = s.Serve(l) }()
	defer s.Close()
	select {
	case err := <-ended:
		require.EqualError(t, err, "--advertise="+at+": another master serves at this address, in term 7; give each an "+
			"address of its own")
	case <-time.After(soon):
		require.Fail(t, "it waits beside another master of its address")
	}
	require.Empty(t, w.deposed)
}

// Of two masters that wait under one address the later one ends with an error, and the earlier one waits on.
func TestTwoMastersWaitUnderOneAddress(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	leader := &tenure{term: 7, election: &election{}, audience: newAudience(7)}
	mux := http.NewServeMux()
	mux.Handle("/v1/standby", leader.standby())
	s := &http.Server{Handler: mux}
	go func() { _ = s.Serve(l) }()
	defer s.Close()
	ctx, stop := context.WithCancel(t.Context())
	waits := func(id, addr string) chan error {
		w := watched{leaders: make(chan lead.Leader, 1)}
		w.leaders <- lead.Leader{Term: 7, Addr: l.Addr().String()}
		context.AfterFunc(ctx, func() { close(w.leaders) })
		e := &election{store: w, addr: addr, id: id, log: slog.New(slog.DiscardHandler)}
		ended := make(chan error, 1)
		go func() { ended <- e.run(ctx, nil) }()
		return ended
	}
	first := waits("a", "me:1")
	other := waits("b", "you:1")
	require.Eventually(t, func() bool {
		leader.audience.mu.Lock()
		defer leader.audience.mu.Unlock()
		return len(leader.audience.tenants) == 2
	}, soon, time.Millisecond)
	select {
	case err := <-waits("c", "me:1"):
		require.EqualError(t, err, "--advertise=me:1: another master that waits has this address, too; give each an "+
			"address of its own")
	case <-time.After(soon):
		require.Fail(t, "it waits beside another one of its address")
	}
	stop()
	require.NoError(t, <-first)
	require.NoError(t, <-other)
}

// A process that was started in place of another one is no twin, also if the first one wakes after that.
func TestTenants(t *testing.T) {
	a := newAudience(7)
	asks := func(id string, times int) (twin bool) {
		for range times {
			twin = a.meet("me:1", id)
		}
		return twin
	}
	require.False(t, asks("a", 3))
	require.False(t, asks("b", 3), "a may have ended")
	require.False(t, asks("c", 1), "and b")
	require.False(t, asks("c", settled))
	require.False(t, asks("a", 1), "it was frozen")
	require.False(t, asks("c", 1))
	require.True(t, asks("a", 1))
	require.False(t, asks("c", 1))
	require.False(t, asks("", 5), "of an older version")
	for i := range 2 * most {
		require.False(t, a.meet(fmt.Sprint("n:", i), "x"))
	}
	require.LessOrEqual(t, len(a.tenants), most)
}
