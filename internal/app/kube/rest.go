package kube

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/openfile"
	"dlrover-run/internal/plainhttp"
	"dlrover-run/internal/retry"
)

const (
	requestTimeout = 10 * time.Second
	maxResponse    = 4 << 20 // bytes
	maxMessage     = 512     // bytes of an answer that an error quotes
	attempts       = 5       // of one request
	firstPause     = 200 * time.Millisecond
	longestPause   = 30 * time.Second
)

// Classes of failed requests, for errors.Is.
var (
	ErrForbidden    = errors.New("not allowed")
	ErrUnauthorized = errors.New("the API server does not accept the service account's token")
	ErrNotFound     = errors.New("not found")
	errConflict     = errors.New("conflict")
	errGone         = errors.New("expired")
)

var byCode = map[int]error{
	http.StatusForbidden: ErrForbidden, http.StatusUnauthorized: ErrUnauthorized, http.StatusNotFound: ErrNotFound,
	http.StatusConflict: errConflict, http.StatusGone: errGone,
}

// statusError is an answer other than 2xx.
type statusError struct {
	right   right
	code    int
	message string        // the server's
	after   time.Duration // Retry-After, 0 without
}

func (e *statusError) Error() string {
	if e.Unwrap() == ErrForbidden {
		return fmt.Sprintf("kube: the service account is not allowed to %s: apply docs/kubernetes/%s, or choose a "+
			"lower level; the API server says: %s", e.right, e.right.manifest(), e.message)
	}
	return fmt.Sprintf("kube: %s: %d %s: %s", e.right, e.code, http.StatusText(e.code), e.message)
}

// Unwrap tells a missing right from a refusal by a webhook or a policy of the cluster, which may have the same code.
func (e *statusError) Unwrap() error {
	if e.code == http.StatusForbidden && (strings.Contains(e.message, "denied the request") ||
		strings.Contains(e.message, "denied request:")) {
		return nil
	}
	return byCode[e.code]
}

// right is a permission that a role has to grant, such as patch nodes/status.
type right struct{ verb, resource string }

func (r right) String() string { return r.verb + " " + r.resource }

// manifest is the file that gives the right.
func (r right) manifest() string {
	switch r {
	case createEvents:
		return "rbac-event.yaml"
	case patchStatus:
		return "rbac-condition.yaml"
	case patchNodes:
		return "rbac-taint.yaml"
	case patchPods:
		return "rbac-avoid.yaml"
	case getPods:
		return "rbac-pods.yaml"
	case listFaults, createFaults, patchFaults, deleteFaults:
		return "rbac-external-fault.yaml"
	}
	return "rbac-condition.yaml or rbac-taint.yaml"
}

// request is one request to the API server; it is safe to send it twice.
type request struct {
	right        right
	method, path string
	query        url.Values
	contentType  string // default: application/json
	accept       string // default: application/json
	body         any
}

// rest sends requests, in the name of the service account.
type rest struct {
	server string
	http   *http.Client
	token  *tokenFile
	cfg    Config
}

func newRest(cfg Config) (*rest, error) {
	u, err := url.Parse(cfg.Server)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" || u.User != nil ||
		strings.TrimSuffix(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, errors.New("kube: the address of the API server has to be https://HOST:PORT and nothing more")
	}
	roots, err := readRoots(cfg.CAFile)
	if err != nil {
		return nil, err
	}
	// kubectl honours HTTPS_PROXY, this does not: the API server is in the pod's own cluster. The variables of a training
	// image rarely except the cluster's addresses, and would send requests out of it.
	return newRestOver(cfg, "https://"+u.Host, plainhttp.New(func(t *http.Transport) {
		t.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
		t.TLSHandshakeTimeout, t.DisableCompression = requestTimeout, false
	}))
}

func newRestOver(cfg Config, server string, hc *http.Client) (*rest, error) {
	r := &rest{server: server, token: &tokenFile{path: cfg.TokenFile}, cfg: cfg, http: hc}
	_, err := r.token.get()
	return r, err
}

// maxRoots bounds the file of certificates, in bytes.
const maxRoots = 4 << 20

// readRoots returns nil, which are the system's, without a file.
func readRoots(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	text, err := openfile.ReadLinked(file, maxRoots)
	if err != nil {
		return nil, fmt.Errorf("kube: certificates of the API server: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("kube: %s holds no certificate as PEM", file)
	}
	return roots, nil
}

// do retries the request until it has a final answer, and decodes that into into, if it is not nil.
func (r *rest) do(ctx context.Context, q request, into any) error {
	body, err := encode(q.body)
	if err != nil {
		return err
	}
	pause, refused := firstPause, false
	for try := 1; ; try++ {
		err := r.try(ctx, q, body, into)
		if errors.Is(err, ErrUnauthorized) && !refused {
			refused = true
			r.token.forget()
			continue
		}
		if !passing(err) {
			return err
		}
		if try >= attempts {
			return fmt.Errorf("kube: given up after %d tries: %w", try, err)
		}
		r.cfg.Log.Debug("the API server is asked again", "what", q.right.String(), "err", err)
		if !sleep(ctx, cmp.Or(retryAfter(err), pause/2+rand.N(pause))) {
			return noTime(ctx, err)
		}
		pause *= 2
	}
}

func encode(body any) ([]byte, error) {
	if body == nil {
		return nil, nil
	}
	text, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("kube: request: %w", err)
	}
	return text, nil
}

// netError is a request without an answer.
type netError struct{ error }

func (e *netError) Unwrap() error { return e.error }

// passing reports whether a repetition may help.
func passing(err error) bool {
	if s, ok := errors.AsType[*statusError](err); ok {
		return s.code == http.StatusTooManyRequests || s.code >= 500
	}
	_, network := errors.AsType[*netError](err)
	_, stranger := errors.AsType[*tls.CertificateVerificationError](err)
	return network && !stranger
}

func retryAfter(err error) time.Duration {
	if s, ok := errors.AsType[*statusError](err); ok {
		return s.after
	}
	return 0
}

// noTime is the end of ctx, or its deadline before the next try, with the last error.
func noTime(ctx context.Context, last error) error {
	cause := context.Cause(ctx)
	if cause == nil {
		cause = context.DeadlineExceeded
	}
	return fmt.Errorf("kube: no time is left for another try: %w: %w", cause, last)
}

// sleep reports false if ctx has ended, or would end meanwhile.
func sleep(ctx context.Context, d time.Duration) bool {
	if end, ok := ctx.Deadline(); ok && time.Until(end) <= d {
		return false
	}
	return retry.Sleep(ctx, d)
}

func (r *rest) try(ctx context.Context, q request, body []byte, into any) error {
	token, err := r.token.get()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	req, err := r.request(ctx, q, token, body)
	if err != nil {
		return err
	}
	resp, text, err := r.send(req)
	switch {
	case err != nil:
		return &netError{fmt.Errorf("kube: %s: %w", q.right, err)}
	case len(text) > maxResponse:
		return fmt.Errorf("kube: %s: the answer is longer than %d bytes", q.right, maxResponse)
	case resp.StatusCode/100 != 2:
		return newStatusError(q.right, resp, text, token)
	case into == nil:
		return nil
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("kube: %s: the answer is not what an API server sends: %w", q.right, err)
	}
	return nil
}

// send returns at most one byte more than maxResponse of the answer.
func (r *rest) send(req *http.Request) (*http.Response, []byte, error) {
	resp, err := r.http.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse+1))
	return resp, text, err
}

func (r *rest) request(ctx context.Context, q request, token string, body []byte) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, q.method, r.server+q.path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("kube: %s: %w", q.right, err)
	}
	req.URL.RawQuery = q.query.Encode()
	req.Header.Set("Authorization", "Bearer "+token)
	req.Header.Set("User-Agent", "dlrover-master")
	req.Header.Set("Accept", cmp.Or(q.accept, "application/json"))
	if body != nil {
		req.Header.Set("Content-Type", cmp.Or(q.contentType, "application/json"))
	}
	return req, nil
}

func newStatusError(right right, resp *http.Response, text []byte, token string) error {
	var status struct{ Message string }
	if json.Unmarshal(text, &status) != nil || status.Message == "" {
		status.Message = string(text)
	}
	message := clean(strings.ReplaceAll(status.Message, token, "(token)"), maxMessage)
	e := &statusError{right: right, code: resp.StatusCode, message: message}
	if n, err := strconv.ParseUint(resp.Header.Get("Retry-After"), 10, 16); err == nil {
		e.after = min(time.Duration(n)*time.Second, longestPause)
	}
	return e
}
