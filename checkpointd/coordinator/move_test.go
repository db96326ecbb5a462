package coordinator

import (
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
		c := Client(old.URL, "r", "", nil)
		done := make(chan error, 1)
		go func() { done <- c.Ages(t.Context(), 0, []Age{{Rank: 1}}) }()
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
