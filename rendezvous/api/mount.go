package api

import (
	"context"
	"encoding/json"
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

// Call posts a value to what is mounted under a name of the run, such as "checks/next", and decodes the answer.
// ErrNothingNew: it is empty. The answer may be held back: only ctx, and a connection that breaks, ends the wait.
func (c *Client) Call(ctx context.Context, run, name string, in, out any) error {
	data, err := json.Marshal(in)
	if err != nil {
		return fmt.Errorf("%s of run %q: %w", name, run, err)
	}
	return c.do(ctx, 0, http.MethodPost, "/v1/runs/"+url.PathEscape(run)+"/"+name, false, data, out)
}

// Mounted asks what is mounted under a name of the run, and decodes the answer. ErrNothingNew: it is empty.
func (c *Client) Mounted(ctx context.Context, run, name string, into any) error {
	return c.get(ctx, requestTimeout, "/v1/runs/"+url.PathEscape(run)+"/"+name, into)
}
