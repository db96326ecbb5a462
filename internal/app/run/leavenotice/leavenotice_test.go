package leavenotice

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNotices(t *testing.T) {
	for body, want := range map[string]bool{"TRUE": true, "FALSE": false, " false\n": false, "": true, "none": false} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body) }))
		c := noticeClient()
		found, err := noticeAt(t.Context(), c, s.URL)
		require.NoError(t, err)
		require.Equal(t, want, found, body)
		c.CloseIdleConnections()
		s.Close()
	}
	s := httptest.NewServer(http.NotFoundHandler())
	c := noticeClient()
	found, err := noticeAt(t.Context(), c, s.URL)
	require.NoError(t, err)
	require.False(t, found)
	c.CloseIdleConnections()
	s.Close()
}
