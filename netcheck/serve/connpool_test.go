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
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/netcheck"
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

func TestAParkedConnectionEndsAsItWasTold(t *testing.T) {
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
			p.Close() // whoever is idle is not waited for
			_, err = r.ReadByte()
			require.ErrorIs(t, err, io.EOF)
		})
	}
}

// A server that ends without the hub ends the idle connections, and its goroutines.
func TestAServerThatEnds(t *testing.T) {
	p, s, _ := counted(t)
	require.NoError(t, p.Expect("r", []string{"a"}, nil))
	nc, r := raw(t, s, "", arrive("a"))
	defer nc.Close()
	_, err := http.ReadResponse(r, nil)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		p.pool.mu.Lock()
		defer p.pool.mu.Unlock()
		return len(p.pool.idle) == 1
	}, 10*time.Second, time.Millisecond)
	require.NoError(t, s.Config.Close())
	p.pool.wg.Wait()
	require.Empty(t, p.pool.listeners)
}

// An answer that does not fit into the socket's buffer keeps nobody else waiting.
func TestALargeAnswer(t *testing.T) {
	p, s, _ := counted(t)
	require.NoError(t, p.Expect("r", []string{"a"}, nil))
	nc, r := raw(t, s, "", arrive("a"))
	defer nc.Close()
	resp, err := http.ReadResponse(r, nil) // alone it is decided at once
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	run := p.runs.Get("r")
	run.Lock()
	v := netcheck.Verdict{State: netcheck.StateOK, Reason: strings.Repeat("x", 1<<20)}
	run.assignLocked(time.Now(), "a", netcheck.Assignment{Duty: netcheck.Decided, Verdict: &v})
	run.Unlock()
	slow, _ := raw(t, s, "", ask("a", 0))
	defer slow.Close()
	other, r := raw(t, s, "", ask("a", 0))
	defer other.Close()
	resp, err = http.ReadResponse(r, nil)
	require.NoError(t, err)
	data, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Greater(t, len(data), 1<<20)
}

// Who is not told to check itself is answered by net/http and has no part in how others are answered.
func TestStrangersAreNotParked(t *testing.T) {
	p, s, _ := counted(t)
	c := s.Client()
	defer c.CloseIdleConnections()
	listeners := func() int {
		p.pool.mu.Lock()
		defer p.pool.mu.Unlock()
		return len(p.pool.listeners)
	}
	for _, id := range []string{"stranger", "a"} {
		require.NoError(t, p.Expect("r", []string{"a"}, nil))
		require.Zero(t, listeners())
		resp, err := c.Post(s.URL+"/v1/runs/r/checks/next", "", strings.NewReader(text(atOnce(arrive(id)))))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
	}
	require.Equal(t, 1, listeners())
}

// What comes on a held connection goes past the server only when nothing is new in it but the request itself.
func TestWhatTheServerIsAskedAgain(t *testing.T) {
	const path, token = "/v1/runs/r/checks/next", "Authorization: Bearer t\r\n"
	usual := text(atOnce(ask("a", 9)))
	request := func(line, head, body string) string {
		return fmt.Sprintf("%s\r\nHost: h\r\nContent-Length: %d\r\n%s\r\n%s", line, len(body), head, body)
	}
	post := "POST " + path + " HTTP/1.1"
	again := request(post, token, usual)
	pieces := func(s ...string) []string { return s }
	for name, c := range map[string]struct {
		text   []string // in pieces, which may arrive as one
		server bool     // it is asked
		want   int
	}{
		"the same again": {pieces(again), false, 200},
		"other headers":  {pieces(request(post, token+"X-Other: 1\r\n", usual)), false, 200},
		"the last one":   {pieces(request(post, token+"Connection: close\r\n", usual)), false, 200},
		"another token":  {pieces(request(post, "Authorization: Bearer u\r\n", usual)), true, 401},
		"no token":       {pieces(request(post, "", usual)), true, 401},
		"another run":    {pieces(request("POST /v1/runs/s/checks/next HTTP/1.1", token, usual)), true, 404},
		"another method": {pieces(request("GET "+path+" HTTP/1.1", token, usual)), true, 405},
		"another path":   {pieces(request("GET /v1/runs/r/checks HTTP/1.1", token, "")), true, 200},
		"an old version": {pieces(request("POST "+path+" HTTP/1.0", token, usual)), true, 200},
		"with questions": {pieces(request(post, token+"Expect: 100-continue\r\n", usual)), true, 100},
		"in chunks":      {pieces(request(post, token+"Transfer-Encoding: chunked\r\n", chunk(usual))), true, 200},
		"two at once":    {pieces(again + again), true, 200},
		"no JSON":        {pieces(request(post, token, "{")), true, 400},
		"another node":   {pieces(request(post, token, text(atOnce(ask("b", 9))))), false, 404},
		"large":          {pieces(request(post, token+"X: "+strings.Repeat("x", large)+"\r\n", usual)), true, 200},
		"piece by piece": {pieces(again[:1], again[1:30], again[30:]), true, 200},
		"body later":     {pieces(again[:len(again)-3], again[len(again)-3:]), true, 200},
		"no HTTP":        {pieces("garbage\r\n\r\n"), false, 400}, // says net/http
	} {
		t.Run(name, func(t *testing.T) {
			k := guarded(t)
			for i, piece := range c.text {
				time.Sleep(time.Duration(i) * 5 * time.Millisecond)
				k.say(piece)
			}
			require.Equal(t, c.want, k.status())
			if len(c.text) == 1 {
				require.Equal(t, c.server, k.asked.Load() > 1)
			}
		})
	}
}

// keeper is a connection on which node a has been accepted with the token t, at a server that wants this token.
type keeper struct {
	*testing.T
	net.Conn
	r     *bufio.Reader
	asked atomic.Int32 // how often the server was
}

func guarded(t *testing.T) *keeper {
	k := &keeper{T: t}
	p, s, _ := served(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			k.asked.Add(1)
			if req.Header.Get("Authorization") != "Bearer t" {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			h.ServeHTTP(w, req)
		})
	})
	require.NoError(t, p.Expect("r", []string{"a"}, nil))
	k.Conn, k.r = raw(t, s, "Authorization: Bearer t\r\n", atOnce(arrive("a")))
	t.Cleanup(func() { _ = k.Close() })
	require.Equal(t, http.StatusOK, k.status())
	require.EqualValues(t, 1, k.asked.Load())
	return k
}

func (k *keeper) say(text string) {
	_, err := io.WriteString(k, text)
	require.NoError(k, err)
}

func (k *keeper) status() int {
	status, _ := k.answer()
	return status
}

// answer is the status of the next one and how long it is.
func (k *keeper) answer() (status, length int) {
	resp, err := http.ReadResponse(k.r, nil)
	require.NoError(k, err)
	n, err := io.Copy(io.Discard, resp.Body)
	require.NoError(k, err)
	return resp.StatusCode, int(n)
}

// A head like the one before is not for the server, whatever the body. One that differs in anything else is.
func TestHeadsAsBefore(t *testing.T) {
	body := text(atOnce(ask("a", 9)))
	request := func(length int, head, body string) string {
		return fmt.Sprintf("POST /v1/runs/r/checks/next HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n%s\r\n%s",
			length, head, body)
	}
	const token = "Authorization: Bearer t\r\n"
	twice := token + fmt.Sprintf("content-length: %d\r\n", len(body))
	for name, c := range map[string]struct {
		first, then string
		want        int
		server      bool // it is asked
	}{
		"another body":     {token, request(len(body)+1, token, text(atOnce(ask("a", 10)))), 200, false},
		"no JSON":          {token, request(1, token, "{"), 400, true},
		"no token":         {token, request(len(body), "", body), 401, true},
		"too short":        {token, request(len(body)-1, token, body), 400, true},
		"two lengths":      {twice, request(len(body)+1, twice, body+" "), 400, false}, // says net/http
		"the last but one": {token + "Connection: close\r\n", "", 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			k := guarded(t)
			for range 2 {
				k.say(request(len(body), c.first, body))
				require.Equal(t, 200, k.status())
				if c.then == "" {
					_, err := k.r.ReadByte()
					require.ErrorIs(t, err, io.EOF)
					return
				}
			}
			require.EqualValues(t, 1, k.asked.Load())
			k.say(c.then)
			require.Equal(t, c.want, k.status())
			require.Equal(t, c.server, k.asked.Load() > 1)
		})
	}
}

func chunk(s string) string { return fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(s), s) }

// Who stalls after the first byte of a request does not keep the hub from closing.
func TestAStalledRequestIsNotWaitedFor(t *testing.T) {
	p, s, _ := counted(t)
	require.NoError(t, p.Expect("r", []string{"a"}, nil))
	nc, r := raw(t, s, "", atOnce(arrive("a")))
	defer nc.Close()
	_, err := http.ReadResponse(r, nil)
	require.NoError(t, err)
	_, err = io.WriteString(nc, "P")
	require.NoError(t, err)
	time.Sleep(10 * time.Millisecond) // it is nearly always read by then; who has not read it is not waited for either
	began := time.Now()
	p.Close()
	require.Less(t, time.Since(began), idleTime/2)
}

// Neither who says nothing nor who takes no answer keeps a connection.
func TestAParkedConnectionHasItsTime(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(l *connPool, p *heldConn)
		want time.Duration
	}{
		"to say something":  {func(l *connPool, p *heldConn) { l.rest(p) }, idleTime},
		"to take an answer": {func(l *connPool, p *heldConn) { l.finish(p, []byte("x")) }, writeTime},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newConnPool(nil)
				ours, theirs := net.Pipe()
				began := time.Now()
				c.do(l, &heldConn{Conn: ours, listener: &returnListener{pool: l}})
				l.wg.Wait()
				require.Equal(t, c.want, time.Since(began))
				require.Empty(t, l.idle)
				_, err := theirs.Write([]byte("x"))
				require.ErrorIs(t, err, io.ErrClosedPipe)
			})
		})
	}
}

// A head may also end by lines without a carriage return; what looks like its rest is no part of it.
func TestAHeadThatEndsBefore(t *testing.T) {
	p := &heldConn{origin: origin{uri: "/x"}}
	for end, want := range map[string]bool{"": true, "\n": false} {
		body := text(ask("a", 0))
		data := fmt.Sprintf("POST /x HTTP/1.1\r\nHost: h\n%sX: y\r\nContent-Length: %d\r\n\r\n%s", end, len(body), body)
		r := bufio.NewReader(strings.NewReader(data))
		whole, err := r.Peek(len(data))
		require.NoError(t, err)
		_, ok := p.next(r, whole)
		require.Equal(t, want, ok, "%q", data)
	}
}
