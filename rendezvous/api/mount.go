package api

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
)

// Answer makes a mount of a function: GET is answered with its value as JSON, or with its error as the API does.
// ErrNothingNew is an empty answer.
func Answer(f func(*http.Request) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		limitBody(w)
		if req.Method != http.MethodGet && req.Method != http.MethodHead {
			refuseMethod(w, req, http.MethodGet)
			return
		}
		v, err := f(req)
		writeAnswer(w, v, err)
	})
}

// Take makes a mount of a function that receives JSON bodies. Its error is answered as the API does.
func Take[B any](f func(run string, body B) error) http.Handler {
	return Ask(func(run string, body B) (any, error) { return struct{}{}, f(run, body) })
}

// Ask makes a mount of a function that receives JSON bodies. It answers with the value as JSON, or with the error as
// the API does.
func Ask[B any](f func(run string, body B) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		limitBody(w)
		if req.Method != http.MethodPost {
			refuseMethod(w, req, http.MethodPost)
			return
		}
		var v any
		run, body, err := decode[B](req)
		if err == nil {
			v, err = f(run, body)
		}
		writeAnswer(w, v, err)
	})
}

func refuseMethod(w http.ResponseWriter, req *http.Request, right string) {
	w.Header().Set("Allow", right)
	wireErrors.Write(w, fmt.Errorf("%w: %s %s: need %s", errMethod, req.Method, req.URL.Path, right))
}

// Call posts a value to a mount of the run, such as "checks/next", and decodes the answer. ErrNothingNew means that it
// is empty. The answer may be held back: only ctx, and a broken connection, ends the wait.
func (c *Client) Call(ctx context.Context, run, name string, in, out any) error {
	data, err := json.Marshal(in)
	if err != nil {
		return fmt.Errorf("%s of run %q: %w", name, run, err)
	}
	return c.do(patiently(ctx), 0, http.MethodPost, "/v1/runs/"+url.PathEscape(run)+"/"+name, false, data, out)
}

// Global sends a request to a path below /v1 that belongs to no run, such as "nodes", and decodes the answer. With a
// body other than nil it is a POST.
func (c *Client) Global(ctx context.Context, path string, body, into any) error {
	if body == nil {
		return c.get(ctx, requestTimeout, "/v1/"+path, into)
	}
	data, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return c.do(ctx, requestTimeout, http.MethodPost, "/v1/"+path, false, data, into)
}

// Exchange posts a body to a mount of the run, or sends a GET if there is none; encoding is the body's
// Content-Encoding. The answer is unchanged, whatever its status, but a Content-Encoding of gzip is decoded; the caller
// closes and bounds it. Only ctx, and a broken connection, ends the wait.
func (c *Client) Exchange(ctx context.Context, run, name, encoding string, body []byte) (*http.Response, error) {
	method := http.MethodPost
	if body == nil {
		method = http.MethodGet
	}
	req, err := c.request(patiently(ctx), method, "/v1/runs/"+url.PathEscape(run)+"/"+name, body)
	if err != nil {
		return nil, err
	}
	if encoding != "" {
		req.Header.Set("Content-Encoding", encoding)
	}
	if body == nil {
		req.Header.Set("Accept-Encoding", "gzip")
	}
	resp, err := c.tokens.Do(c.hc, req)
	if err != nil || resp.Header.Get("Content-Encoding") != "gzip" {
		return resp, err
	}
	plain, err := gzip.NewReader(resp.Body)
	if err != nil {
		_ = resp.Body.Close()
		return nil, fmt.Errorf("read the daemon's reply: %w", err)
	}
	resp.Body = unzipped{plain, resp.Body}
	return resp, nil
}

// Open connects to a mount of the run, such as "streams/logs?tail=10", and switches to another protocol. The caller
// closes the connection, which ends a Read and a Write of it. ctx and ten seconds bound the opening alone.
func (c *Client) Open(ctx context.Context, run, name, protocol string) (io.ReadWriteCloser, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	req, err := c.request(ctx, http.MethodGet, "/v1/runs/"+url.PathEscape(run)+"/"+name, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", protocol)
	resp, err := c.tokens.Do(c.hc, req)
	if err != nil {
		return nil, err
	}
	conn, ok := resp.Body.(io.ReadWriteCloser)
	if resp.StatusCode == http.StatusSwitchingProtocols && ok {
		return conn, nil
	}
	defer resp.Body.Close()
	if err := readReply(resp, nil); err != nil && !errors.Is(err, ErrNothingNew) {
		return nil, err
	}
	return nil, fmt.Errorf("%w: HTTP %s instead of the protocol %s", ErrBadRequest, resp.Status, protocol)
}

// unzipped is the body of an answer that came compressed.
type unzipped struct {
	io.Reader
	io.Closer
}

// Mounted sends a GET to a mount of the run, and decodes the answer. ErrNothingNew means that it is empty.
func (c *Client) Mounted(ctx context.Context, run, name string, into any) error {
	return c.get(ctx, requestTimeout, "/v1/runs/"+url.PathEscape(run)+"/"+name, into)
}
