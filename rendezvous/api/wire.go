package api

import (
	"errors"
	"net/http"
	"slices"
	"time"

	"dlrover-run/rendezvous"
)

// MaxBody bounds a request body: the largest is a Join with MaxFailures failures,
// for which a launcher's records of 7 KiB leave room.
const (
	MaxBody     = 2 << 20
	MaxFailures = 128
)

// The bodies of the requests. Times travel as the sender's clock together with the
// moment of sending; the receiver shifts them to its own clock, so that skew between
// hosts cannot reorder failures.
type joinBody struct {
	Node     rendezvous.Node      `json:"node"`
	Params   rendezvous.Params    `json:"params"`
	Failures []rendezvous.Failure `json:"failures,omitempty"`
	Stopped  rendezvous.EpochID   `json:"stopped,omitzero"`
	Seen     rendezvous.EpochID   `json:"seen,omitzero"`
	Restarts int                  `json:"restarts,omitempty"`
	Resume   *rendezvous.Resume   `json:"resume,omitempty"`
	SentAt   time.Time            `json:"sent_at"`
}

type reportBody struct {
	ID string `json:"id"`
	rendezvous.EpochID
	Addr     string               `json:"addr,omitempty"`
	Port     int                  `json:"port,omitempty"`
	Decision rendezvous.Decision  `json:"decision,omitempty"`
	Reason   string               `json:"reason,omitempty"`
	Failures []rendezvous.Failure `json:"failures,omitempty"`
	SentAt   time.Time            `json:"sent_at"`
}

type errorBody struct {
	Code  string `json:"code"`
	Error string `json:"error"`
}

// dated expresses the times of fs in the wall clock of sentAt. Ages are taken from the
// monotonic clock, so that a jump of the wall clock since a failure does not matter.
func dated(fs []rendezvous.Failure, sentAt time.Time) []rendezvous.Failure {
	out := slices.Clone(fs)
	for i := range out {
		out[i].At = sentAt.Round(0).Add(-sentAt.Sub(out[i].At))
	}
	return out
}

// shift moves the times of fs from the sender's clock to ours, in place.
func shift(fs []rendezvous.Failure, sentAt, now time.Time) []rendezvous.Failure {
	if sentAt.IsZero() {
		return fs
	}
	for i := range fs {
		fs[i].At = fs[i].At.Add(now.Sub(sentAt))
	}
	return fs
}

// wireErrors maps the errors that a launcher acts upon to a status and a stable code.
var wireErrors = []struct {
	err    error
	status int
	code   string
}{
	{rendezvous.ErrUnknownNode, http.StatusNotFound, "unknown_node"},
	{rendezvous.ErrRefused, http.StatusConflict, "refused"},
	{rendezvous.ErrFinishing, http.StatusServiceUnavailable, "finishing"},
	{rendezvous.ErrTaken, http.StatusServiceUnavailable, "taken"},
	{ErrUnauthorized, http.StatusUnauthorized, "unauthorized"},
	{ErrBadRequest, http.StatusBadRequest, "bad_request"},
	{ErrTooManyRuns, http.StatusTooManyRequests, "too_many_runs"},
	{ErrClosed, http.StatusServiceUnavailable, "closed"},
}

func statusOf(err error) (int, string) {
	for _, w := range wireErrors {
		if errors.Is(err, w.err) {
			return w.status, w.code
		}
	}
	return http.StatusInternalServerError, "internal"
}

// remoteError carries the daemon's own words and still answers errors.Is.
type remoteError struct {
	text string
	is   error
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.is }

// errorOf is statusOf's inverse. A daemon that is shutting down is merely away.
func errorOf(b errorBody) error {
	if b.Code == "closed" {
		return errors.New("the rendezvous daemon is shutting down")
	}
	for _, w := range wireErrors {
		if w.code == b.Code {
			return &remoteError{b.Error, w.err}
		}
	}
	return errors.New(b.Error)
}
