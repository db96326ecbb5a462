package api

import (
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/httperr"
	"dlrover-run/rendezvous"
)

const testToken = "0123456789abcdef"

// mountedHub serves a hub with the mounts "checks" and "hang", which answer with what they were asked.
func mountedHub(t *testing.T) http.Handler {
	hub := NewHub(HubConfig{})
	t.Cleanup(hub.Close)
	echo := func(name string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			fmt.Fprintf(w, "%s %s %s %s", name, req.Method, req.PathValue("run"), req.URL.Path)
		})
	}
	return Handler(hub,
		ServerConfig{Token: testToken, Mounts: map[string]http.Handler{"checks": echo("checks"), "hang": echo("hang")}})
}

func ask(h http.Handler, method, path, token string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(method, path, strings.NewReader(""))
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	return w
}

func TestMounts(t *testing.T) {
	h := mountedHub(t)
	for _, c := range []struct {
		method, path string
		status       int
		want         string // the answer, or the code of an error
	}{
		{"GET", "/v1/runs/job/checks", 200, "checks GET job /v1/runs/job/checks"},
		{"POST", "/v1/runs/job/checks/", 200, "checks POST job /v1/runs/job/checks/"},
		{"DELETE", "/v1/runs/a%20b/hang/x/y", 200, "hang DELETE a b /v1/runs/a b/hang/x/y"},
		{"GET", "/v1/runs/job/other", 404, "not_found"},
		{"GET", "/v1/runs/job/other/x", 404, "not_found"},
		{"GET", "/v1/runs/job/checksum", 404, "not_found"},
		{"GET", "/v1/runs/job", 404, "not_found"},
		{"GET", "/v1/runs/job/join/x", 404, "not_found"},
		{"GET", "/v1/", 404, "not_found"},
		{"GET", "/v1/other", 404, "not_found"},
		{"GET", "/v1/runs/a%1b/checks", 400, "bad_request"},
		{"GET", "/v1/runs/" + strings.Repeat("r", maxRunName+1) + "/checks", 400, "bad_request"},
	} {
		t.Run(c.method+" "+c.path[:min(len(c.path), 40)], func(t *testing.T) {
			w := ask(h, c.method, c.path, testToken)
			require.Equal(t, c.status, w.Code)
			if c.status == http.StatusOK {
				require.Equal(t, c.want, w.Body.String())
				return
			}
			e, ok := httperr.Parse(w.Body.Bytes())
			require.True(t, ok)
			require.Equal(t, c.want, e.Code)
			require.NotEmpty(t, e.Error)
		})
	}
}

// Every path below /v1, known or not, asks a stranger for the token first, whatever the method.
func TestStrangersAreRefusedEverywhere(t *testing.T) {
	h := mountedHub(t)
	paths := []string{
		"/v1/", "/v1/other", "/v1/runs/job", "/v1/runs/job/checks", "/v1/runs/job/checks/x", "/v1/runs/job/nothing",
	}
	for _, r := range (&server{}).routes() {
		paths = append(paths, strings.ReplaceAll(r.path, "{run}", "job"))
	}
	for _, path := range paths {
		for _, method := range []string{"GET", "POST", "PUT", "HEAD", "OPTIONS"} {
			for _, token := range []string{"", "another"} {
				w := ask(h, method, path, token)
				require.Equal(t, http.StatusUnauthorized, w.Code, "%s %s", method, path)
				require.Equal(t, "close", w.Header().Get("Connection"))
			}
		}
	}
}

func TestOtherMethodsAreRefused(t *testing.T) {
	h := mountedHub(t)
	for _, r := range (&server{}).routes() {
		path := strings.ReplaceAll(r.path, "{run}", "job")
		for _, method := range []string{"GET", "POST", "PUT", "DELETE", "PATCH"} {
			if method == r.method {
				continue
			}
			w := ask(h, method, path, testToken)
			require.Equal(t, http.StatusMethodNotAllowed, w.Code, "%s %s", method, path)
			require.Equal(t, r.method, w.Header().Get("Allow"))
			require.Contains(t, w.Body.String(), `"code":"method_not_allowed"`)
		}
	}
}

func TestHealthIsForEveryone(t *testing.T) {
	h := mountedHub(t)
	require.Equal(t, http.StatusOK, ask(h, "GET", "/healthz", "").Code)
	require.Equal(t, http.StatusMethodNotAllowed, ask(h, "POST", "/healthz", "").Code)
}

func TestMountNames(t *testing.T) {
	hub := NewHub(HubConfig{})
	defer hub.Close()
	for _, name := range []string{"", "a/b", "{x}", "a b", "join", "events"} {
		require.Panics(t,
			func() { Handler(hub, ServerConfig{Mounts: map[string]http.Handler{name: http.NotFoundHandler()}}) }, name)
	}
}

// Unknown paths of a daemon are an error that is not tried again, and one that tells what to do.
func TestClientAgainstAnOlderDaemon(t *testing.T) {
	old := httptest.NewServer(http.NotFoundHandler())
	defer old.Close()
	c := NewClient(old.Listener.Addr().String(), "")
	defer c.Close()
	_, err := c.Events(t.Context(), "r", 0)
	require.ErrorIs(t, err, ErrBadRequest)
	require.ErrorContains(t, err, "an older version")
	require.True(t, Final(ErrNotFound))
}

// Every error that is acted upon arrives as itself; those of the first version keep their codes.
func TestErrorsOnTheWire(t *testing.T) {
	for _, w := range wireErrors {
		t.Run(w.Code, func(t *testing.T) {
			rec := httptest.NewRecorder()
			wireErrors.Write(rec, fmt.Errorf("%w: in other words", w.Err))
			require.Equal(t, w.Status, rec.Code)
			e, ok := httperr.Parse(rec.Body.Bytes())
			require.True(t, ok)
			require.Equal(t, w.Code, e.Code)
			if w.Err == ErrClosed {
				require.EqualError(t, errorOf(e), "the rendezvous daemon is shutting down") // it is merely away
				return
			}
			require.ErrorIs(t, errorOf(e), w.Err)
			require.ErrorContains(t, errorOf(e), "in other words")
		})
	}
}

type question struct {
	ID  string `json:"id"`
	Seq int    `json:"seq"`
}

// callable serves a hub whose mount "checks" does what the last segment of the path says.
func callable(t *testing.T, hold <-chan struct{}) *Client {
	hub := NewHub(HubConfig{})
	mount := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		run, q, err := decode[question](req)
		switch path.Base(req.URL.Path) {
		case "echo":
			writeAnswer(w, question{run + " " + req.Method + " " + q.ID, q.Seq + 1}, err)
		case "empty":
			writeAnswer(w, nil, ErrNothingNew)
		case "unknown":
			writeAnswer(w, nil, rendezvous.ErrUnknownNode)
		case "held":
			<-hold
		}
	})
	s := httptest.NewServer(Handler(hub, ServerConfig{Token: testToken, Mounts: map[string]http.Handler{"checks": mount}}))
	c := NewClient(s.Listener.Addr().String(), testToken)
	t.Cleanup(func() { c.Close(); hub.Close(); _ = s.Config.Close(); s.CloseClientConnections(); s.Close() })
	return c
}

func TestCall(t *testing.T) {
	hold := make(chan struct{})
	defer close(hold)
	c := callable(t, hold)
	var out question
	require.NoError(t, c.Call(t.Context(), "a b", "checks/echo", question{"x", 7}, &out))
	require.Equal(t, question{"a b POST x", 8}, out)
	require.NoError(t, c.Call(t.Context(), "r", "checks/echo", question{}, nil), "who wants no answer gets none")
	require.ErrorIs(t, c.Call(t.Context(), "r", "checks/empty", question{}, &out), ErrNothingNew)
	require.ErrorIs(t, c.Call(t.Context(), "r", "checks/unknown", question{}, &out), rendezvous.ErrUnknownNode)
	require.ErrorIs(t, c.Call(t.Context(), "r", "other", question{}, &out), ErrNotFound)
	require.ErrorContains(t, c.Call(t.Context(), "r", "checks/echo", make(chan int), nil), `checks/echo of run "r": json`)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, c.Call(ctx, "r", "checks/held", question{}, &out), context.DeadlineExceeded)
}

func TestExchange(t *testing.T) {
	mount := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("X-Seen", req.Method+" "+req.URL.RequestURI()+" ["+req.Header.Get("Content-Encoding")+"]")
		switch {
		case req.Method == http.MethodPost:
			w.WriteHeader(http.StatusTeapot)
			_, _ = io.Copy(w, req.Body)
		case req.Header.Get("Accept-Encoding") == "gzip":
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			_, _ = z.Write([]byte("unpacked"))
			_ = z.Close()
		}
	})
	h := NewHub(HubConfig{})
	t.Cleanup(h.Close)
	srv := httptest.NewServer(Handler(h, ServerConfig{Token: "t", Mounts: map[string]http.Handler{"hang": mount}}))
	t.Cleanup(srv.Close)
	c := NewClient(srv.Listener.Addr().String(), "t")
	t.Cleanup(c.Close)
	for _, x := range []struct {
		encoding   string
		body       []byte
		seen, want string
		status     int
	}{
		{"gzip", []byte{1, 2}, "POST /v1/runs/a%20b/hang/x?y=z [gzip]", "\x01\x02", http.StatusTeapot},
		{"", []byte("{}"), "POST /v1/runs/a%20b/hang/x?y=z []", "{}", http.StatusTeapot},
		{"", nil, "GET /v1/runs/a%20b/hang/x?y=z []", "unpacked", http.StatusOK},
	} {
		resp, err := c.Exchange(t.Context(), "a b", "hang/x?y=z", x.encoding, x.body)
		require.NoError(t, err)
		data, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, x.status, resp.StatusCode)
		require.Equal(t, x.want, string(data))
		require.Equal(t, x.seen, resp.Header.Get("X-Seen"))
	}
}

func TestGlobals(t *testing.T) {
	hub := NewHub(HubConfig{})
	defer hub.Close()
	echo := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		fmt.Fprintf(w, "%q", req.Method+" "+req.URL.EscapedPath()+" "+string(body))
	})
	h := Handler(hub, ServerConfig{Token: testToken, Global: map[string]http.Handler{"nodes": echo}})
	require.Equal(t, 401, ask(h, "GET", "/v1/nodes", "").Code)
	require.Equal(t, 404, ask(h, "GET", "/v1/other", testToken).Code)
	require.Equal(t, 200, ask(h, "GET", "/v1/runs", testToken).Code)

	srv := httptest.NewServer(h)
	defer srv.Close()
	c := NewClient(strings.TrimPrefix(srv.URL, "http://"), testToken)
	defer c.Close()
	var got string
	require.NoError(t, c.Global(t.Context(), "nodes", nil, &got))
	require.Equal(t, "GET /v1/nodes ", got)
	require.NoError(t, c.Global(t.Context(), "nodes/a%2Fb", map[string]int{"x": 1}, &got))
	require.Equal(t, `POST /v1/nodes/a%2Fb {"x":1}`, got)
	require.ErrorIs(t, c.Global(t.Context(), "other", nil, &got), ErrNotFound)
	for _, bad := range []string{"", "runs", "a/b", "{x}"} {
		require.Panics(t, func() { Handler(hub, ServerConfig{Global: map[string]http.Handler{bad: echo}}) }, bad)
	}
}
