package longpoll

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"path"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bell is a server that holds requests for /wait until it rings, and answers others at once.
type bell struct {
	*testing.T
	pool   Pool
	server *httptest.Server
	asked  atomic.Int32 // how often net/http was
	gone   atomic.Int32
	held   chan *Conn
}

// opaque hides the type of its connections.
type opaque struct{ net.Listener }

func (o opaque) Accept() (net.Conn, error) {
	c, err := o.Listener.Accept()
	return struct{ net.Conn }{c}, err
}

// onBoth tests connections that wait together, and such that wait in a goroutine each.
func onBoth(t *testing.T, test func(t *testing.T, b *bell)) {
	t.Run("together", func(t *testing.T) { test(t, newBell(t, false)) })
	t.Run("each", func(t *testing.T) { test(t, newBell(t, true)) })
}

func newBell(t *testing.T, hides bool) *bell {
	b := &bell{T: t, held: make(chan *Conn, 10)}
	b.server = httptest.NewUnstartedServer(b)
	if hides {
		b.server.Listener = opaque{b.server.Listener}
	}
	b.server.Start()
	t.Cleanup(func() {
		_ = b.server.Config.Close()
		b.server.Close()
	})
	return b
}

func (b *bell) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if _, ours := w.(*answer); !ours {
		b.asked.Add(1)
	}
	if req.Header.Get("Authorization") != "Bearer t" {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if path.Base(req.URL.Path) != "wait" || req.URL.Query().Has("now") {
		body, _ := io.ReadAll(req.Body)
		fmt.Fprintf(w, "%s %s", req.URL, body)
		return
	}
	if req.URL.Query().Has("panic") {
		panic("on purpose")
	}
	c := b.pool.Take(w, req)
	require.NotNil(b, c)
	c.Hold(func() { b.gone.Add(1) })
	b.held <- c
}

// rings answers a held request.
func (b *bell) rings(text string) {
	(<-b.held).Later(func(w http.ResponseWriter) bool {
		fmt.Fprint(w, text)
		return true
	})
}

// caller is a connection to a bell.
type caller struct {
	*testing.T
	net.Conn
	r *bufio.Reader
}

func (b *bell) dial() *caller {
	nc, err := net.Dial("tcp", b.server.Listener.Addr().String())
	require.NoError(b, err)
	b.Cleanup(func() { _ = nc.Close() })
	return &caller{b.T, nc, bufio.NewReader(nc)}
}

func (c *caller) says(text string) {
	_, err := io.WriteString(c, text)
	require.NoError(c, err)
}

// hears returns the status and the body of the next answer.
func (c *caller) hears() string {
	resp, err := http.ReadResponse(c.r, nil)
	require.NoError(c, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(c, err)
	return fmt.Sprint(resp.StatusCode, " ", string(body))
}

func get(uri, head string) string {
	return "GET " + uri + " HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer t\r\n" + head + "\r\n"
}

// waiting is a connection that the pool has.
func (b *bell) waiting() *caller {
	c := b.dial()
	c.says(get("/wait", ""))
	b.rings("first")
	require.Equal(b, "200 first", c.hears())
	require.EqualValues(b, 1, b.asked.Load())
	return c
}

func TestRequestsOfOneKindAreServedWithoutTheServer(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bell) {
		c := b.waiting()
		for i := range 20 {
			c.says(get(fmt.Sprint("/wait?after=", i), ""))
			(<-b.held).Later(func(http.ResponseWriter) bool { return false }) // goes on
			c.says(get("/wait?now", ""))                                      // before the answer
			b.pool.mu.Lock()
			var held *Conn
			for _, held = range b.pool.conns {
			}
			b.pool.mu.Unlock()
			held.Later(func(w http.ResponseWriter) bool { w.WriteHeader(http.StatusNoContent); return true })
			require.Equal(t, "204 ", c.hears())
			require.Equal(t, "200 /wait?now ", c.hears())
		}
		require.Zero(t, b.gone.Load())
		require.EqualValues(t, 1, b.asked.Load())
	})
}

// A request that is not one of the same kind, whole and alone, is net/http's, on the same connection.
func TestOtherRequestsAreTheServers(t *testing.T) {
	usual := get("/wait?now", "")
	for name, c := range map[string]struct {
		text   []string // in pieces, which may arrive as one
		server bool     // net/http is asked
		want   string
	}{
		"the same again":   {[]string{usual}, false, "200 /wait?now "},
		"the last one":     {[]string{get("/wait?now", "Connection: close\r\n")}, false, "200 /wait?now "},
		"another token":    {[]string{strings.Replace(usual, "Bearer t", "Bearer u", 1)}, false, "401 "},
		"another path":     {[]string{get("/other", "")}, true, "200 /other "},
		"another method":   {[]string{strings.Replace(usual, "GET", "PUT", 1)}, true, "200 /wait?now "},
		"an old version":   {[]string{strings.Replace(usual, "1.1", "1.0", 1)}, true, "200 /wait?now "},
		"another protocol": {[]string{get("/wait?now", "Connection: Upgrade\r\nUpgrade: x\r\n")}, true, "200 /wait?now "},
		"with a question":  {[]string{get("/wait?now", "Content-Length: 1\r\nExpect: 100-continue\r\n"), "x"}, true, "100 "},
		"in chunks": {[]string{get("/wait?now", "Transfer-Encoding: chunked\r\n"), "1\r\nx\r\n0\r\n\r\n"}, true,
			"200 /wait?now x"},
		"with a body":    {[]string{get("/wait?now", "Content-Length: 1\r\n") + "x"}, false, "200 /wait?now x"},
		"two at once":    {[]string{usual + usual}, true, "200 /wait?now "},
		"large":          {[]string{get("/wait?now", "X: "+strings.Repeat("x", large)+"\r\n")}, true, "200 /wait?now "},
		"piece by piece": {[]string{usual[:1], usual[1:30], usual[30:]}, true, "200 /wait?now "},
		"no HTTP":        {[]string{"garbage\r\n\r\n"}, false, "400 400 Bad Request"}, // says net/http
		"a line that ends early": {[]string{get("/wait?now", "\nX: y\r\nContent-Length: 0\r\n")}, true,
			"200 /wait?now "},
	} {
		t.Run(name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, b *bell) {
				k := b.waiting()
				for i, piece := range c.text {
					time.Sleep(time.Duration(i) * 5 * time.Millisecond)
					k.says(piece)
				}
				require.Equal(t, c.want, k.hears())
				if len(c.text) == 1 {
					require.Equal(t, c.server, b.asked.Load() > 1)
				}
			})
		})
	}
}

// Requests that begin and do not go on keep nobody waiting for long, even if there are more than are served at a time.
func TestRequestsThatDoNotGoOn(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bell) {
		c := b.waiting()
		for range most + 10 {
			k := b.dial()
			k.says(get("/wait", ""))
			b.rings("x")
			require.Equal(t, "200 x", k.hears())
			k.says("G")
		}
		for range 3 {
			began := time.Now()
			c.says(get("/wait?now", ""))
			require.Equal(t, "200 /wait?now ", c.hears())
			require.Less(t, time.Since(began), 20*restTime)
		}
	})
}

// A client that waits reports by POST, beside the path of its wait or beside the folder.
func TestReportsAreServedWithoutTheServer(t *testing.T) {
	for to, server := range map[string]bool{
		"/r/checks/done": false, "/r/done": false, "/done": true, "/r/hang/done": true,
	} {
		onBoth(t, func(t *testing.T, b *bell) {
			c := b.dial()
			c.says(get("/r/checks/wait", ""))
			b.rings("first")
			require.Equal(t, "200 first", c.hears())
			c.says(strings.Replace(get(to, "Content-Length: 1\r\n"), "GET", "POST", 1) + "x")
			require.Equal(t, "200 "+to+" x", c.hears())
			require.Equal(t, server, b.asked.Load() > 1, to)
		})
	}
}

func TestTheLastAnswerEndsTheConnection(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bell) {
		c := b.dial()
		c.says(get("/wait", "Connection: close\r\n"))
		b.rings("bye")
		require.Equal(t, "200 bye", c.hears())
		_, err := c.r.ReadByte()
		require.ErrorIs(t, err, io.EOF)
		require.Zero(t, b.gone.Load())
	})
}

// kept is how many connections a pool has.
func kept(p *Pool) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns)
}

func TestAPeerThatHangsUp(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bell) {
		c := b.waiting()
		c.says(get("/wait", ""))
		held := <-b.held
		require.NoError(t, c.Close())
		require.Eventually(t, func() bool { return b.gone.Load() == 1 }, time.Minute, time.Millisecond)
		held.Later(func(w http.ResponseWriter) bool { fmt.Fprint(w, "too late"); return true })
		require.Eventually(t, func() bool { return kept(&b.pool) == 0 }, time.Minute, time.Millisecond)
		require.EqualValues(t, 1, b.gone.Load())
	})
}

// The end of the server comes after the answers that are under way, and ends all other requests.
func TestTheEndOfTheServer(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bell) {
		answered, lost, idle := b.dial(), b.dial(), b.waiting()
		answered.says(get("/wait", ""))
		begun := make(chan struct{})
		end := make(chan error, 1)
		(<-b.held).Later(func(w http.ResponseWriter) bool {
			close(begun)
			time.Sleep(50 * time.Millisecond)
			fmt.Fprint(w, "still")
			return true
		})
		lost.says(get("/wait", ""))
		<-b.held
		early := b.dial() // its next request has begun before its answer
		early.says(get("/wait", ""))
		<-b.held
		early.says("G")
		time.Sleep(20 * time.Millisecond)
		<-begun
		go func() { end <- b.server.Config.Close() }()
		require.Equal(t, "200 still", answered.hears())
		require.NoError(t, <-end)
		for _, c := range []*caller{answered, lost, early, idle} {
			_, err := c.r.ReadByte()
			require.Error(t, err)
		}
		require.Eventually(t, func() bool { return b.gone.Load() == 2 }, time.Minute, time.Millisecond)
	})
}

// An answer that does not fit into the socket's buffer keeps nobody else waiting.
// late is a request whose connection is taken out of a server that ends just then.
type late struct {
	*httptest.ResponseRecorder
	ends func()
	conn net.Conn
}

func (l late) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	l.ends()
	return l.conn, bufio.NewReadWriter(bufio.NewReader(l.conn), nil), nil
}

func TestAConnectionThatIsTakenAtTheEnd(t *testing.T) {
	ours, theirs := net.Pipe()
	var p Pool
	srv, gone := &http.Server{}, make(chan struct{})
	req := httptest.NewRequest(http.MethodGet, "/wait", nil)
	req = req.WithContext(context.WithValue(t.Context(), http.ServerContextKey, srv))
	w := late{httptest.NewRecorder(), func() { _ = srv.Close(); <-p.done }, ours}
	p.Take(w, req).Hold(func() { close(gone) })
	_, err := theirs.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	<-gone
}

func TestALargeAnswer(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bell) {
		for range 5 { // more than there are workers
			slow := b.dial()
			slow.says(get("/wait", ""))
			b.rings(strings.Repeat("x", 16<<20))
		}
		c := b.dial()
		c.says(get("/wait", ""))
		b.rings("at once")
		began := time.Now()
		require.Equal(t, "200 at once", c.hears())
		require.Less(t, time.Since(began), writeTime)
	})
}

func TestAHandlerThatPanics(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bell) {
		var text testkit.Buffer
		b.server.Config.ErrorLog = log.New(&text, "", 0)
		c := b.waiting()
		c.says(get("/wait?panic", ""))
		_, err := c.r.ReadByte()
		require.ErrorIs(t, err, io.EOF)
		require.Contains(t, text.String(), "http: panic serving 127.0.0.1")
		require.Contains(t, text.String(), "on purpose")
	})
}

// Neither silence nor an answer that is not read keeps a connection.
func TestTheTimeOfAConnection(t *testing.T) {
	for name, c := range map[string]struct {
		reads bool
		want  time.Duration
	}{
		"for the next request": {true, idleTime},
		"for an answer":        {false, writeTime},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ours, theirs := net.Pipe()
				p := &Pool{conns: map[uint64]*Conn{}, done: make(chan struct{})}
				defer wayBack{p}.Close()
				held := &Conn{Conn: ours, pool: p, busy: true}
				p.conns[held.id] = held
				gone := false
				held.Hold(func() { gone = true })
				began := time.Now()
				held.Later(func(w http.ResponseWriter) bool { fmt.Fprint(w, "x"); return true })
				if c.reads {
					_, err := http.ReadResponse(bufio.NewReader(theirs), nil)
					require.NoError(t, err)
				}
				for kept(p) > 0 {
					time.Sleep(time.Second / 2)
					synctest.Wait()
				}
				require.InDelta(t, c.want, time.Since(began), float64(time.Second))
				require.False(t, gone)
				_, err := theirs.Write([]byte("x"))
				require.ErrorIs(t, err, io.ErrClosedPipe)
			})
		})
	}
}

// Plain connections have no deadline each.
func TestConnectionsThatWaitedForTooLong(t *testing.T) {
	b := newBell(t, false)
	idle, held, fresh := b.dial(), b.dial(), b.dial()
	for _, c := range []*caller{idle, held} {
		c.says(get("/wait", ""))
		b.rings("x")
		require.Equal(t, "200 x", c.hears())
	}
	held.says(get("/wait", ""))
	answer := <-b.held
	b.pool.mu.Lock()
	for _, c := range b.pool.conns {
		c.begun = c.begun.Add(-idleTime)
	}
	b.pool.mu.Unlock()
	fresh.says(get("/wait", ""))
	b.rings("x")
	require.Equal(t, "200 x", fresh.hears())
	b.pool.sweep()
	_, err := idle.r.ReadByte()
	require.ErrorIs(t, err, io.EOF)
	answer.Later(func(w http.ResponseWriter) bool { fmt.Fprint(w, "y"); return true })
	require.Equal(t, "200 y", held.hears())
	fresh.says(get("/wait?now", ""))
	require.Equal(t, "200 /wait?now ", fresh.hears())
	require.Zero(t, b.gone.Load())
}

func TestConnectionsThatWaitTakeNoGoroutine(t *testing.T) {
	b := newBell(t, false)
	callers := [100]*caller{}
	for i := range callers {
		callers[i] = b.dial()
		callers[i].says(get("/wait", ""))
		<-b.held
	}
	require.Eventually(t, func() bool { return runtime.NumGoroutine() < len(callers) }, time.Minute, time.Millisecond)
	for _, c := range callers {
		require.NoError(t, c.Close())
	}
	require.Eventually(t, func() bool { return int(b.gone.Load()) == len(callers) }, time.Minute, time.Millisecond)
}
