package plainhttp

import (
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"dlrover-run/internal/retry"
)

// Bounds of the obedience to a server: how often a request is sent again, and after which pause at most.
const (
	mostAgain = 5
	mostPause = 10 * time.Second
)

// later is a transport that sends a request again where the server has had too many for now.
type later struct{ failover }

// RoundTrip implements http.RoundTripper.
func (l later) RoundTrip(r *http.Request) (*http.Response, error) {
	for range mostAgain {
		resp, err := l.failover.RoundTrip(r)
		if err != nil || resp.StatusCode != http.StatusTooManyRequests || !repeats(r) {
			return resp, err
		}
		pause := pauseOf(resp)
		end, ends := r.Context().Deadline()
		if pause == 0 || ends && time.Until(end) < pause {
			return resp, nil
		}
		_, _ = io.CopyN(io.Discard, resp.Body, maxHeader) // so that its connection can be used again
		_ = resp.Body.Close()
		if !retry.Sleep(r.Context(), pause) {
			return nil, r.Context().Err()
		}
		if r, err = again(r); err != nil {
			return nil, err
		}
	}
	return l.failover.RoundTrip(r)
}

// pauseOf is the pause that a server asks for, and up to as much again: many clients get the same answer. 0: none.
func pauseOf(resp *http.Response) time.Duration {
	seconds, err := strconv.ParseUint(resp.Header.Get("Retry-After"), 10, 32)
	if err != nil || seconds == 0 {
		return 0
	}
	pause := min(time.Duration(seconds)*time.Second, mostPause/2)
	return pause + rand.N(pause)
}
