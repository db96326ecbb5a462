package serve

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// counting counts the connections that a server has accepted from the network.
type counting struct {
	net.Listener
	mu sync.Mutex
	n  int
}

func (c *counting) Accept() (net.Conn, error) {
	nc, err := c.Listener.Accept()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		c.n++
	}
	return nc, err
}

func counted(t *testing.T) (*place, *httptest.Server, *counting) {
	return served(t, func(h http.Handler) http.Handler { return h })
}

func served(t *testing.T, wrap func(http.Handler) http.Handler) (*place, *httptest.Server, *counting) {
	p := newPlace(t)
	s := httptest.NewUnstartedServer(wrap(p.Handler()))
	l := &counting{Listener: s.Listener}
	s.Listener = l
	s.Start()
	t.Cleanup(func() {
		p.Close()
		_ = s.Config.Close()
		s.Close()
	})
	return p, s, l
}

// A node needs one connection, however often its requests are held.
func TestAConnectionIsUsedAgain(t *testing.T) {
	p, s, l := counted(t)
	c := s.Client()
	defer c.CloseIdleConnections()
	send := func(r Request) string {
		resp, err := c.Post(s.URL+"/v1/runs/r/checks/next", "", strings.NewReader(text(r)))
		require.NoError(t, err)
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return string(data)
	}
	require.Contains(t, send(arrive("a")), "unknown_node")
	for i := range 20 {
		a, b := fmt.Sprint("a", i), fmt.Sprint("b", i)
		require.NoError(t, p.Expect("r", []string{a, b}, nil))
		time.AfterFunc(5*time.Millisecond, func() { _, _ = p.Next(t.Context(), "r", atOnce(arrive(b))) })
		require.Contains(t, send(arrive(a)), `"serve"`)
		p.Gone("r", a)
		p.Gone("r", b)
	}
	require.Equal(t, 1, l.n)
	resp, err := c.Get(s.URL + "/v1/runs/r/checks")
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 1, l.n, "also for other requests")
}

// raw is a connection on which a request has been sent, whose answer is not there yet.
func raw(t *testing.T, s *httptest.Server, extra string, r Request) (net.Conn, *bufio.Reader) {
	c, err := net.Dial("tcp", s.Listener.Addr().String())
	require.NoError(t, err)
	body := text(r)
	_, err = fmt.Fprintf(c, "POST /v1/runs/r/checks/next HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n%s\r\n%s",
		len(body), extra, body)
	require.NoError(t, err)
	return c, bufio.NewReader(c)
}

func TestAHeldRequestEndsAsItWasTold(t *testing.T) {
	for name, c := range map[string]struct {
		extra string
		end   func(p *place, s *httptest.Server)
		want  int
		shut  bool
	}{
		"an answer":          {"", func(p *place, _ *httptest.Server) { p.Gone("r", "a") }, 404, false},
		"the last request":   {"Connection: close\r\n", func(p *place, _ *httptest.Server) { p.Gone("r", "a") }, 404, true},
		"the end of the hub": {"", func(p *place, _ *httptest.Server) { p.Close() }, 503, true},
		"of hub and server":  {"", func(p *place, s *httptest.Server) { p.Close(); s.Close() }, 503, true},
		"the run's end":      {"", func(p *place, _ *httptest.Server) { p.runs.Drop("r", nil) }, 404, false},
		"a newer request": {"", func(p *place, _ *httptest.Server) {
			_, _ = p.Next(t.Context(), "r", ask("a", 7))
		}, 200, false},
	} {
		t.Run(name, func(t *testing.T) {
			p, s, _ := counted(t)
			require.NoError(t, p.Expect("r", []string{"a"}, nil))
			require.NoError(t, p.Expect("r", []string{"b"}, nil))
			nc, r := raw(t, s, c.extra, arrive("a"))
			defer nc.Close()
			require.Eventually(t, func() bool {
				run := p.runs.Get("r")
				run.Lock()
				defer run.Unlock()
				return run.nodes["a"].waiter != nil
			}, 10*time.Second, time.Millisecond)
			if name == "a newer request" {
				go c.end(p, s)
			} else {
				c.end(p, s)
			}
			resp, err := http.ReadResponse(r, nil)
			require.NoError(t, err)
			_, err = io.Copy(io.Discard, resp.Body)
			require.NoError(t, err)
			require.Equal(t, c.want, resp.StatusCode)
			require.Equal(t, c.shut, resp.Close)
			require.NoError(t, s.Config.Close())
			_, err = r.ReadByte()
			require.ErrorIs(t, err, io.EOF)
		})
	}
}

// hijacks counts the connections that are taken out of a server.
type hijacks struct {
	http.ResponseWriter
	n *int
}

func (h hijacks) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	*h.n++
	return http.NewResponseController(h.ResponseWriter).Hijack()
}

// The request of a client that is not told to check itself stays in net/http.
func TestStrangersAreNotHeld(t *testing.T) {
	n := 0
	p, s, _ := served(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { h.ServeHTTP(hijacks{w, &n}, req) })
	})
	c := s.Client()
	defer c.CloseIdleConnections()
	for _, id := range []string{"stranger", "a"} {
		require.NoError(t, p.Expect("r", []string{"a"}, nil))
		require.Zero(t, n)
		resp, err := c.Post(s.URL+"/v1/runs/r/checks/next", "", strings.NewReader(text(atOnce(arrive(id)))))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
	}
	require.Equal(t, 1, n)
}

// A node that hangs up is not answered: nothing is held of it.
func TestANodeThatHangsUp(t *testing.T) {
	p, s, _ := counted(t)
	require.NoError(t, p.Expect("r", []string{"a", "b"}, nil))
	nc, _ := raw(t, s, "", arrive("a"))
	held := func() bool {
		run := p.runs.Get("r")
		run.Lock()
		defer run.Unlock()
		return run.nodes["a"].waiter != nil
	}
	require.Eventually(t, held, time.Minute, time.Millisecond)
	require.NoError(t, nc.Close())
	require.Eventually(t, func() bool { return !held() }, time.Minute, time.Millisecond)
}
