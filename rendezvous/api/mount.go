package api

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
)

// Answer makes a mount of a function: GET is answered with its value as JSON, or with its error as the API does.
// ErrNothingNew is an empty answer.
func Answer(f func(*http.Request) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		limitBody(w)
		if req.Method != http.MethodGet && req.Method != http.MethodHead {
			w.Header().Set("Allow", http.MethodGet)
			wireErrors.Write(w, fmt.Errorf("%w: %s %s: need GET", errMethod, req.Method, req.URL.Path))
			return
		}
		v, err := f(req)
		writeAnswer(w, v, err)
	})
}

// Mounted asks what is mounted under a name of the run, and decodes the answer. ErrNothingNew: it is empty.
func (c *Client) Mounted(ctx context.Context, run, name string, into any) error {
	return c.get(ctx, requestTimeout, "/v1/runs/"+url.PathEscape(run)+"/"+name, into)
}
