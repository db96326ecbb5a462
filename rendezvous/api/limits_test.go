package api

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/conns"
	"dlrover-run/rendezvous"
)

// askedBy returns the status of a request with a token, from an address.
func askedBy(h http.Handler, token, from, path string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(http.MethodGet, path, nil)
	req.RemoteAddr = from + ":1"
	req.Header.Set("Authorization", "Bearer "+token)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	return w
}

// An address that guesses tokens, or floods, is told to wait. Callers with the token behind the same address are not.
func TestRefusedRequestsAreCountedByAddress(t *testing.T) {
	h := NewHub(HubConfig{})
	defer h.Close()
	handler := Handler(h, ServerConfig{Token: "secret"})
	refused := map[int]int{}
	for range refusedBurst + 1000 {
		refused[askedBy(handler, "guess", "10.0.0.1", "/v1/runs").Code]++
	}
	require.GreaterOrEqual(t, refused[http.StatusUnauthorized], refusedBurst)
	w := askedBy(handler, "guess", "10.0.0.1", "/v1/runs")
	for i := 0; w.Code != http.StatusTooManyRequests && i < 100_000; i++ { // the machine may be slow
		w = askedBy(handler, "guess", "10.0.0.1", "/v1/runs")
	}
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	require.Equal(t, "1", w.Header().Get("Retry-After"))
	require.Contains(t, w.Body.String(), `"code":"too_many_requests"`)
	for range 100 {
		require.Equal(t, http.StatusOK, askedBy(handler, "secret", "10.0.0.1", "/v1/runs").Code)
		require.Equal(t, http.StatusOK, askedBy(handler, "secret", "10.0.0.1", "/healthz").Code)
	}
	require.Equal(t, http.StatusUnauthorized, askedBy(handler, "guess", "10.0.0.2", "/v1/runs").Code)
}

// All callers with the token are counted together, each valid token for itself.
func TestServedRequestsAreCountedByToken(t *testing.T) {
	l := limits{services: conns.NewRates(1, 2)}
	req := httptest.NewRequest(http.MethodGet, "/v1/runs", nil)
	var errs []error
	for _, token := range []string{"a", "a", "a", "b"} {
		req.Header.Set("Authorization", "Bearer "+token)
		errs = append(errs, l.served(req))
	}
	require.NoError(t, errors.Join(errs[0], errs[1], errs[3]))
	require.ErrorIs(t, errs[2], errTooMany)
	require.False(t, Final(errs[2]), "a launcher tries again")
}

// A launcher that a server has no room for comes back when the server says, and does not fail.
func TestALauncherWaitsForRoom(t *testing.T) {
	h := NewHub(HubConfig{})
	defer h.Close()
	var n atomic.Int64
	inner := Handler(h, ServerConfig{Token: "secret"})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if n.Add(1) == 1 {
			turnAway(w, errTooMany)
			return
		}
		inner.ServeHTTP(w, req)
	}))
	defer s.Close()
	c := NewClient(s.Listener.Addr().String(), "secret")
	defer c.Close()
	begun := time.Now()
	require.NoError(t, c.Join(t.Context(), "job", joinOf("a", rendezvous.Params{Min: 1, Max: 1})))
	require.GreaterOrEqual(t, time.Since(begun), time.Second)
	require.EqualValues(t, 2, n.Load())
}

// Of large bodies few are read at a time. Small ones do not wait for them.
func TestLargeBodiesTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLimits()
		var done, failed atomic.Int64
		send := func(body io.Reader, size int64) {
			req := httptest.NewRequest(http.MethodPost, "/", body).WithContext(t.Context())
			req.ContentLength = size
			l.serve(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
				if _, err := io.Copy(io.Discard, req.Body); err != nil {
					require.ErrorIs(t, err, errTooMany)
					failed.Add(1)
				}
				done.Add(1)
			}), httptest.NewRecorder(), req)
		}
		var ends []*io.PipeWriter
		for range largeBodies {
			r, w := io.Pipe()
			ends = append(ends, w)
			go send(r, -1)
		}
		synctest.Wait()
		require.Len(t, l.bodies, largeBodies)
		go send(strings.NewReader("one more"), largeBody+1)
		send(strings.NewReader("small"), largeBody)
		synctest.Wait()
		require.EqualValues(t, 1, done.Load())
		ends[0].Close()
		synctest.Wait()
		require.EqualValues(t, 3, done.Load())
		r, w := io.Pipe()
		ends[0] = w
		go send(r, -1)
		synctest.Wait()
		send(strings.NewReader("waits for too long"), largeBody+1)
		require.EqualValues(t, 1, failed.Load())
		for _, w := range ends {
			w.Close()
		}
		synctest.Wait()
		require.Empty(t, l.bodies)
		require.EqualValues(t, 1, failed.Load())
	})
}
