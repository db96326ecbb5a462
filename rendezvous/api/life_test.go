package api

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

func lifeline(t *testing.T) (l *Lifeline, accepted <-chan struct{}) {
	t.Helper()
	bound, err := Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	c := counted{bound, make(chan struct{}, 100)}
	return serveLife(c), c.accepted
}

// lifeHub is a Hub behind a listener that knows its connections.
func lifeHub(t *testing.T) (*Hub, string) {
	t.Helper()
	h := NewHub(HubConfig{})
	l, err := Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	s := NewServer(Handler(h, ServerConfig{}))
	done := make(chan error, 1)
	go func() { done <- s.Serve(Watchful(l)) }()
	t.Cleanup(func() {
		h.Close()
		require.NoError(t, s.Close())
		require.ErrorIs(t, <-done, http.ErrServerClosed)
	})
	return h, l.Addr().String()
}

// watcher joins as id, with a second node, and watches until the returned function breaks its connection.
func watcher(t *testing.T, h *Hub, addr string, life rendezvous.Life) (hangUp func()) {
	t.Helper()
	p := rendezvous.Params{Min: 1, Max: 2}
	for _, id := range []string{"a", "b"} {
		n := rendezvous.Node{ID: id, Name: id, Rank: -1, Slots: 1}
		if id == "b" {
			n.Life = life
		}
		require.NoError(t, h.Join(t.Context(), "r", rendezvous.Join{Node: n, Params: p}))
	}
	c := NewClient(addr, "")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for after := (Cursor{}); ; {
			n, err := c.Watch(ctx, "r", "b", after)
			if ctx.Err() != nil {
				return
			}
			if err == nil {
				after.Directive = n.Directive.Seq
			}
		}
	}()
	return func() { cancel(); <-done; c.Close() }
}

// settled waits until nobody is being asked or looked at.
func (l *lives) settled(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.provers+l.looks+l.exams+len(l.unasked) == 0
	}, 20*time.Second, time.Millisecond)
}

// held waits until b's request is held or, where not, has ended.
func held(t *testing.T, h *Hub, want bool) {
	t.Helper()
	r, err := h.existing("r")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		r.Lock()
		defer r.Unlock()
		for _, n := range r.round.Nodes() {
			if n.Name == "b" {
				return want && r.wake["b"] != nil || !want && n.Suspect
			}
		}
		return false
	}, 20*time.Second, time.Millisecond)
}

// counted tells of every connection that was accepted.
type counted struct {
	net.Listener
	accepted chan struct{}
}

func (l counted) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err == nil {
		l.accepted <- struct{}{}
	}
	return nc, err
}

// asked waits until the launcher was asked, and its answer has been read.
func asked(t *testing.T, h *Hub, accepted <-chan struct{}) {
	t.Helper()
	select {
	case <-accepted:
	case <-time.After(20 * time.Second):
		t.Fatal("nobody asks")
	}
	h.lives.settled(t)
}

func TestALauncherThatWasKilledIsLostAtOnce(t *testing.T) {
	h, addr := lifeHub(t)
	l, accepted := lifeline(t)
	hangUp := watcher(t, h, addr, l.Life())
	asked(t, h, accepted)
	held(t, h, true)
	require.NoError(t, l.Close())
	began := time.Now()
	hangUp()
	require.Eventually(t, func() bool { return len(h.Runs(true)[0].Nodes) == 1 }, 20*time.Second, time.Millisecond)
	t.Logf("known after %s", time.Since(began))
	require.Equal(t, []string{"its connection broke, and its launcher's port is closed"}, losses(t, h))
}

// What is not proven, or lives, is left to the patience of the run.
func TestALauncherThatMayLiveIsWaitedFor(t *testing.T) {
	for name, c := range map[string]struct {
		life        func(*Lifeline) rendezvous.Life
		dead, asked bool
	}{
		"it lives":       {func(l *Lifeline) rendezvous.Life { return l.Life() }, false, true},
		"it has no port": {func(*Lifeline) rendezvous.Life { return rendezvous.Life{} }, true, false},
		"a stranger had answered": {func(l *Lifeline) rendezvous.Life {
			return rendezvous.Life{Port: l.Life().Port, Key: "another"}
		}, true, true},
		"it never answered": {func(l *Lifeline) rendezvous.Life {
			require.NoError(t, l.Close())
			return l.Life()
		}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			h, addr := lifeHub(t)
			l, accepted := lifeline(t)
			defer l.Close()
			life := c.life(l)
			hangUp := watcher(t, h, addr, life)
			if c.asked {
				asked(t, h, accepted)
			}
			held(t, h, true)
			h.lives.settled(t)
			if c.dead {
				_ = l.l.Close()
			}
			hangUp()
			held(t, h, false)
			h.lives.settled(t)
			events, err := h.Events(t.Context(), "r", 0)
			require.NoError(t, err)
			for _, e := range events.Events {
				require.NotContains(t, e.Note.Text, "port is closed")
			}
		})
	}
}

func TestLives(t *testing.T) {
	ls := newLives()
	defer ls.close()
	l, _ := lifeline(t)
	addr, key := l.l.Addr().String(), l.Life().Key
	for k, want := range map[string]bool{key: true, key[1:]: false, key + "x": false} {
		ok, err := ls.answers(addr, k, lifeTimeout)
		require.NoError(t, err)
		require.Equal(t, want, ok)
	}
	require.False(t, ls.isClosed(addr, key))
	require.NoError(t, l.Close())
	require.True(t, ls.isClosed(addr, key))

	// Somebody else has the port by now, or its owner is about to end.
	other, err := net.Listen("tcp", addr)
	require.NoError(t, err)
	require.False(t, ls.isClosed(addr, key))
	end := time.AfterFunc(3*lifePause, func() { _ = other.Close() })
	defer end.Stop()
	require.True(t, ls.isClosed(addr, key))

	ls.looks = lifeLooks
	ls.look(addr, key, func() { t.Error("too many at once") })
	ls.looks = 0
	ls.close()
	ls.look(addr, key, func() { t.Error("closed") })
	require.False(t, ls.isClosed(addr, key), "nobody was asked")
}

// A kernel that answers lives, also if it refuses; one that answers nothing is unreachable.
func TestExam(t *testing.T) {
	ls := newLives()
	defer ls.close()
	l, _ := lifeline(t)
	addr := l.l.Addr().String()
	require.True(t, ls.reaches(addr))
	require.NoError(t, l.Close())
	require.True(t, ls.reaches(addr), "refused")

	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	require.NoError(t, err)
	defer syscall.Close(fd)
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	require.NoError(t, syscall.Listen(fd, 0))
	bound, err := syscall.Getsockname(fd)
	require.NoError(t, err)
	addr = fmt.Sprintf("127.0.0.1:%d", bound.(*syscall.SockaddrInet4).Port)
	first, err := net.Dial("tcp", addr) // the kernel drops what comes now: its queue is full
	require.NoError(t, err)
	defer first.Close()
	unreachable := make(chan time.Time, 1)
	began := time.Now()
	ls.examine(addr, func() { unreachable <- time.Now() })
	require.GreaterOrEqual(t, (<-unreachable).Sub(began), examTime)

	ls.settled(t)
	ls.exams = lifeExams
	ls.examine(addr, func() { t.Error("too many at once") })
	ls.exams = 0
	ls.close()
	ls.examine(addr, func() { t.Error("closed") })
}

// Nobody waits for a request that a launcher has not come to make.
func TestALauncherThatIsKilledBetweenItsRequestsIsLostAtOnce(t *testing.T) {
	for name, requests := range map[string]func(t *testing.T, c *Client){
		"before it watches": func(*testing.T, *Client) {},
		"told something": func(t *testing.T, c *Client) {
			_, err := c.Watch(t.Context(), "r", "b", Cursor{})
			require.NoError(t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			h, addr := lifeHub(t)
			l, accepted := lifeline(t)
			c := NewClient(addr, "")
			require.NoError(t, c.Join(t.Context(), "r", rendezvous.Join{
				Node:   rendezvous.Node{ID: "b", Name: "b", Rank: -1, Slots: 1, Life: l.Life()},
				Params: rendezvous.Params{Min: 2, Max: 2},
			}))
			requests(t, c)
			asked(t, h, accepted)
			require.NoError(t, l.Close())
			c.Close()
			require.Eventually(t, func() bool { return len(h.Runs(true)[0].Nodes) == 0 }, 20*time.Second, time.Millisecond)
			require.Equal(t, []string{"its connection broke, and its launcher's port is closed"}, losses(t, h))
		})
	}
}

// losses are the texts of the losses that the run tells of.
func losses(t *testing.T, h *Hub) (texts []string) {
	t.Helper()
	events, err := h.Events(t.Context(), "r", 0)
	require.NoError(t, err)
	for _, e := range events.Events {
		if e.Note.Event == job.EventNodeLoss {
			texts = append(texts, e.Note.Text)
		}
	}
	return texts
}
