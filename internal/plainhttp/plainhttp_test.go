package plainhttp

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// A name that is not this host's would go through the proxy of the environment.
func TestEnvironment(t *testing.T) {
	t.Setenv("HTTP_PROXY", "http://proxy.invalid:3128")
	t.Setenv("NO_PROXY", "")
	var dialed []string
	c := New(func(tr *http.Transport) {
		tr.DialContext = func(_ context.Context, _, addr string) (net.Conn, error) {
			dialed = append(dialed, addr)
			return nil, io.ErrUnexpectedEOF
		}
	})
	_, err := c.Get("http://hub.invalid:29400/")
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Equal(t, []string{"hub.invalid:29400"}, dialed)
}

func TestNeitherProxyNorRedirect(t *testing.T) {
	defer goleak.VerifyNone(t)
	stranger := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		t.Errorf("a stranger has received %s %s with %v", req.Method, req.URL, req.Header)
	}))
	defer stranger.Close()
	server := httptest.NewServer(http.RedirectHandler(stranger.URL, http.StatusTemporaryRedirect))
	defer server.Close()
	proxy, err := url.Parse(stranger.URL)
	require.NoError(t, err)
	for name, set := range map[string]func(*http.Transport){
		"as it is": nil,
		"changed":  func(tr *http.Transport) { tr.Proxy = http.ProxyURL(proxy) },
	} {
		t.Run(name, func(t *testing.T) {
			c := New(set)
			defer c.CloseIdleConnections()
			resp, err := c.Get(server.URL)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, http.StatusTemporaryRedirect, resp.StatusCode)
		})
	}
}
