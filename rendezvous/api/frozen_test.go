package api

import (
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/plainhttp"
	"dlrover-run/rendezvous"
)

func TestLeaderPath(t *testing.T) {
	h := mountedHub(t)
	require.Equal(t, http.StatusNoContent, ask(h, http.MethodGet, plainhttp.LeaderPath, testToken).Code)
	require.Equal(t, http.StatusUnauthorized, ask(h, http.MethodGet, plainhttp.LeaderPath, "another").Code)
}

// A node that watches a daemon as that is frozen joins the one that serves next, and so do its reports.
func TestSessionLeavesAFrozenDaemon(t *testing.T) {
	var frozen atomic.Bool
	first, next := NewHub(HubConfig{}), NewHub(HubConfig{})
	handler := Handler(first, ServerConfig{Token: testToken})
	a := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if frozen.Load() {
			<-req.Context().Done()
			return
		}
		handler.ServeHTTP(w, req)
	}))
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, free.Close()) // it does not serve yet
	c := NewClient(a.Listener.Addr().String()+","+free.Addr().String(), testToken)
	t.Cleanup(func() { c.Close(); first.Close(); next.Close(); a.CloseClientConnections(); a.Close() })

	p := rendezvous.Params{Min: 1, Max: 1}
	s, err := Open(t.Context(), c, SessionConfig{Run: "r", Node: joinOf("a", p).Node, Params: p, Where: "test"})
	require.NoError(t, err)
	defer s.Close()
	require.Eventually(t, func() bool { return len(first.Runs(true)) == 1 }, time.Minute, time.Millisecond)
	frozen.Store(true)
	b := httptest.NewUnstartedServer(Handler(next, ServerConfig{Token: testToken}))
	b.Listener.Close()
	b.Listener, err = net.Listen("tcp", free.Addr().String())
	require.NoError(t, err)
	b.Start()
	t.Cleanup(func() { _ = b.Config.Close(); b.CloseClientConnections(); b.Close() })
	require.Eventually(t, func() bool {
		rs := next.Runs(true)
		return len(rs) == 1 && rs[0].Members == 1
	}, time.Minute, time.Millisecond)
	_, err = s.World(t.Context())
	require.NoError(t, err)
}
