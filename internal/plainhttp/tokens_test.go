package plainhttp

import (
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A client sends its first token, the other one where that is refused, and then that until it is refused, or gone.
func TestTokens(t *testing.T) {
	var known, accepted, seen []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		token := strings.TrimPrefix(req.Header.Get("Authorization"), "Bearer ")
		body, _ := io.ReadAll(req.Body)
		seen = append(seen, token+":"+string(body))
		if !slices.Contains(accepted, token) {
			w.WriteHeader(http.StatusUnauthorized)
		}
	}))
	t.Cleanup(s.Close)
	hc := New(nil)
	t.Cleanup(hc.CloseIdleConnections)
	tokens := NewTokens(func() []string { return known })
	for i, c := range []struct {
		known, accepted []string
		status          int
		seen            []string
	}{
		{[]string{"old"}, []string{"old"}, 200, []string{"old:x"}},
		{[]string{"new", "old"}, []string{"old"}, 200, []string{"new:x", "old:x"}},
		{[]string{"new", "old"}, []string{"old", "new"}, 200, []string{"old:x"}},
		{[]string{"new", "old"}, []string{"new"}, 200, []string{"old:x", "new:x"}},
		{[]string{"new"}, []string{"new"}, 200, []string{"new:x"}},
		{[]string{"new"}, []string{"other"}, 401, []string{"new:x"}},
		{[]string{"new", "old"}, []string{"other"}, 401, []string{"new:x", "old:x"}},
		{[]string{"new", "old"}, []string{"old", "new"}, 200, []string{"new:x"}},
		{nil, []string{"old"}, 401, []string{":x"}},
	} {
		known, accepted, seen = c.known, c.accepted, nil
		req, err := http.NewRequest(http.MethodPost, s.URL, strings.NewReader("x"))
		require.NoError(t, err)
		resp, err := tokens.Do(hc, req)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, c.status, resp.StatusCode, i)
		require.Equal(t, c.seen, seen, i)
	}
	require.Empty(t, NewTokens(nil).Sent())
}
