package plainhttp

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A client finds the one address that listens, stays with it, and leaves it when it has failed.
func TestAmong(t *testing.T) {
	var dialed []string
	listens := map[string]bool{"b:2": true}
	dial := func(_ context.Context, _, addr string) (net.Conn, error) {
		dialed = append(dialed, addr)
		if !listens[addr] {
			return nil, io.ErrUnexpectedEOF
		}
		c, _ := net.Pipe()
		return c, nil
	}
	a := NewAmong("a:1,b:2,c:3")
	dials := func() string {
		dialed = nil
		c, err := a.Dial(t.Context(), dial)
		if err == nil {
			require.NoError(t, c.Close())
		}
		return strings.Join(dialed, " ")
	}
	require.Equal(t, "a:1", a.First())
	require.Equal(t, "a:1 b:2", dials())
	require.Equal(t, "b:2", dials())
	listens["a:1"], listens["b:2"] = true, false
	require.Equal(t, "b:2 c:3 a:1", dials())
	listens["b:2"] = true
	require.Equal(t, "a:1", dials())
	a.Failed()
	require.Equal(t, "b:2", dials())
	clear(listens)
	require.Equal(t, "b:2 c:3 a:1", dials(), "each once")
	require.Equal(t, "b:2 c:3 a:1", dials())
	listens["c:3"], listens["d:4"] = true, true
	require.Equal(t, "b:2 c:3", dials())
	a.Replace("e:5,d:4")
	require.Equal(t, "e:5", a.First())
	require.Equal(t, "e:5 d:4", dials())
}

// The requests of a client go to the addresses, whatever its URLs name.
func TestThrough(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Host)
	}))
	defer s.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	dead := l.Addr().String()
	require.NoError(t, l.Close())
	a := NewAmong(dead + "," + s.Listener.Addr().String())
	c := a.Through(nil)
	defer c.CloseIdleConnections()
	r, err := c.Get("http://" + a.First() + "/")
	require.NoError(t, err)
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	require.Equal(t, dead, string(body))
}

// A server that takes connections but does not answer is left after a request has failed there.
func TestFrozenServerIsLeft(t *testing.T) {
	frozen, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer frozen.Close()
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer s.Close()
	a := NewAmong(frozen.Addr().String() + "," + s.Listener.Addr().String())
	c := a.Through(nil)
	defer c.CloseIdleConnections()
	get := func(ctx context.Context) error {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+a.First()+"/", nil)
		require.NoError(t, err)
		resp, err := c.Do(r)
		if err == nil {
			err = resp.Body.Close()
		}
		return err
	}
	canceled, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	require.ErrorIs(t, get(canceled), context.Canceled)
	late, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, get(late), context.DeadlineExceeded, "a request that was canceled says nothing")
	require.NoError(t, get(t.Context()))
}

// Addresses that are replaced end the requests that are under way there; others go on.
func TestReplace(t *testing.T) {
	frozen, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer frozen.Close()
	hold := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-hold }))
	defer s.Close()
	a := NewReplaceable(frozen.Addr().String())
	c := a.Through(nil)
	defer c.CloseIdleConnections()
	get := func() chan error {
		done := make(chan error, 1)
		go func() {
			resp, err := c.Get("http://" + a.First() + "/")
			if err == nil {
				err = resp.Body.Close()
			}
			done <- err
		}()
		return done
	}
	lost := get()
	nc, err := frozen.Accept()
	require.NoError(t, err)
	defer nc.Close()
	a.Replace(s.Listener.Addr().String())
	require.Error(t, <-lost)
	kept := get()
	require.Eventually(t, func() bool { return len(a.live()) == 1 }, 20*time.Second, time.Millisecond)
	a.Replace("127.0.0.1:1," + s.Listener.Addr().String())
	close(hold)
	require.NoError(t, <-kept)
}

func (a *Among) live() (all []*connection) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for c := range a.conns {
		all = append(all, c)
	}
	return all
}
