package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"dlrover-run/internal/longpoll"
	"dlrover-run/netcheck"
)

const (
	// bodyTime is how long a request may take to arrive.
	bodyTime = 30 * time.Second
	// largeBody is the size, in bytes, from which at most maxLarge requests are read at a time. All others have about one
	// kilobyte.
	largeBody = 16 << 10
	maxLarge  = 64
)

// Handler serves the hub: POST /v1/runs/{run}/checks/next is Next, and GET /v1/runs/{run}/checks the Picture. It does
// not check tokens or the run's name: the server that mounts it does.
func (h *Hub) Handler() http.Handler {
	const base = "/v1/runs/{run}/checks"
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+base+"/next", h.serveNext)
	mux.HandleFunc("GET "+base, h.servePicture)
	mux.HandleFunc("GET "+base+"/{$}", h.servePicture)
	return mux
}

func (h *Hub) serveNext(w http.ResponseWriter, req *http.Request) {
	q, err := h.read(w, req)
	if err != nil {
		writeError(w, err)
		return
	}
	run := req.PathValue("run")
	if h.expects(run, q.ID) { // no other client may hold the connection that answers others
		if c := h.pool.Take(w, req); c != nil {
			h.hold(c, run, q)
			return
		}
	}
	a, err := h.Next(req.Context(), run, q)
	write(w, a, err)
}

// expects reports whether the node has been told to be checked.
func (h *Hub) expects(run, id string) bool {
	r := h.runs.Get(run)
	if r == nil {
		return false
	}
	r.Lock()
	defer r.Unlock()
	return r.nodes[id] != nil
}

// hold answers a request on a connection that is not net/http's any more: now, when there is news, or after hold.
func (h *Hub) hold(c *longpoll.Conn, run string, q Request) {
	w := &waiter{seq: q.Seq, answer: func(a netcheck.Assignment, err error) {
		c.Later(func(w http.ResponseWriter) bool { write(w, a, err); return true })
	}}
	r, err := h.runs.Find(run, notTold)
	if err != nil {
		c.Hold(func() {})
		w.answer(netcheck.Assignment{}, err)
		return
	}
	c.Hold(func() { r.drop(q.ID, w, context.Canceled) })
	if a, err, done := r.take(q, w); done {
		w.answer(a, err)
	}
}

func (h *Hub) servePicture(w http.ResponseWriter, req *http.Request) {
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime)) // of an unwanted body
	p, err := h.Picture(req.PathValue("run"))
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, p)
}

// read takes no more than maxBody and bodyTime. The deadline must not be left: it would end the request while it is
// held. Not every connection has deadlines; then the server's own limits hold.
func (h *Hub) read(w http.ResponseWriter, req *http.Request) (Request, error) {
	if req.ContentLength < 0 || req.ContentLength > largeBody {
		select {
		case h.large <- struct{}{}:
			defer func() { <-h.large }()
		default:
			return Request{}, fmt.Errorf("%w: %d", errBusy, maxLarge)
		}
	}
	conn := http.NewResponseController(w)
	_ = conn.SetReadDeadline(time.Now().Add(bodyTime))
	var q Request
	var bad error
	err := longpoll.ReadBody(http.MaxBytesReader(w, req.Body, maxBody), func(body []byte) { q, bad = decode(body) })
	_ = conn.SetReadDeadline(time.Time{})
	if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
		return Request{}, fmt.Errorf("%w: the request has more than %d KiB", errBadRequest, maxBody>>10)
	}
	if err != nil {
		return Request{}, fmt.Errorf("%w: read the request: %w", errBadRequest, err)
	}
	return q, bad
}

type errorBody struct {
	Code  string `json:"code"`
	Error string `json:"error"`
}

// write writes an assignment, or why there is none.
func write(w http.ResponseWriter, a netcheck.Assignment, err error) {
	if errors.Is(err, errClosed) {
		w.Header().Set("Connection", "close")
	}
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, a)
}

func writeError(w http.ResponseWriter, err error) {
	status, code := statusOf(err)
	writeJSON(w, status, errorBody{Code: code, Error: err.Error()})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the peer may be gone; it asks again
}
