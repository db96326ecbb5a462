package pyproto

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"dlrover-run/internal/pickle"
)

// Caller is the sender of a request, by its own account. Backends get it without the JobUID, which Admit has had.
type Caller struct {
	NodeID   int
	NodeType string
	JobUID   string // "" if the sender has none
}

// Answer is the answer of a Backend: a message in the dialect of the request, or nothing.
type Answer struct {
	Message *Message
	// Encoded replaces Message by an output of Encode that many callers share. It is read-only.
	Encoded []byte
}

// Backend answers the requests of agents. Its methods are called by many goroutines.
type Backend interface {
	// Admit returns whether a caller is admitted, by the job_uid of its request, "" if it names none. Nothing else of the
	// request has been read. A caller is known if that has shown that it belongs to the job. The error is ErrJobUID.
	Admit(ctx context.Context, uid string) (known bool, err error)
	Get(ctx context.Context, from Caller, m *Message) (Answer, error)
	// Report returns whether the report was accepted.
	Report(ctx context.Context, from Caller, m *Message) (bool, error)
}

// ErrJobUID: the caller has not shown that it belongs to the job.
var ErrJobUID = errors.New("the job_uid is not the job's")

// bodyTimeout bounds the reading of a request, and the writing of its answer; the Backend bounds its own time.
const bodyTimeout = 30 * time.Second

// GRPCPath is below which DLRover's agents speak gRPC.
const GRPCPath = "/elastic.Master/"

// Handler serves b to agents by gRPC and by HTTP: POST /elastic.Master/{get,report} and /{get,report}. The server must
// have Protocols with HTTP1 and UnencryptedHTTP2.
func Handler(b Backend) http.Handler {
	return handler(b, newRoom(roomSize))
}

func handler(b Backend, r *room) http.Handler {
	mux := http.NewServeMux()
	for _, name := range []string{"get", "report"} {
		s := &served{b, name, r}
		mux.HandleFunc("POST "+GRPCPath+name, s.grpc)
		mux.HandleFunc("POST /"+name, s.json)
	}
	mux.HandleFunc(GRPCPath, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) })
	return mux
}

// served is one of the two methods.
type served struct {
	b    Backend
	name string
	room *room
}

// The codes of gRPC that are used here.
const (
	codeOK, codeInvalid, codeExhausted, codeUnimplemented, codeInternal, codeUnauthenticated = 0, 3, 8, 12, 13, 16
)

func codeOf(err error) int {
	switch {
	case err == nil:
		return codeOK
	case errors.Is(err, ErrJobUID):
		return codeUnauthenticated
	case errors.Is(err, errRoom), errors.Is(err, errAnswer):
		return codeExhausted
	case errors.Is(err, errPickle) || errors.Is(err, errProto):
		return codeInvalid
	}
	return codeInternal
}

func (s *served) grpc(w http.ResponseWriter, req *http.Request) {
	if req.ProtoMajor < 2 {
		http.Error(w, "gRPC needs HTTP/2", http.StatusHTTPVersionNotSupported)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "application/grpc")
	call, err := s.enter(req, req.Body)
	if err == nil {
		defer call.done()
		err = s.callGRPC(w, req, call)
	}
	h.Set(http.TrailerPrefix+"Grpc-Status", strconv.Itoa(codeOf(err)))
	if err != nil {
		text := err.Error()
		h.Set(http.TrailerPrefix+"Grpc-Message", url.PathEscape(text[:min(len(text), maxReason)]))
	}
}

// callGRPC writes an answer, or returns an error, which goes into the trailers: no window of the caller's can hold that
// up.
func (s *served) callGRPC(w http.ResponseWriter, req *http.Request, call *call) error {
	e, err := envelopeOf(w, call)
	if err != nil {
		return err
	}
	head, data, err := s.answerGRPC(req, call, e)
	if err != nil {
		return err
	}
	return writeAll(w, head, data)
}

// enter begins a call of a caller that may speak.
func (s *served) enter(req *http.Request, body io.Reader) (*call, error) {
	known, err := s.b.Admit(req.Context(), req.Header.Get(jobUID))
	if err != nil {
		return nil, err
	}
	return s.room.enter(body, known)
}

// jobUID is the header with which agents of DLRover from 0.6 on name their job.
const jobUID = "job_uid"

// maxReason is the most bytes of an error that go into a header; peers accept 8 KiB of headers.
const maxReason = 1000

// limitReading bounds the reading of a request. The function that it returns ends that: later input on a connection of
// HTTP/1.1 would end the request's context.
func limitReading(w http.ResponseWriter) (done func()) {
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Now().Add(bodyTimeout))
	return func() { _ = c.SetReadDeadline(time.Time{}) }
}

func limitWriting(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(bodyTimeout))
}

// limit passes a deadline to a stream of HTTP/2, unless its handler is done in time. The deadlines that net/http keeps
// itself cost a stream of HTTP/2 two wake-ups of the connection's goroutine for each; here only expired ones cost that.
type limit struct {
	pass  func(time.Time) error // sets a deadline
	timer *time.Timer

	mu   sync.Mutex
	over bool
}

func newLimit(pass func(time.Time) error) *limit {
	l := &limit{pass: pass}
	l.timer = time.AfterFunc(bodyTimeout, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if !l.over { // the handler is there
			_ = l.pass(time.Unix(1, 0))
		}
	})
	return l
}

// lift must be called before the handler returns.
func (l *limit) lift() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	l.timer.Stop()
}

// writeAll also waits until the caller's window has taken it all. The parts are not joined, which would be a copy.
func writeAll(w http.ResponseWriter, parts ...[]byte) error {
	c := http.NewResponseController(w)
	defer newLimit(c.SetWriteDeadline).lift()
	for _, part := range parts {
		if err := writeSlowly(w, part); err != nil {
			return err
		}
	}
	return c.Flush()
}

// writeSlowly writes through a buffer of the size of a frame: net/http keeps the last written slice for a while when a
// stream is reset, and that must not be a whole answer.
func writeSlowly(w io.Writer, data []byte) error {
	if len(data) <= smallBody {
		_, err := w.Write(data)
		return err
	}
	buf := make([]byte, min(len(data), 16<<10))
	for len(data) > 0 {
		n := copy(buf, data)
		if _, err := w.Write(buf[:n]); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

func envelopeOf(w http.ResponseWriter, body io.Reader) (envelope, error) {
	defer newLimit(http.NewResponseController(w).SetReadDeadline).lift()
	data, err := readFrame(body)
	if err != nil {
		return envelope{}, err
	}
	return parseEnvelope(data)
}

func (s *served) answerGRPC(req *http.Request, c *call, e envelope) (head, data []byte, err error) {
	data, success, err := s.dispatch(req, c, e)
	if s.name == "get" {
		return beforeData(len(data)), data, err
	}
	return frame(response{Success: success}.marshal()), nil, err
}

// beforeData begins a frame with an envelope of Data alone.
func beforeData(n int) []byte {
	var tag []byte
	if n > 0 {
		tag = binary.AppendUvarint([]byte{3<<3 | lengthed}, uint64(n))
	}
	b := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(tag)+n))
	return append(b, tag...)
}

// dispatch passes the message in the envelope to the Backend.
func (s *served) dispatch(req *http.Request, c *call, e envelope) (data []byte, success bool, err error) {
	from, err := callerOf(e)
	if err != nil {
		return nil, false, err
	}
	m, err := s.room.read(req.Context(), e.Data)
	if err != nil {
		return nil, false, err
	}
	if s.name == "get" {
		a, err := s.b.Get(req.Context(), from, m)
		if err == nil {
			data, err = c.encode(a)
		}
		return data, err == nil, err
	}
	success, err = s.b.Report(req.Context(), from, m)
	return nil, success, err
}

// maxKind is the most bytes of a NODE_TYPE; DLRover's longest has 14.
const maxKind = 64

// callerOf checks a request's identity of its sender, which Backends keep.
func callerOf(e envelope) (Caller, error) {
	if len(e.NodeType) > maxKind || !utf8.ValidString(e.NodeType) {
		return Caller{}, fmt.Errorf("%w: a NODE_TYPE %.80q of %d bytes: need UTF-8 of at most %d", errProto, e.NodeType,
			len(e.NodeType), maxKind)
	}
	if int(int32(e.NodeID)) != e.NodeID {
		return Caller{}, fmt.Errorf("%w: a NODE_ID of %d: need a number of 32 bits", errProto, e.NodeID)
	}
	return Caller{NodeID: e.NodeID, NodeType: e.NodeType}, nil
}

// readFrame reads the one message of a call, which comes as it is: agents compress nothing.
func readFrame(r io.Reader) ([]byte, error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, unreadable(err)
	}
	n := binary.BigEndian.Uint32(head[1:])
	if head[0] != 0 || n > maxMessage {
		return nil, fmt.Errorf("%w: compressed, or of more than %d bytes", errProto, maxMessage)
	}
	body := make([]byte, 0, min(n, smallBody))
	for uint32(len(body)) < n { // announced bytes are allocated as they arrive
		chunk := make([]byte, min(n-uint32(len(body)), max(uint32(len(body)), smallBody)))
		if _, err := io.ReadFull(r, chunk); err != nil {
			return nil, unreadable(err)
		}
		body = append(body, chunk...)
	}
	if _, err := io.ReadFull(r, head[:1]); err != io.EOF {
		return nil, fmt.Errorf("%w: more than one message in a call, or no end", errProto)
	}
	return body, nil
}

// unreadable is the error of a request that has not come as it should.
func unreadable(err error) error {
	if errors.Is(err, errRoom) {
		return err
	}
	return fmt.Errorf("%w: %w", errProto, err)
}

func frame(body []byte) []byte {
	b := binary.BigEndian.AppendUint32(make([]byte, 1, 5+len(body)), uint32(len(body)))
	return append(b, body...)
}

// json is the form over HTTP, with a pickle as its answer.
func (s *served) json(w http.ResponseWriter, req *http.Request) {
	call, err := s.enter(req, http.MaxBytesReader(w, req.Body, maxJSON))
	var e envelope
	if err == nil {
		defer call.done()
		e, err = readJSON(w, call)
	}
	if err != nil {
		w.Header().Set("Connection", "close") // or the answer would wait for the rest of the request
	}
	var data []byte
	success := false
	if err == nil {
		data, success, err = s.dispatch(req, call, e)
	}
	limitWriting(w)
	if err != nil {
		http.Error(w, err.Error(), statusFor(err))
		return
	}
	before, after := aroundData(success, len(data))
	for _, part := range [][]byte{before, data, after} {
		_, _ = w.Write(part) // the caller may be gone; it asks again
	}
}

func statusFor(err error) int {
	switch code := codeOf(err); {
	case errors.Is(err, errRoom):
		return http.StatusServiceUnavailable
	case code == codeUnauthenticated:
		return http.StatusNotAcceptable
	case code == codeInvalid:
		return http.StatusBadRequest
	}
	return http.StatusInternalServerError
}

// aroundData is a BaseResponse without the bytes of its last attribute, data.
func aroundData(success bool, n int) (before, after []byte) {
	b := pickle.Encode(Comm.New("BaseResponse", Field{"success", success}, Field{"data", []byte{}}))
	end := len(b) - len("ub.") // SETITEMS, BUILD and STOP
	binary.LittleEndian.PutUint32(b[end-4:], uint32(n))
	return b[:end:end], b[end:]
}

// maxJSON is room for a message in base64, and for its envelope, in bytes.
const maxJSON = maxMessage/3*4 + 64<<10

// readJSON reads the envelope of a request, in its time.
func readJSON(w http.ResponseWriter, r io.Reader) (e envelope, err error) {
	defer limitReading(w)()
	return parseJSON(r)
}

func parseJSON(r io.Reader) (e envelope, err error) {
	var raw struct {
		NodeID   int    `json:"node_id"`
		NodeType string `json:"node_type"`
		Data     string `json:"data"`
	}
	if err := json.NewDecoder(r).Decode(&raw); err != nil {
		return e, unreadable(err)
	}
	e.NodeID, e.NodeType = raw.NodeID, raw.NodeType
	if e.Data, err = base64.StdEncoding.DecodeString(raw.Data); err != nil {
		return e, fmt.Errorf("%w: %w", errProto, err)
	}
	return e, nil
}
