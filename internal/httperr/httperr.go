// Package httperr sends errors over HTTP, as a status, a stable code and the sender's words, so that errors.Is finds
// them on the other side. Every library may import it; it imports none of them.
package httperr

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
)

// Body is the JSON of an error.
type Body struct {
	Code  string `json:"code"`
	Error string `json:"error"`
	// Where is the HOST:PORT that serves instead; "" for most errors.
	Where string `json:"where,omitempty"`
}

// Elsewhere is an error whose receiver finds the service at another address.
type Elsewhere interface{ Where() string }

// Table lists the errors that the receiver handles. The first row that matches the error, or the code, counts. A Code
// is not empty and never changes, because programs of other versions know it.
type Table []struct {
	Err    error
	Status int
	Code   string
}

// Write answers a request with err; an error that is not in the table is "internal", with the status 500.
func (t Table) Write(w http.ResponseWriter, err error) {
	status, body := http.StatusInternalServerError, Body{Code: "internal", Error: err.Error()}
	for _, row := range t {
		if errors.Is(err, row.Err) {
			status, body.Code = row.Status, row.Code
			break
		}
	}
	if e, ok := errors.AsType[interface {
		error
		Elsewhere
	}](err); ok {
		body.Where = e.Where()
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // the peer may be gone; it asks again
}

// Parse reads the output of Write, the words on one line. It reports false for a reply of some other service.
func Parse(data []byte) (Body, bool) {
	var b Body
	err := json.Unmarshal(data, &b)
	b.Error = strings.NewReplacer("\r", " ", "\n", " ").Replace(b.Error)
	return b, err == nil && b.Code != ""
}

// Received is the error in b: that of the table with the sender's words, or the words alone.
func (t Table) Received(b Body) error {
	for _, row := range t {
		if row.Code == b.Code {
			return &received{b.Error, row.Err}
		}
	}
	return errors.New(b.Error)
}

type received struct {
	text string
	is   error
}

func (e *received) Error() string { return e.text }
func (e *received) Unwrap() error { return e.is }
