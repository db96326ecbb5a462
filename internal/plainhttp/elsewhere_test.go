package plainhttp

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// process is one of several that may be elected. It answers all requests but those to /held.
type process struct {
	*httptest.Server
	asked  atomic.Int64 // whether it serves
	held   atomic.Int64
	serves atomic.Bool // it answers that it does
}

func newProcess(t *testing.T) *process {
	p := &process{}
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		switch {
		case r.Header.Get("Authorization") != "Bearer secret":
			w.WriteHeader(http.StatusUnauthorized)
		case r.URL.Path == LeaderPath:
			p.asked.Add(1)
			if p.serves.Load() {
				w.WriteHeader(http.StatusNoContent)
			} else {
				<-r.Context().Done()
			}
		case r.URL.Path == "/held":
			p.held.Add(1)
			<-r.Context().Done()
		default:
			_, _ = w.Write(append(body, " answered"...))
		}
	}))
	t.Cleanup(p.Server.Close)
	p.serves.Store(true)
	return p
}

func (p *process) addr() string { return p.Listener.Addr().String() }

// frozen takes connections and never answers.
func frozen(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String()
}

// among returns what the client of several addresses, which looks around soon, does with requests.
func among(t *testing.T, addrs ...string) (a *Among, ask func(ctx context.Context, path string) (string, error)) {
	a = NewAmong(strings.Join(addrs, ","))
	a.looks = looks{quiet: 20 * time.Millisecond, every: 20 * time.Millisecond, most: 20 * time.Millisecond,
		patience: 500 * time.Millisecond}
	c := a.Through(nil)
	t.Cleanup(c.CloseIdleConnections)
	return a, func(ctx context.Context, path string) (string, error) {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+a.First()+path, strings.NewReader("body"))
		require.NoError(t, err)
		r.Header.Set("Authorization", "Bearer secret")
		resp, err := c.Do(r)
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		return string(text), err
	}
}

// A request that a frozen process has is sent again, with its body, to the one that serves, and so are all later ones.
func TestARequestLeavesAFrozenProcess(t *testing.T) {
	next := newProcess(t)
	_, ask := among(t, frozen(t), frozen(t), next.addr())
	text, err := ask(t.Context(), "/")
	require.NoError(t, err)
	require.Equal(t, "body answered", text)
	asked := next.asked.Load()
	_, err = ask(t.Context(), "/")
	require.NoError(t, err)
	require.Equal(t, asked, next.asked.Load(), "it went there at once")
}

// It waits until another process serves.
func TestARequestWaitsForTheNextLeader(t *testing.T) {
	next := newProcess(t)
	next.serves.Store(false)
	a, ask := among(t, frozen(t), next.addr())
	a.looks.patience = 50 * time.Millisecond
	go func() {
		for next.asked.Load() < 3 {
			time.Sleep(time.Millisecond)
		}
		next.serves.Store(true)
	}()
	text, err := ask(t.Context(), "/")
	require.NoError(t, err)
	require.Equal(t, "body answered", text)
}

// A process that holds a request, and answers others, is not left, even if another one that was frozen has woken.
func TestAHeldRequestStays(t *testing.T) {
	leader, woken := newProcess(t), newProcess(t)
	a, ask := among(t, leader.addr(), woken.addr())
	a.looks.patience = time.Minute
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for leader.asked.Load() < 3 {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	_, err := ask(ctx, "/held")
	require.ErrorIs(t, err, context.Canceled)
	require.EqualValues(t, 1, leader.held.Load())
	require.Zero(t, woken.held.Load())
}

// An answer in time has nobody look around, and neither has a client of one address.
func TestNobodyLooksWithoutNeed(t *testing.T) {
	leader, other := newProcess(t), newProcess(t)
	a, ask := among(t, leader.addr(), other.addr())
	a.looks.quiet = time.Minute
	for range 3 {
		_, err := ask(t.Context(), "/")
		require.NoError(t, err)
	}
	_, ask = among(t, leader.addr())
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := ask(ctx, "/held")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Zero(t, other.asked.Load()+leader.asked.Load())
}

// Looks of many clients are spread.
func TestLooksAreSpread(t *testing.T) {
	seen := map[time.Duration]bool{}
	for range 100 {
		d := usualLooks.next(0)
		require.GreaterOrEqual(t, d, 500*time.Millisecond)
		require.LessOrEqual(t, d, 750*time.Millisecond)
		seen[d] = true
	}
	require.Greater(t, len(seen), 50)
}

// A request that is held for long looks more and more rarely: many clients hold one.
func TestLooksBecomeRare(t *testing.T) {
	l := looks{every: 3 * time.Second, most: 10 * time.Second}
	for n, most := range []time.Duration{3, 3, 6, 10, 10} {
		pause := l.next(n)
		require.LessOrEqual(t, pause, most*time.Second)
		require.GreaterOrEqual(t, pause, most*time.Second*2/3-1)
	}
	require.LessOrEqual(t, l.next(1000), l.most)
}

// A request that is held for long asks one process after the other that listens, not all of them at each look.
func TestLooksAtManyThatListen(t *testing.T) {
	var asked atomic.Int64
	var leads atomic.Pointer[string]
	addrs := []string{"127.0.0.1:1"} // nobody listens
	for range 5 {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			asked.Add(1)
			if at := leads.Load(); at != nil && *at == r.Context().Value(http.LocalAddrContextKey).(net.Addr).String() {
				w.WriteHeader(http.StatusNoContent)
				return
			}
			w.WriteHeader(http.StatusServiceUnavailable)
		}))
		t.Cleanup(s.Close)
		addrs = append(addrs, s.Listener.Addr().String())
	}
	a, _ := among(t, addrs...)
	looks := func(n int) (at int, requests int64) {
		before := asked.Load()
		at = a.elsewhere(t.Context(), 2, "", n)
		return at, asked.Load() - before
	}
	at, requests := looks(0)
	require.Equal(t, -1, at)
	require.EqualValues(t, 4, requests, "all but its own")
	for n := 1; n <= 12; n++ {
		at, requests = looks(n)
		require.Equal(t, -1, at)
		require.EqualValues(t, 1, requests)
	}
	for i := range addrs {
		if i == 0 || i == 2 {
			continue
		}
		leads.Store(&addrs[i])
		found := -1
		for n := 1; n <= len(addrs); n++ {
			at, _ = looks(n)
			found = max(found, at)
		}
		require.Equal(t, i, found, "each is asked in turn")
	}
}
