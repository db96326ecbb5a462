package coordinator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"dlrover-run/internal/text"
)

// bodyTime is how long a request may take to arrive.
const bodyTime = 30 * time.Second

// Handler serves the hub under /v1/runs/{run}/checkpoints. It does not check tokens: the caller does.
func (h *Hub) Handler() http.Handler {
	const base = "/v1/runs/{run}/checkpoints"
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+base+"/reports", h.serve(h.reports))
	mux.HandleFunc("POST "+base+"/agree", h.serve(h.agree))
	mux.HandleFunc("POST "+base+"/speaks", h.serve(h.announce))
	mux.HandleFunc("POST "+base+"/peers", h.serve(h.peers))
	mux.HandleFunc("POST "+base+"/ages", h.serve(h.ages))
	mux.HandleFunc("GET "+base, h.serve(h.describe))
	mux.HandleFunc("GET "+base+"/{$}", h.serve(h.describe))
	return mux
}

// serve reads the body and turns the value or error of f into JSON.
func (h *Hub) serve(f func(ctx context.Context, run string, body []byte) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set(termHeader, h.term)
		var v any
		run, err := runName(req)
		var body []byte
		if err == nil {
			body, err = readBody(w, req)
		}
		if err == nil {
			v, err = f(req.Context(), run, body)
		}
		switch {
		case errors.Is(err, errPending):
			w.WriteHeader(http.StatusNoContent)
		case err != nil:
			wireErrors.Write(w, err)
		default:
			writeJSON(w, v)
		}
	}
}

// readBody takes no more than maxBody and bodyTime. The deadline must not be left: it would end the request while it
// is held. Not every connection has deadlines; then the server's own limits hold.
func readBody(w http.ResponseWriter, req *http.Request) ([]byte, error) {
	conn := http.NewResponseController(w)
	_ = conn.SetReadDeadline(time.Now().Add(bodyTime))
	data, err := io.ReadAll(http.MaxBytesReader(w, req.Body, maxBody))
	_ = conn.SetReadDeadline(time.Time{})
	if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
		return nil, fmt.Errorf("%w: the request has more than %d MiB", ErrLimit, maxBody>>20)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: read the request: %w", errBadRequest, err)
	}
	return data, nil
}

// encoded is JSON already.
type encoded []byte

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	if body, ok := v.(encoded); ok {
		_, _ = w.Write(body)
		return
	}
	_ = json.NewEncoder(w).Encode(v) // the peer may be gone; it asks again
}

// maxRunName bounds a run id, which is any text that acts on no terminal.
const maxRunName = 256

func runName(req *http.Request) (string, error) {
	name := req.PathValue("run")
	if name == "" || name == "." || name == ".." || len(name) > maxRunName || !text.Printable(name) {
		return "", fmt.Errorf("%w: run id %.40q: need UTF-8 without control characters and without marks of "+
			"the direction of writing, 1 to %d bytes, and neither \".\" nor \"..\" alone", errBadRequest, name, maxRunName)
	}
	return name, nil
}

// open decodes the body and returns the run that it is for. A refused request creates no run.
func open[B any](h *Hub, run string, data []byte, event func(B) event) (r *run, body B, err error) {
	if err = decode(data, &body); err == nil {
		err = event(body).check()
	}
	if err == nil {
		r, err = h.run(run)
	}
	return r, body, err
}

func (h *Hub) reports(ctx context.Context, run string, body []byte) (any, error) {
	r, b, err := open(h, run, body, func(b reportBody) event { return reportEvent{b.Report} })
	switch {
	case err != nil:
		return nil, err
	case b.NoWait:
		return reportReply{}, r.apply(reportEvent{b.Report})
	}
	es, err := r.post(ctx, b.Report)
	return reportReply{es}, err
}

func (h *Hub) agree(ctx context.Context, run string, body []byte) (any, error) {
	r, b, err := open(h, run, body, func(b agreeBody) event { return b.agreeEvent })
	if err != nil {
		return nil, err
	}
	h.attend(ctx, r, seat{roundAndEpoch(b.Key)[0], b.Node})
	if b.NoWait {
		return agreeAnswer{}, r.apply(b.agreeEvent)
	}
	return r.agree(ctx, b.agreeEvent)
}

func (h *Hub) announce(_ context.Context, run string, body []byte) (any, error) {
	r, b, err := open(h, run, body, func(b Participation) event { return b })
	if err != nil {
		return nil, err
	}
	return struct{}{}, r.apply(b)
}

func (h *Hub) peers(ctx context.Context, run string, body []byte) (any, error) {
	r, b, err := open(h, run, body, func(b peersBody) event { return b.peersEvent })
	if err != nil {
		return nil, err
	}
	if host, _, err := net.SplitHostPort(b.Self.Addr); err == nil && b.Self.Switch == "" {
		b.Self.Switch = h.switchOf(host)
	}
	if b.NoWait {
		return peersReply{}, r.apply(b.peersEvent)
	}
	return r.peers(ctx, b.peersEvent)
}

func (h *Hub) ages(ctx context.Context, run string, body []byte) (any, error) {
	r, b, err := open(h, run, body, func(b agesBody) event { return b })
	if err != nil {
		return nil, err
	}
	h.attend(ctx, r, seat{b.Of, b.Node})
	return struct{}{}, r.apply(b)
}

func (h *Hub) describe(_ context.Context, run string, _ []byte) (any, error) {
	return h.Summary(run), nil
}
