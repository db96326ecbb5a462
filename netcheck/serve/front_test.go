package serve

import (
	"bufio"
	"fmt"
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

// front is a server behind Hub.Listener that wants the token t. Nodes a, b and c are expected.
type front struct {
	*testing.T
	*place
	s      *httptest.Server
	asked  atomic.Int32 // how often the server was
	proven atomic.Int32 // connections
	spared atomic.Int32
}

// provable can be told that its peer is no stranger.
type provable struct {
	net.Conn
	f *front
}

func (p *provable) NetConn() net.Conn { return p.Conn }

func (p *provable) Prove(ok bool) {
	if ok {
		p.f.proven.Add(1)
	}
}

func (p *provable) Spare() { p.f.spared.Add(1) }

// proving has connections that are provable.
type proving struct {
	net.Listener
	f *front
}

func (l proving) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &provable{nc, l.f}, nil
}

func newFront(t *testing.T) *front {
	f := &front{T: t, place: newPlace(t)}
	h := f.Handler()
	f.s = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		f.asked.Add(1)
		if req.Header.Get("Authorization") != "Bearer t" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, req)
	}))
	f.s.Listener = f.place.Listener(proving{f.place.Sockets(f.s.Listener, net.KeepAliveConfig{}), f}, f.s.Config)
	f.s.Start()
	t.Cleanup(func() {
		f.place.Close()
		f.s.Close()
	})
	return f
}

func (f *front) expect() { require.NoError(f, f.Expect("r", []string{"a", "b", "c"}, nil)) }

// first is the first request of a new connection.
func (f *front) first(line, head, body string) *keeper {
	nc, err := net.Dial("tcp", f.s.Listener.Addr().String())
	require.NoError(f, err)
	f.Cleanup(func() { _ = nc.Close() })
	k := &keeper{T: f.T, Conn: nc, r: bufio.NewReader(nc)}
	k.say(fmt.Sprintf("%s\r\nHost: h\r\nContent-Length: %d\r\n%s\r\n%s", line, len(body), head, body))
	return k
}

const (
	theLine  = "POST /v1/runs/r/checks/next HTTP/1.1"
	theToken = "Authorization: Bearer t\r\n"
)

func (f *front) arrives(id string) *keeper {
	return f.first(theLine, theToken, text(atOnce(arrive(id))))
}

// The server is asked for the first node that comes. Others that come as this one has pass it by.
func TestTheServerIsAskedOnce(t *testing.T) {
	f := newFront(t)
	f.expect()
	for i, id := range []string{"a", "b", "c"} {
		k := f.arrives(id)
		require.Equal(t, 200, k.status())
		require.EqualValues(t, 1, f.asked.Load())
		require.EqualValues(t, i, f.proven.Load())
		k.say(fmt.Sprintf("%s\r\nHost: h\r\nContent-Length: 1\r\n%s\r\n{", theLine, theToken))
		require.Equal(t, 400, k.status(), "the connection is the server's, too")
		require.EqualValues(t, 2, f.asked.Load())
		f.asked.Store(1)
	}
}

func TestWhatTheServerIsAskedFirst(t *testing.T) {
	usual := text(atOnce(arrive("b")))
	for name, c := range map[string]struct {
		line, head, body string
		want             int
	}{
		"another token":  {theLine, "Authorization: Bearer u\r\n", usual, 401},
		"no token":       {theLine, "", usual, 401},
		"another run":    {"POST /v1/runs/s/checks/next HTTP/1.1", theToken, usual, 404},
		"another path":   {"GET /v1/runs/r/checks HTTP/1.1", theToken, "", 200},
		"other headers":  {theLine, theToken + "X-Other: 1\r\n", usual, 200},
		"two lengths":    {theLine, theToken + fmt.Sprintf("Content-Length: %d\r\n", len(usual)), usual, 200},
		"the last one":   {theLine, theToken + "Connection: close\r\n", usual, 200},
		"in chunks":      {theLine, theToken + "Transfer-Encoding: chunked\r\n", chunk(usual), 200},
		"not expected":   {theLine, theToken, text(atOnce(arrive("x"))), 404},
		"no JSON":        {theLine, theToken, "{", 400},
		"no HTTP":        {"garbage", theToken, usual, 400},
		"a large header": {theLine, theToken + "X: " + string(make([]byte, largeRequest)) + "\r\n", usual, 400},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFront(t)
			f.expect()
			require.Equal(t, 200, f.arrives("a").status())
			require.EqualValues(t, 1, f.asked.Load())
			require.Equal(t, c.want, f.first(c.line, c.head, c.body).status())
			if c.want != 400 || name == "no JSON" { // net/http itself says the others
				require.EqualValues(t, 2, f.asked.Load())
			}
			require.Zero(t, f.proven.Load())
		})
	}
}

// What the server has refused is not known.
func TestARefusedRequestIsAskedAgain(t *testing.T) {
	f := newFront(t)
	f.expect()
	for i := range 3 {
		k := f.first(theLine, "", text(atOnce(arrive("a"))))
		require.Equal(t, 401, k.status())
		k.say(fmt.Sprintf("%s\r\nHost: h\r\nContent-Length: 1\r\n%s\r\n{", theLine, theToken))
		require.Equal(t, 400, k.status())
		require.EqualValues(t, 2*i+2, f.asked.Load())
	}
	require.Zero(t, f.proven.Load())
}

// A connection on which the right token came after a wrong one makes nothing known but the right one.
func TestOnlyWhatWasAcceptedIsKnown(t *testing.T) {
	f := newFront(t)
	f.expect()
	k := f.first(theLine, "", text(atOnce(arrive("a"))))
	require.Equal(t, 401, k.status())
	body := text(atOnce(arrive("a")))
	k.say(fmt.Sprintf("%s\r\nHost: h\r\nContent-Length: %d\r\n%s\r\n%s", theLine, len(body), theToken, body))
	require.Equal(t, 200, k.status())
	require.Equal(t, 401, f.first(theLine, "", text(atOnce(arrive("b")))).status())
}

// A first request may come in pieces.
func TestAFirstRequestInPieces(t *testing.T) {
	f := newFront(t)
	f.expect()
	require.Equal(t, 200, f.arrives("a").status())
	body := text(atOnce(arrive("b")))
	whole := fmt.Sprintf("%s\r\nHost: h\r\nContent-Length: %d\r\n%s\r\n%s", theLine, len(body), theToken, body)
	nc, err := net.Dial("tcp", f.s.Listener.Addr().String())
	require.NoError(t, err)
	defer nc.Close()
	k := &keeper{T: t, Conn: nc, r: bufio.NewReader(nc)}
	for _, piece := range []string{whole[:1], whole[1:50], whole[50:]} {
		k.say(piece)
		time.Sleep(5 * time.Millisecond) // or they mostly arrive as one
	}
	require.Equal(t, 200, k.status())
}

// Who is expected no more, or not yet, comes to the server at once.
func TestNobodyIsExpected(t *testing.T) {
	f := newFront(t)
	require.Equal(t, 404, f.arrives("a").status())
	require.Nil(t, f.lot.poll, "off means off")
	f.expect()
	require.Equal(t, 200, f.arrives("a").status())
	require.EqualValues(t, 2, f.asked.Load())
	f.lot.until.Store(time.Now().UnixNano())
	require.Equal(t, 200, f.arrives("b").status())
	require.EqualValues(t, 3, f.asked.Load())
}

// silent is a connection that says nothing.
func (f *front) silent() *keeper {
	nc, err := net.Dial("tcp", f.s.Listener.Addr().String())
	require.NoError(f, err)
	f.Cleanup(func() { _ = nc.Close() })
	require.Eventually(f, func() bool {
		f.lot.mu.Lock()
		defer f.lot.mu.Unlock()
		return len(f.lot.conns) > 0
	}, 10*time.Second, time.Millisecond)
	return &keeper{T: f.T, Conn: nc, r: bufio.NewReader(nc)}
}

func TestSilentConnectionsEnd(t *testing.T) {
	for name, end := range map[string]func(*front){
		"with time": func(f *front) {
			f.lot.mu.Lock()
			for _, p := range f.lot.conns {
				p.since = p.since.Add(-firstTime)
			}
			f.lot.mu.Unlock()
			f.lot.sweep()
		},
		"with the hub":    func(f *front) { f.place.Close() },
		"with the server": func(f *front) { _ = f.s.Config.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFront(t)
			f.expect()
			k := f.silent()
			f.lot.sweep() // it may still say something
			f.lot.mu.Lock()
			require.Len(t, f.lot.conns, 1)
			require.NotNil(t, f.lot.sweeper)
			f.lot.mu.Unlock()
			end(f)
			_, err := k.r.ReadByte()
			require.ErrorIs(t, err, io.EOF)
			f.lot.mu.Lock()
			defer f.lot.mu.Unlock()
			require.Empty(t, f.lot.conns)
		})
	}
}

// Who hangs up is closed, too.
func TestWhoHangsUp(t *testing.T) {
	for _, says := range []bool{false, true} {
		f := newFront(t)
		f.expect()
		k := f.silent()
		if says {
			k.say(fmt.Sprintf("%s\r\nHost: h\r\nContent-Length: 1\r\n", theLine))
		}
		require.NoError(t, k.Close())
		require.Eventually(t, func() bool {
			f.lot.mu.Lock()
			defer f.lot.mu.Unlock()
			return len(f.lot.conns) == 0
		}, 10*time.Second, time.Millisecond)
	}
}

// Heads are bounded, and so are the requests that the server has not accepted yet.
func TestHeadsAreBounded(t *testing.T) {
	k := &heads{}
	for i := range 2 * maxHeads {
		nc := &net.TCPConn{}
		head := fmt.Sprintf("POST /x HTTP/1.1\r\nHost: h%d\r\nContent-Length: 0", i)
		k.ask(nc, []byte(head+"\r\n\r\n"))
		require.LessOrEqual(t, len(k.asked), maxHeads)
		k.accepted(nc, origin{uri: "/x"})
		require.Empty(t, k.asked[nc])
		require.NotNil(t, k.get(cutLength([]byte(head))), "the newest")
	}
	require.Len(t, *k.known.Load(), maxHeads)
	for range 2 * maxHeads {
		k.ask(&net.TCPConn{}, []byte("x"))
	}
	require.Len(t, k.asked, maxHeads)
}

// What may fill the buffer of a hand, and more, is the server's.
func TestARequestAsLongAsTheBuffer(t *testing.T) {
	f := newFront(t)
	f.expect()
	k := f.arrives("a")
	require.Equal(t, 200, k.status())
	body := text(atOnce(arrive("a")))
	head := fmt.Sprintf("%s\r\nHost: h\r\nContent-Length: %d\r\n%sX: ", theLine, len(body), theToken)
	long := head + strings.Repeat("x", largeRequest-len(head)-len("\r\n\r\n")-len(body)) + "\r\n\r\n" + body
	require.Len(t, long, largeRequest)
	k.say(long)
	require.Equal(t, 200, k.status())
	require.EqualValues(t, 2, f.asked.Load())
}
