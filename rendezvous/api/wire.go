package api

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"dlrover-run/internal/httperr"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// maxBody bounds a request body: the largest is a Join with maxFailures failures,
// for which a launcher's records of 8 KiB leave room.
const (
	maxBody     = 2 << 20
	maxFailures = 128
)

// The bodies of the requests are events and the moment of sending, if times travel with them: those are of the sender's
// clock, and the receiver shifts them to its own, so that skew between hosts cannot reorder failures.
type sent struct {
	SentAt time.Time `json:"sent_at"`
}

type (
	joinBody struct {
		rendezvous.Join
		sent
	}
	readyBody struct {
		rendezvous.Ready
		sent
	}
	failingBody struct {
		rendezvous.Failing
		sent
	}
	successBody struct {
		rendezvous.Success
		sent
	}
	leaveBody struct {
		rendezvous.Leave
		sent
	}
	clearedBody struct {
		rendezvous.Cleared
		sent
	}
	noticeBody struct {
		Node  string `json:"node,omitempty"`
		Topic string `json:"topic"`
		Body  string `json:"body,omitempty"`
	}
)

// dated expresses the times of fs in the wall clock of sentAt.
func dated(fs []job.Failure, sentAt time.Time) []job.Failure {
	out := slices.Clone(fs)
	for i := range out {
		out[i].At = wall(out[i].At, sentAt)
	}
	return out
}

// wall expresses a time in the wall clock of sentAt; no time stays none. Ages are taken from the monotonic clock, so
// that a jump of the wall clock since then does not matter.
func wall(at, sentAt time.Time) time.Time {
	if at.IsZero() {
		return at
	}
	return sentAt.Round(0).Add(at.Sub(sentAt))
}

// shift moves the times of fs from the sender's clock to ours, in place.
func shift(fs []job.Failure, sentAt, now time.Time) {
	if sentAt.IsZero() {
		return
	}
	for i := range fs {
		fs[i].At = shifted(fs[i].At, sentAt, now)
	}
}

// shifted is a time of the sender's clock by ours, monotonic as now is; no time stays none.
func shifted(at, sentAt, now time.Time) time.Time {
	if at.IsZero() || sentAt.IsZero() {
		return at
	}
	return now.Add(at.Sub(sentAt))
}

// wireErrors maps the errors that a launcher acts upon to a status and a stable code.
var wireErrors = httperr.Table{
	{rendezvous.ErrUnknownNode, http.StatusNotFound, "unknown_node"},
	{rendezvous.ErrRefused, http.StatusConflict, "refused"},
	{rendezvous.ErrFinishing, http.StatusServiceUnavailable, "finishing"},
	{rendezvous.ErrReturning, http.StatusServiceUnavailable, "returning"},
	{rendezvous.ErrTaken, http.StatusServiceUnavailable, "taken"},
	{errTooMany, http.StatusTooManyRequests, "too_many_requests"}, // before ErrBadRequest
	{ErrUnauthorized, http.StatusUnauthorized, "unauthorized"},
	{errStranger, http.StatusForbidden, "stranger"},
	{errCertificate, http.StatusForbidden, "certificate"},
	{rendezvous.ErrFinished, http.StatusConflict, "finished"},
	{rendezvous.ErrNotRunning, http.StatusConflict, "not_running"},
	{rendezvous.ErrNotPaused, http.StatusConflict, "not_paused"},
	{rendezvous.ErrBadOrder, http.StatusBadRequest, "bad_order"},
	{ErrUnknownRun, http.StatusNotFound, "unknown_run"},
	{ErrNotEnded, http.StatusConflict, "not_ended"},
	{errNoNotices, http.StatusConflict, "no_notices"},
	{errMethod, http.StatusMethodNotAllowed, "method_not_allowed"},
	{errPage, http.StatusForbidden, "web_page"},
	{errMedia, http.StatusUnsupportedMediaType, "media_type"},
	{ErrNotFound, http.StatusNotFound, "not_found"}, // before ErrBadRequest, which it is, too
	{ErrBadRequest, http.StatusBadRequest, "bad_request"},
	{errTooManyRuns, http.StatusTooManyRequests, "too_many_runs"},
	{ErrClosed, http.StatusServiceUnavailable, "closed"},
	{ErrStandby, http.StatusServiceUnavailable, "standby"},
	{errMoved, http.StatusMisdirectedRequest, "moved"},
}

var (
	// errMethod: the path exists, and the method does not.
	errMethod = fmt.Errorf("%w: wrong method", ErrBadRequest)
	// errPage answers requests that a web page may have made in the browser of an authorized user.
	errPage  = fmt.Errorf("%w: web pages are not served", ErrBadRequest)
	errMedia = fmt.Errorf("%w: wrong Content-Type", ErrBadRequest)
)

// errTooMany answers a sender of too many requests; see limits.
var errTooMany = errors.New("too many requests")

// ErrStandby answers requests to a launcher that may be elected to serve, and is not.
var ErrStandby = errors.New("this launcher does not serve the rendezvous")

var errMoved = errors.New("another launcher serves the rendezvous")

// MovedError answers requests to a launcher that has heard of one that was elected to serve the run.
type MovedError struct{ To string } // HOST:PORT

func (e *MovedError) Error() string { return errMoved.Error() + ": it is at " + e.To }
func (e *MovedError) Unwrap() error { return errMoved }

// Where implements httperr.Elsewhere.
func (e *MovedError) Where() string { return e.To }

// errorOf is the error that a daemon sent. One that is shutting down is merely away.
func errorOf(b httperr.Body) error {
	if b.Code == "moved" && b.Where != "" {
		return &MovedError{b.Where}
	}
	if b.Code == "closed" {
		return errors.New("the rendezvous daemon is shutting down")
	}
	return wireErrors.Received(b)
}
