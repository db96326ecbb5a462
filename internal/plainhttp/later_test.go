package plainhttp

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// full is a server without room for the first requests.
type full struct {
	before int
	after  string
	asked  atomic.Int64
}

func (f *full) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	body, err := io.ReadAll(r.Body)
	if int(f.asked.Add(1)) <= f.before {
		w.Header().Set("Retry-After", f.after)
		w.WriteHeader(http.StatusTooManyRequests)
	}
	_, _ = w.Write(append(body, " answered"...))
	return w.Result(), err
}

func TestARequestIsSentAgainWhenTheServerSays(t *testing.T) {
	for name, c := range map[string]struct {
		before      int
		after       string
		most        time.Duration // of the request
		status      int
		asked       int64
		least, last time.Duration
	}{
		"room at once":              {0, "1", time.Hour, 200, 1, 0, 0},
		"after a second or two":     {1, "1", time.Hour, 200, 2, time.Second, 2 * time.Second},
		"never":                     {1000, "1", time.Hour, 429, 1 + mostAgain, mostAgain * time.Second, 10 * time.Second},
		"an hour is not waited for": {1, "3600", time.Hour, 200, 2, mostPause / 2, mostPause},
		"no time left":              {1, "5", 4 * time.Second, 429, 1, 0, 0},
		"no pause":                  {1, "", time.Hour, 429, 1, 0, 0},
		"a date":                    {1, "Wed, 21 Oct 2026 07:28:00 GMT", time.Hour, 429, 1, 0, 0},
		"negative":                  {1, "-1", time.Hour, 429, 1, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := &full{before: c.before, after: c.after}
				transport := &http.Transport{}
				transport.RegisterProtocol("full", server)
				hc := http.Client{Transport: later{failover{transport, NewAmong("a:1")}}}
				ctx, cancel := context.WithTimeout(t.Context(), c.most)
				defer cancel()
				r, err := http.NewRequestWithContext(ctx, http.MethodPost, "full://a:1/", strings.NewReader("body"))
				require.NoError(t, err)
				begun := time.Now()
				resp, err := hc.Do(r)
				require.NoError(t, err)
				defer resp.Body.Close()
				text, err := io.ReadAll(resp.Body)
				require.NoError(t, err)
				require.Equal(t, "body answered", string(text))
				require.Equal(t, c.status, resp.StatusCode)
				require.Equal(t, c.asked, server.asked.Load())
				require.GreaterOrEqual(t, time.Since(begun), c.least)
				require.LessOrEqual(t, time.Since(begun), c.last)
			})
		})
	}
}

// The clients of one server do not come back all at once.
func TestPausesAreSpread(t *testing.T) {
	seen := map[time.Duration]bool{}
	for range 100 {
		seen[pauseOf(&http.Response{Header: http.Header{"Retry-After": {"1"}}})] = true
	}
	require.Greater(t, len(seen), 90)
}
