package marks

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"dlrover-run/internal/app/nodehealth"
	"dlrover-run/internal/httperr"
	"dlrover-run/internal/text"
)

// Change is the body of POST /v1/nodes/{node}.
type Change struct {
	Action string `json:"action"` // "mark" or "clear"
	Reason string `json:"reason"`
	By     string `json:"by,omitempty"` // the author
}

// Changed is its answer.
type Changed struct {
	// Known is false if there was nothing to clear.
	Known bool `json:"known"`
}

var (
	errBadRequest = errors.New("bad request")
	errNotFound   = fmt.Errorf("%w: not found", errBadRequest)
	errMethod     = fmt.Errorf("%w: wrong method", errBadRequest)
	errNotKept    = errors.New("the change counts, but is not kept yet, and ends with this daemon until it is")
)

var wireErrors = httperr.Table{
	{Err: errMethod, Status: http.StatusMethodNotAllowed, Code: "method_not_allowed"},
	{Err: errNotFound, Status: http.StatusNotFound, Code: "not_found"},
	{Err: errBadRequest, Status: http.StatusBadRequest, Code: "bad_request"},
	{Err: errNotKept, Status: http.StatusServiceUnavailable, Code: "not_kept"},
}

const (
	maxBody     = 16 << 10
	bodyTimeout = 10 * time.Second
)

// Handler serves /v1/nodes: GET returns the known nodes, and POST /v1/nodes/{node} takes a Change.
func (mgr *Manager) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/nodes", answer(func(*http.Request) (any, error) { return mgr.List(), nil }))
	mux.HandleFunc("POST /v1/nodes/{node}", answer(mgr.serveChange))
	wrong := func(need string) http.HandlerFunc {
		return answer(func(req *http.Request) (any, error) {
			return nil, fmt.Errorf("%w: %s %s: need %s", errMethod, req.Method, req.URL.Path, need)
		})
	}
	mux.HandleFunc("/v1/nodes", wrong(http.MethodGet))
	mux.HandleFunc("/v1/nodes/{node}", wrong(http.MethodPost))
	mux.HandleFunc("/", answer(func(req *http.Request) (any, error) {
		return nil, fmt.Errorf("%w: %s %s", errNotFound, req.Method, req.URL.Path)
	}))
	return mux
}

func answer(f func(*http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTimeout))
		req.Body = http.MaxBytesReader(w, req.Body, maxBody)
		v, err := f(req)
		if err != nil {
			wireErrors.Write(w, err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v) // the peer may be gone; it asks again
	}
}

func (mgr *Manager) serveChange(req *http.Request) (any, error) {
	var c Change
	if err := json.NewDecoder(req.Body).Decode(&c); err != nil {
		return nil, fmt.Errorf("%w: the body is no change of a node: %w", errBadRequest, err)
	}
	node := req.PathValue("node")
	if err := checkChange(node, c); err != nil {
		return nil, fmt.Errorf("%w: %w", errBadRequest, err)
	}
	if c.Action == "mark" {
		return Changed{Known: true}, kept(mgr.Mark(req.Context(), node, c.By, c.Reason))
	}
	known, err := mgr.Clear(req.Context(), node, c.By, c.Reason)
	return Changed{Known: known}, kept(err)
}

// checkChange reports an invalid change.
func checkChange(node string, c Change) error {
	for _, s := range []string{c.Reason, c.By} {
		if len(s) > nodehealth.MaxText/2 || !text.Printable(s) {
			return fmt.Errorf("reason or by %.100q: %s, at most %d bytes", s, text.PrintableRule, nodehealth.MaxText/2)
		}
	}
	if c.Action != "mark" && c.Action != "clear" {
		return fmt.Errorf("action %.100q: need mark or clear", c.Action)
	}
	if c.Action == "mark" && c.Reason == "" {
		return errors.New("a mark needs a reason: others will ask why")
	}
	return nodehealth.CheckName(node)
}

func kept(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", errNotKept, err)
}

// Ready serves GET /readyz: 200 if what is decided can be kept, else 503 with the reason. It needs no token.
func Ready(ready func() error) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, "not ready: "+err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ready")
	}
}
