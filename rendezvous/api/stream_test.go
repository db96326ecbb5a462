package api

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous"
)

// pipes is a listener whose connections are in memory, so that a bubble's clock runs while they are idle.
type pipes struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), done: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.done) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

func (p *pipes) dial() net.Conn {
	ours, theirs := net.Pipe()
	p.conns <- theirs
	return ours
}

// streamed is a run whose last event is known, served over pipes.
type streamed struct {
	hub    *Hub
	server *http.Server
	pipes  *pipes
	last   uint64
}

// inBubble runs f beside a hub whose run r has had two events, and in which nothing happens by itself any more.
func inBubble(t *testing.T, f func(t *testing.T, s streamed)) {
	synctest.Test(t, func(t *testing.T) {
		hub, l := NewHub(HubConfig{}), newPipes()
		server := NewServer(Handler(hub, ServerConfig{}))
		done := make(chan error)
		go func() { done <- server.Serve(l) }()
		require.NoError(t, hub.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
		_, err := hub.Leave(t.Context(), "r", rendezvous.Leave{ID: "a", Reason: "over"})
		require.NoError(t, err)
		es, err := hub.Events(t.Context(), "r", 0)
		require.NoError(t, err)
		f(t, streamed{hub, server, l, es.Next})
		hub.Close()
		require.NoError(t, server.Close())
		<-done
	})
}

// get sends a request with further header lines and returns its answer.
func (s streamed) get(t *testing.T, query string, lines ...string) (net.Conn, *http.Response) {
	c := s.pipes.dial()
	lines = append([]string{"GET /v1/runs/r/events" + query + " HTTP/1.1", "Host: x"}, lines...)
	_, err := io.WriteString(c, strings.Join(lines, "\r\n")+"\r\n\r\n")
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	return c, resp
}

const sse = "Accept: text/event-stream"

func TestStream(t *testing.T) {
	inBubble(t, func(t *testing.T, s streamed) {
		c, resp := s.get(t, "?after=0", sse)
		defer c.Close()
		require.Equal(t, "text/event-stream", resp.Header.Get("Content-Type"))
		r := bufio.NewReader(resp.Body)
		line := func() string {
			l, err := r.ReadString('\n')
			require.NoError(t, err)
			return strings.TrimSuffix(l, "\n")
		}
		for i, event := range []string{"join", "node-leave"} {
			require.Equal(t, fmt.Sprintf("id: %d", s.last-1+uint64(i)), line())
			require.Equal(t, "event: "+event, line())
			require.Contains(t, line(),
				fmt.Sprintf(`data: {"seq":%d,"at":"2000-01-01T00:00:00Z","event":"%s",`, s.last-1+uint64(i), event))
			require.Empty(t, line())
		}
		start := time.Now()
		require.NoError(t, s.hub.Join(t.Context(), "r", joinOf("c", rendezvous.Params{Min: 2, Max: 2})))
		require.Equal(t, fmt.Sprintf("id: %d", s.last+1), line())
		require.Zero(t, time.Since(start), "what happens is told at once")
		for line() != "" {
		}
		_, err := s.hub.Leave(t.Context(), "r", rendezvous.Leave{ID: "c"})
		require.NoError(t, err)
		for line() != "" {
		}
		require.Equal(t, ":", line(), "a sign of life")
		require.Equal(t, streamAlive, time.Since(start))
		require.Empty(t, line())
		require.NoError(t, s.hub.Join(t.Context(), "r", joinOf("b", rendezvous.Params{Min: 2, Max: 2})))
		require.Equal(t, fmt.Sprintf("id: %d", s.last+3), line())
		s.hub.Close()
		_, err = io.ReadAll(r)
		require.NoError(t, err, "the end of the hub is the end of the stream")
	})
}

func TestStreamGoesOn(t *testing.T) {
	for name, c := range map[string]struct {
		query, header string
		dropped       bool
		first         string
	}{
		"from a number":                         {"?after=%d", "", false, "node-leave"},
		"from where it was":                     {"?after=0", "Last-Event-ID: %d", false, "node-leave"},
		"after an earlier daemon":               {"", "Last-Event-ID: 5", true, "join"},
		"from the beginning":                    {"", "", false, "join"},
		"spaces, as the header's parser has it": {"", "Last-Event-ID:   %d  ", false, "node-leave"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, s streamed) {
				fill := func(f string) string { return strings.ReplaceAll(f, "%d", strconv.FormatUint(s.last-1, 10)) }
				lines := []string{sse}
				if c.header != "" {
					lines = append(lines, fill(c.header))
				}
				conn, resp := s.get(t, fill(c.query), lines...)
				defer conn.Close()
				r := bufio.NewReader(resp.Body)
				var events []string
				for len(events) == 0 || events[len(events)-1] == "dropped" {
					l, err := r.ReadString('\n')
					require.NoError(t, err)
					if e, ok := strings.CutPrefix(l, "event: "); ok {
						events = append(events, strings.TrimSpace(e))
					}
				}
				require.Equal(t, c.dropped, len(events) == 2)
				require.Equal(t, c.first, events[len(events)-1])
			})
		})
	}
}

// A reader that takes nothing is dropped, and so is one that goes away.
func TestSlowReaderIsDropped(t *testing.T) {
	for _, accept := range []string{sse, "Accept: application/json"} {
		t.Run(accept, func(t *testing.T) {
			inBubble(t, func(t *testing.T, s streamed) {
				r, err := s.hub.existing("r")
				require.NoError(t, err)
				for range maxEvents {
					r.line.note(time.Now(), noteOf(strings.Repeat("x", 500)))
				}
				c := s.pipes.dial()
				defer c.Close()
				_, err = io.WriteString(c, "GET /v1/runs/r/events HTTP/1.1\r\nHost: x\r\n"+accept+"\r\n\r\n")
				require.NoError(t, err)
				_, err = c.Read(make([]byte, 1)) // the answer has begun
				require.NoError(t, err)
				time.Sleep(2 * writeTime)
				n, err := io.Copy(io.Discard, c)
				require.NoError(t, err)
				require.Less(t, n, int64(maxEvents*500))
			})
		})
	}
}

func TestStreamEndsWithItsReader(t *testing.T) {
	inBubble(t, func(t *testing.T, s streamed) {
		c, resp := s.get(t, fmt.Sprintf("?after=%d", s.last), sse)
		require.Equal(t, http.StatusOK, resp.StatusCode, "the header comes before anything happens")
		c.Close()
		require.NoError(t, s.server.Shutdown(t.Context()), "no request is under way any more")
	})
}

func TestEventsOverHTTP(t *testing.T) {
	s := serveHub(t, testToken)
	_, err := s.client.Events(t.Context(), "r", 0)
	require.ErrorIs(t, err, ErrUnknownRun)
	require.NoError(t, s.client.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
	es, err := s.client.Events(t.Context(), "r", 0)
	require.NoError(t, err)
	require.Len(t, es.Events, 1)
	require.Equal(t, "a", es.Events[0].Node)
	require.Equal(t, es.Events[0].Seq, es.Next)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = s.client.Events(ctx, "r", es.Next)
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

// Whatever comes as a cursor, it is a number or a 400.
func FuzzCursor(f *testing.F) {
	for _, s := range []string{"", "0", "1", "-1", "18446744073709551615", "18446744073709551616", "0x1",
		"1_0", " 1", "+1", "é"} {
		f.Add(s)
	}
	hub := NewHub(HubConfig{})
	f.Cleanup(hub.Close)
	h := Handler(hub, ServerConfig{})
	f.Fuzz(func(t *testing.T, cursor string) {
		_, err := strconv.ParseUint(cursor, 10, 64)
		number, q := err == nil, url.QueryEscape(cursor)
		for _, c := range []struct {
			path, last string
			ok         bool
		}{
			{"watch?node=a&after=" + q, "", number},
			{"watch?node=a&after=0&notices=" + q, "", number},
			{"events?after=" + q, "", number},
			{"events?after=x", cursor, number},
		} {
			req := httptest.NewRequest(http.MethodGet, "http://x/v1/runs/r/"+c.path, nil)
			if c.last != "" {
				req.Header.Set("Accept", "text/event-stream")
				req.Header.Set("Last-Event-ID", c.last)
			}
			want := http.StatusBadRequest
			if c.ok {
				want = http.StatusNotFound // the run
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, req)
			require.Equal(t, want, w.Code, c.path)
		}
	})
}

// An answer that nobody takes is given up, whatever it is an answer to; so is its connection.
func TestAnswersThatNobodyTakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failed := make(chan error, 1)
		s := NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, err := w.Write(make([]byte, 1<<20))
			failed <- err
		}))
		l, done := newPipes(), make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		ours := l.dial()
		began := time.Now()
		_, err := io.WriteString(ours, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
		require.NoError(t, err)
		require.ErrorIs(t, <-failed, os.ErrDeadlineExceeded)
		require.Equal(t, answerTime, time.Since(began))
		_ = ours.Close()
		require.NoError(t, s.Close())
		<-done
	})
}
