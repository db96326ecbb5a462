package coordinator

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A hub on standby, or one that has moved, is away; a client that is told where the hub is now goes on there.
func TestClientMoves(t *testing.T) {
	for _, code := range []string{"standby", "moved"} {
		asked := make(chan bool, 100)
		old := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			select {
			case asked <- true:
			default:
			}
			w.WriteHeader(http.StatusMisdirectedRequest)
			_, _ = io.WriteString(w, `{"code":"`+code+`","error":"not here"}`)
		}))
		now := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "{}")
		}))
		c := Client(old.URL, "r", nil, nil)
		done := make(chan error, 1)
		go func() { done <- c.Ages(t.Context(), "", 0, []Age{{Rank: 1}}) }()
		<-asked
		select {
		case err := <-done:
			require.NoError(t, err, code)
			require.Fail(t, "a hub that is elsewhere has answered")
		case <-time.After(20 * time.Millisecond):
		}
		c.(Mover).Move(strings.TrimPrefix(now.URL, "http://"))
		require.NoError(t, <-done)
		old.Close()
		now.Close()
	}
}

// Launchers that may serve next take connections, too. A client that came to one of them while the launcher that serves
// was away for a moment goes back.
func TestClientLeavesStandby(t *testing.T) {
	for _, code := range []string{"standby", "moved"} {
		next := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Connection", "close")
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, `{"code":"`+code+`","error":"not here"}`)
		}))
		serves := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "{}")
		}))
		c := Client(next.URL+","+serves.Listener.Addr().String(), "r", nil, nil)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		require.NoError(t, c.Ages(ctx, "", 0, []Age{{Rank: 1}}), code)
		cancel()
		c.(*client).hc.CloseIdleConnections()
		next.Close()
		serves.Close()
	}
}
