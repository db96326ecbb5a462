package coordinator

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/internal/httperr"
)

// termHeader of a reply names the Hub. When it changes, a client repeats the messages that the new Hub cannot know.
const termHeader = "Checkpoint-Term"

// The bodies of requests and replies. NoWait: take it in and answer at once.
type (
	reportBody struct {
		Report
		NoWait bool `json:"note,omitempty"`
	}
	agreeBody struct {
		agreeEvent
		NoWait bool `json:"note,omitempty"`
	}
	peersBody struct {
		peersEvent
		NoWait bool `json:"note,omitempty"`
	}
	agesBody = agesEvent

	reportReply struct {
		Entries []commit.Entry `json:"entries,omitempty"`
	}
	peersReply struct {
		Peers []Peer `json:"peers"`
	}
)

// wireErrors maps the errors of a Coordinator to a status and a stable code.
var wireErrors = httperr.Table{
	{ErrAborted, http.StatusConflict, "aborted"},
	{ErrDecided, http.StatusConflict, "decided"},
	{ErrStalled, http.StatusConflict, "stalled"},
	{ErrCommitted, http.StatusConflict, "committed"},
	{ErrLimit, http.StatusTooManyRequests, "limit"},
	{errBadRequest, http.StatusBadRequest, "bad_request"},
	{errClosed, http.StatusServiceUnavailable, "closed"},
	{context.Canceled, http.StatusServiceUnavailable, "closed"}, // the client has gone
}

// errorOf makes an error of a reply. Errors of a hub that is away wrap errAway.
func errorOf(status int, body []byte) error {
	e, ok := httperr.Parse(body)
	switch {
	case !ok && status >= 500:
		return fmt.Errorf("%w: HTTP status %d", errAway, status)
	case !ok:
		return fmt.Errorf("%w: HTTP status %d: no checkpoint coordinator answers here "+
			"(another service on this port?)", errBadRequest, status)
	case e.Code == "standby", e.Code == "moved":
		return fmt.Errorf("%w: %s", errNotHere, e.Error)
	case e.Code == "closed":
		return fmt.Errorf("%w: %s", errAway, e.Error)
	}
	return wireErrors.Received(e)
}

// decode reads exactly one JSON value. Fields that only newer daemons know are left out.
func decode(data []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("%w: %w", errBadRequest, err)
	}
	if _, err := d.Token(); err != io.EOF {
		return fmt.Errorf("%w: more than one JSON value", errBadRequest)
	}
	return nil
}
