package serve

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"time"

	"dlrover-run/hang"
)

const (
	// bodyTime is how long a request may take to arrive, and waitTime how long one waits for its turn.
	bodyTime = 20 * time.Second
	waitTime = 20 * time.Second
	// largeBody is the size, in bytes, from which at most maxReading bodies are read at a time. Those without evidence
	// are smaller.
	largeBody  = 2 << 10
	maxReading = 64
	maxSending = 2
)

// Handler serves the hub: POST /v1/runs/{run}/hang/report?node=ID is Post, GET /v1/runs/{run}/hang the Picture
// without evidence, GET .../hang/evidence with it, and POST .../hang/stacks is Collect. It does not look at tokens,
// nor at the run's name: the server that mounts it does.
func (h *Hub) Handler() http.Handler {
	const base = "/v1/runs/{run}/hang"
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+base+"/report", h.serveReport)
	mux.HandleFunc("POST "+base+"/stacks", h.serveCollect)
	mux.HandleFunc("GET "+base+"/evidence", h.serveEvidence)
	mux.HandleFunc("GET "+base, h.servePicture)
	mux.HandleFunc("GET "+base+"/{$}", h.servePicture)
	return mux
}

// serveReport identifies the node before anything is read.
func (h *Hub) serveReport(w http.ResponseWriter, req *http.Request) {
	run, id := req.PathValue("run"), req.URL.Query().Get("node")
	ask, err := h.receive(w, req, run, id)
	switch {
	case err != nil:
		writeError(w, err)
	case ask.Seq == 0:
		w.WriteHeader(http.StatusNoContent)
	default:
		writeJSON(w, ask)
	}
}

func (h *Hub) receive(w http.ResponseWriter, req *http.Request, run, id string) (hang.Ask, error) {
	conn := http.NewResponseController(w)
	_ = conn.SetReadDeadline(time.Now().Add(bodyTime + waitTime))
	if _, err := h.cfg.Seat(run, id); err != nil {
		return hang.Ask{}, notMember(run, err)
	}
	p, err := h.read(w, req, run+"\x00"+id)
	if err != nil {
		return hang.Ask{}, err
	}
	defer p.spent()
	return h.take(run, id, p)
}

// read takes a body of at most maxBody. Large ones are read a few at a time, one of each launcher, and fewer are
// unpacked; until then they wait in the kernel.
func (h *Hub) read(w http.ResponseWriter, req *http.Request, who string) (*parcel, error) {
	large := req.ContentLength < 0 || req.ContentLength > largeBody
	if large {
		if _, another := h.senders.LoadOrStore(who, nil); another {
			return nil, fmt.Errorf("%w: another report of this launcher is being read", errBusy)
		}
		defer h.senders.Delete(who)
		if err := enter(req, h.reading); err != nil {
			return nil, err
		}
		defer func() { <-h.reading }()
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime))
	body, err := readAll(http.MaxBytesReader(w, req.Body, maxBody), req.ContentLength)
	if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
		return nil, fmt.Errorf("%w: the report has more than %d KiB", ErrBadRequest, maxBody>>10)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: read the report: %w", ErrBadRequest, err)
	}
	if large {
		if err := enter(req, h.decoding); err != nil {
			return nil, err
		}
		defer func() { <-h.decoding }()
	}
	return decode(body, req.Header.Get("Content-Encoding"))
}

// enter waits for a place.
func enter(req *http.Request, places chan struct{}) error {
	select {
	case places <- struct{}{}:
		return nil
	default:
	}
	expired := time.NewTimer(waitTime)
	defer expired.Stop()
	select {
	case places <- struct{}{}:
		return nil
	case <-expired.C:
		return errBusy
	case <-req.Context().Done():
		return req.Context().Err()
	}
}

// readAll reads to the end. size is how much there probably is, -1 for unknown.
func readAll(r io.Reader, size int64) ([]byte, error) {
	var b bytes.Buffer
	if size > 0 && size <= maxBody {
		b.Grow(int(size) + bytes.MinRead) // so that it does not grow again
	}
	_, err := b.ReadFrom(r)
	return b.Bytes(), err
}

func (h *Hub) serveCollect(w http.ResponseWriter, req *http.Request) {
	noBody(w)
	seq, err := h.Collect(req.Context(), req.PathValue("run"))
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, collected{seq})
}

// collected is the answer to Collect.
type collected struct {
	Seq uint64 `json:"seq"`
}

func (h *Hub) servePicture(w http.ResponseWriter, req *http.Request) {
	noBody(w)
	p, err := h.Picture(req.Context(), req.PathValue("run"), false)
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, p)
}

// noBody bounds how long an unexpected body is read.
func noBody(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime))
}

// serveEvidence sends a Picture as lines of JSON: the picture without evidence, and then evidence with the rows of the
// tables that are new with it.
func (h *Hub) serveEvidence(w http.ResponseWriter, req *http.Request) {
	noBody(w)
	if err := enter(req, h.sending); err != nil {
		writeError(w, err)
		return
	}
	defer func() { <-h.sending }()
	p, all, err := h.pictures(req.PathValue("run"), true)
	if err != nil {
		writeError(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Content-Encoding", "gzip")
	z, _ := gzip.NewWriterLevel(w, gzip.BestSpeed)
	if sendPicture(json.NewEncoder(z), p, all, func() { slowly(w) }) == nil {
		_ = z.Close()
	}
}

// slowly gives the peer some time for each part of a long answer.
func slowly(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(bodyTime))
}

// perLine is how many workers are on one line.
const perLine = 64

// pictureLine is one line of a Picture with evidence: the first, or any other.
type pictureLine struct {
	Picture *hang.Picture `json:"picture,omitempty"`
	tables
	Evidence []wireEvidence `json:"evidence,omitempty"`
	End      bool           `json:"end,omitempty"` // nothing is missing
}

func sendPicture(enc *json.Encoder, p hang.Picture, all iter.Seq[hang.Evidence], before func()) error {
	before()
	if err := enc.Encode(pictureLine{Picture: &p}); err != nil {
		return err
	}
	pack := newPacker()
	for es := range chunks(all, perLine) {
		line, err := pack.pack(es)
		if err != nil {
			return err
		}
		before()
		if err := enc.Encode(pictureLine{tables: pack.tables, Evidence: line}); err != nil {
			return err
		}
		pack.sent()
	}
	return enc.Encode(pictureLine{End: true})
}

// chunks are slices of so many elements; the next one takes the place of the last.
func chunks[T any](all iter.Seq[T], most int) iter.Seq[[]T] {
	return func(yield func([]T) bool) {
		var some []T
		for v := range all {
			if some = append(some, v); len(some) == most {
				if !yield(some) {
					return
				}
				some = some[:0]
			}
		}
		if len(some) > 0 {
			yield(some)
		}
	}
}

func writeError(w http.ResponseWriter, err error) { wireErrors().Write(w, err) }

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the peer may be gone; it asks again
}
