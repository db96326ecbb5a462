package main

import (
	"net"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous/api"
)

// TestSimulatedNodesMeetTwice: two processes' worth of nodes meet, one fails, and they
// meet again. Their numbers are those of nodes that all dial 127.0.0.1.
func TestSimulatedNodesMeetTwice(t *testing.T) {
	const token = "0123456789abcdef"
	hub := api.NewHub(api.HubConfig{})
	listener, err := api.Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	server := api.NewServer(api.Handler(hub, api.ServerConfig{Token: token}))
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() { hub.Close(); server.Close(); <-done })
	_, port, err := net.SplitHostPort(listener.Addr().String())
	require.NoError(t, err)

	one, err := openNodes(t.Context(), port, token, 2, 0, 1, "")
	require.NoError(t, err)
	defer one.close()
	_, err = one.collect(t.Context(), one.waiting)
	require.NoError(t, err)
	require.Empty(t, one.released, "a lone node has to wait")
	began := now()
	two, err := openNodes(t.Context(), port, token, 2, 32, 1, "")
	require.NoError(t, err)
	defer two.close()
	met := began
	for _, s := range []*simulation{one, two} {
		at, err := s.collect(t.Context(), s.released)
		require.NoError(t, err)
		require.Greater(t, at, began)
		met = max(met, at)
	}
	require.NoError(t, two.breakWorld(t.Context()))
	for _, s := range []*simulation{one, two} {
		at, err := s.collect(t.Context(), s.released)
		require.NoError(t, err)
		require.Greater(t, at, met)
	}
	_, err = openNodes(t.Context(), port, "another token....", 2, 64, 1, "")
	require.ErrorIs(t, err, api.ErrUnauthorized)
}

// A node that has more to tell than anybody listens to ends, too.
func TestSimulatedNodesEnd(t *testing.T) {
	const token = "0123456789abcdef"
	hub := api.NewHub(api.HubConfig{})
	defer hub.Close()
	server := httptest.NewServer(api.Handler(hub, api.ServerConfig{Token: token}))
	defer server.Close()
	defer server.Config.Close()
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	require.NoError(t, err)
	s, err := openNodes(t.Context(), port, token, 1, 0, 1, "")
	require.NoError(t, err)
	_, err = s.collect(t.Context(), s.released)
	require.NoError(t, err)
	for range cap(s.released) {
		s.released <- 0
	}
	epoch := func() job.EpochID {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.epoch
	}
	first := epoch()
	require.NoError(t, s.breakWorld(t.Context()))
	require.Eventually(t, func() bool { return epoch() != first }, 30*time.Second, time.Millisecond)
	done := make(chan struct{})
	go func() { s.close(); close(done) }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		require.Fail(t, "it does not end")
	}
}

func TestSimulateRejectsItsArguments(t *testing.T) {
	require.ErrorContains(t, simulate([]string{"1", "2"}, os.Stdout), "PORT TOTAL FROM COUNT GATE")
	require.Error(t, simulate([]string{"1", "two", "3", "4", "true"}, os.Stdout))
}
