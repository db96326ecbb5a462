package api

import (
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/secure"
	"dlrover-run/internal/testkit"
	"dlrover-run/rendezvous"
)

// A server that requires certificates tells a launcher without one so, which may try again: files change. Its paths
// without a token need none.
func TestCertificateOfALauncher(t *testing.T) {
	ca := testkit.NewAuthority(t, "ours")
	cert, key := ca.Issue(t.TempDir(), nil, "127.0.0.1")
	layer := func(c secure.Choice) *secure.Layer {
		l, err := c.Layer(nil, secure.Asks, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		return l
	}
	with, without := layer(secure.Choice{Cert: cert, Key: key, CA: ca.CA}), layer(secure.Choice{CA: ca.CA})
	hub := NewHub(HubConfig{})
	t.Cleanup(hub.Close)
	s := httptest.NewUnstartedServer(nil)
	s.Config = NewServer(Handler(hub, ServerConfig{Token: "the token"}))
	s.Listener = Watchful(with.Listener(s.Listener))
	s.Start()
	t.Cleanup(s.Close)
	addr := s.Listener.Addr().String()

	c := NewClient(addr, "the token").Over(with)
	t.Cleanup(c.Close)
	_, err := c.Runs(t.Context())
	require.NoError(t, err)
	stranger := NewClient(addr, "the token").Over(without)
	t.Cleanup(stranger.Close)
	_, err = stranger.Runs(t.Context())
	require.ErrorIs(t, err, errCertificate)
	require.ErrorContains(t, err, "requires a certificate of its clients: give --tls-cert and --tls-key")
	require.False(t, Final(err))
	resp, err := stranger.hc.Get("http://" + addr + "/healthz")
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusOK, resp.StatusCode)

	other := stranger.To(addr)
	t.Cleanup(other.Close)
	_, err = other.Runs(t.Context())
	require.ErrorIs(t, err, errCertificate, "it speaks TLS, too")
	_, err = c.LeaveRequest("r", rendezvous.Leave{})
	require.True(t, errors.Is(err, errors.ErrUnsupported), "the token must not travel in plain text")
}
