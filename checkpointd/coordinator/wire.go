package coordinator

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"dlrover-run/checkpointd/commit"
)

// termHeader of a reply names the Hub. A client that sees it change repeats what the new one cannot know.
const termHeader = "Checkpoint-Term"

// The bodies of requests and replies. NoWait: take it in and answer at once.
type (
	reportBody struct {
		Report
		NoWait bool `json:"note,omitempty"`
	}
	agreeBody struct {
		Held
		NoWait bool `json:"note,omitempty"`
	}
	peersBody struct {
		Here
		NoWait bool `json:"note,omitempty"`
	}
	agesBody = Aged

	reportReply struct {
		Entries []commit.Entry `json:"entries,omitempty"`
	}
	peersReply struct {
		Peers []Peer `json:"peers"`
	}
	errorBody struct {
		Code  string `json:"code"`
		Error string `json:"error"`
	}
)

// wireErrors maps the errors of a Coordinator to a status and a stable code.
var wireErrors = []struct {
	err    error
	status int
	code   string
}{
	{ErrAborted, http.StatusConflict, "aborted"},
	{ErrDecided, http.StatusConflict, "decided"},
	{ErrStalled, http.StatusConflict, "stalled"},
	{ErrCommitted, http.StatusConflict, "committed"},
	{ErrLimit, http.StatusTooManyRequests, "limit"},
	{ErrBadRequest, http.StatusBadRequest, "bad_request"},
	{errClosed, http.StatusServiceUnavailable, "closed"},
	{context.Canceled, http.StatusServiceUnavailable, "closed"}, // nobody reads it
}

func statusOf(err error) (int, string) {
	for _, w := range wireErrors {
		if errors.Is(err, w.err) {
			return w.status, w.code
		}
	}
	return http.StatusInternalServerError, "internal"
}

// remoteError carries the hub's own words and still answers errors.Is.
type remoteError struct {
	text string
	is   error
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.is }

// errorOf makes an error of a reply. Those of a hub that is away wrap errAway.
func errorOf(status int, body []byte) error {
	var e errorBody
	if json.Unmarshal(body, &e) != nil || e.Code == "" {
		if status >= 500 {
			return fmt.Errorf("%w: HTTP status %d", errAway, status)
		}
		return fmt.Errorf("%w: HTTP status %d: no checkpoint coordinator answers here "+
			"(another service on this port?)", ErrBadRequest, status)
	}
	if e.Code == "closed" {
		return fmt.Errorf("%w: %s", errAway, e.Error)
	}
	for _, w := range wireErrors {
		if w.code == e.Code {
			return &remoteError{e.Error, w.err}
		}
	}
	return errors.New(e.Error)
}

// decode reads exactly one JSON value without unknown fields.
func decode(data []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("%w: %w", ErrBadRequest, err)
	}
	if _, err := d.Token(); err != io.EOF {
		return fmt.Errorf("%w: more than one JSON value", ErrBadRequest)
	}
	return nil
}
