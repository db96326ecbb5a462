package streamhub

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/httperr"
	"dlrover-run/launcher/streams"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// requestTime is how long a request may take to arrive.
const requestTime = 10 * time.Second

// wireErrors is made at its first use: most programs serve no streams.
func wireErrors() httperr.Table {
	return httperr.Table{
		{Err: api.ErrUnknownRun, Status: http.StatusNotFound, Code: "unknown_run"},
		{Err: rendezvous.ErrUnknownNode, Status: http.StatusNotFound, Code: "unknown_node"},
		{Err: errNoRank, Status: http.StatusConflict, Code: "unknown_rank"},
		{Err: errGone, Status: http.StatusConflict, Code: "stream_gone"},
		{Err: errRefused, Status: http.StatusForbidden, Code: "exec_refused"},
		{Err: errTooMany, Status: http.StatusTooManyRequests, Code: "too_many_streams"},
		{Err: errOld, Status: http.StatusConflict, Code: "old_launcher"},
		{Err: errBad, Status: http.StatusBadRequest, Code: "bad_request"},
	}
}

// Handler serves the hub, with connections that are upgraded to streams.Protocol. Its caller checks tokens and the
// run's name.
//
//   - GET .../streams/logs follows output, with rank, node, tail and follow in the query.
//   - GET .../streams/exec executes the command in the first frame, with rank and timeout in the query.
//   - GET .../streams/profile records the worker of rank, with seconds in the query.
//   - GET .../streams/feed?id=ID&node=ID is for launchers.
func (h *Hub) Handler() http.Handler {
	const base = "GET /v1/runs/{run}/streams/"
	mux := http.NewServeMux()
	mux.HandleFunc(base+"logs", h.serveLogs)
	mux.HandleFunc(base+"exec", h.serveExec)
	mux.HandleFunc(base+"profile", h.serveProfile)
	mux.HandleFunc(base+"feed", h.serveFeed)
	return mux
}

func (h *Hub) serveLogs(w http.ResponseWriter, req *http.Request) {
	want, err := parseLogs(req.URL.Query())
	if err == nil {
		err = upgrades(req)
	}
	var s *stream
	if err == nil {
		s, err = h.admit(req.PathValue("run"), req.URL.Query().Get("node"), want)
	}
	if err != nil {
		refuse(w, err)
		return
	}
	defer h.drop(s)
	if nc := take(w); nc != nil {
		defer nc.Close()
		h.cfg.Log.Debug("the output of a run is followed", "run_id", s.run, "from", req.RemoteAddr)
		s.serve(nc)
	}
}

// parseLogs reads a follower's query.
func parseLogs(q url.Values) (r streams.Request, err error) {
	if r.Rank, err = number(q, "rank", -1); err != nil {
		return r, err
	}
	r.Follow = q.Get("follow") == "true"
	r.Tail, err = number(q, "tail", -1)
	return r, err
}

// number is a parameter that may be left out.
func number(q url.Values, name string, absent int) (int, error) {
	if !q.Has(name) {
		return absent, nil
	}
	n, err := strconv.ParseInt(q.Get(name), 10, 32)
	if err != nil || n < -1 {
		return 0, fmt.Errorf("%w: %s=%.40q: need a number", errBad, name, q.Get(name))
	}
	return int(n), nil
}

func (h *Hub) serveExec(w http.ResponseWriter, req *http.Request) {
	q := req.URL.Query()
	rank, err := number(q, "rank", -1)
	if err == nil && rank < 0 {
		err = fmt.Errorf("%w: rank=%.40q: need a rank", errBad, q.Get("rank"))
	}
	if err == nil {
		err = upgrades(req)
	}
	var s *stream
	if err == nil {
		s, err = h.admit(req.PathValue("run"), "", streams.Request{Rank: rank, Args: []string{""}}) // they come later
	}
	if err != nil {
		refuse(w, err)
		return
	}
	defer h.drop(s)
	nc := take(w)
	if nc == nil {
		return
	}
	defer nc.Close()
	_ = nc.SetReadDeadline(time.Now().Add(requestTime))
	args, timeout, err := readCommand(nc)
	if err != nil {
		e := streams.Exit{Code: streams.CodeRefused, Error: err.Error()}
		_ = write(nc, streams.Frame{Kind: streams.KindExit, Data: streams.JSON(e)}.Append(nil))
		return
	}
	_ = nc.SetReadDeadline(time.Time{})
	s.req.Args, s.req.Timeout, s.req.From = args, timeout, req.RemoteAddr
	s.serve(nc)
}

func (h *Hub) serveProfile(w http.ResponseWriter, req *http.Request) {
	q := req.URL.Query()
	rank, err := number(q, "rank", -1)
	seconds, bad := number(q, "seconds", 0)
	if err = cmp.Or(err, bad); err == nil && (rank < 0 || seconds < 1 || seconds > int(streams.MaxProfile/time.Second)) {
		err = fmt.Errorf("%w: rank=%.40q&seconds=%.40q: need a rank, and 1 to %d seconds", errBad, q.Get("rank"),
			q.Get("seconds"), int(streams.MaxProfile/time.Second))
	}
	if err == nil {
		err = upgrades(req)
	}
	var s *stream
	if err == nil {
		last := time.Duration(seconds) * time.Second
		s, err = h.admit(req.PathValue("run"), "", streams.Request{Rank: rank, Profile: last, From: req.RemoteAddr})
	}
	if err != nil {
		refuse(w, err)
		return
	}
	defer h.drop(s)
	if nc := take(w); nc != nil {
		defer nc.Close()
		s.serve(nc)
	}
}

// Profile opens the stream of a profile for a caller in this process, which closes it.
func (h *Hub) Profile(run string, rank int, last time.Duration, from string) (io.ReadCloser, error) {
	s, err := h.admit(run, "", streams.Request{Rank: rank, Profile: last, From: from})
	if err != nil {
		return nil, err
	}
	own, theirs := net.Pipe()
	go func() {
		defer h.drop(s)
		s.serve(theirs)
	}()
	return own, nil
}

// readCommand reads the first frame of a caller that executes a command.
func readCommand(nc net.Conn) (args []string, timeout time.Duration, err error) {
	f, err := streams.NewReader(nc).Next()
	if err != nil {
		return nil, 0, err
	}
	var r streams.Request
	if err := f.Decode(&r); f.Kind != streams.KindRequest || err != nil {
		return nil, 0, fmt.Errorf("%w: the command cannot be read: use a dlroverctl of the daemon's version", errBad)
	}
	if err := r.CheckArgs(); err != nil {
		return nil, 0, fmt.Errorf("%w: %w", errBad, err)
	}
	return r.Args, max(r.Timeout, 0), nil
}

func (h *Hub) serveFeed(w http.ResponseWriter, req *http.Request) {
	q := req.URL.Query()
	err := upgrades(req)
	var s *stream
	var o rendezvous.Member
	if err == nil {
		s, o, err = h.find(req.PathValue("run"), q.Get("id"), q.Get("node"))
	}
	if err != nil {
		refuse(w, err)
		return
	}
	if nc := take(w); nc != nil {
		s.feed(o, nc)
	}
}

func refuse(w http.ResponseWriter, err error) {
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(requestTime))
	wireErrors().Write(w, err)
}

// upgrades refuses requests that stay with HTTP.
func upgrades(req *http.Request) error {
	if !strings.EqualFold(req.Header.Get("Upgrade"), streams.Protocol) {
		return fmt.Errorf("%w: %s needs Upgrade: %s; use a dlroverctl of the daemon's version", errBad, req.URL.Path,
			streams.Protocol)
	}
	return nil
}

// take makes the connection ours; nil: it is lost.
func take(w http.ResponseWriter) net.Conn {
	nc, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		refuse(w, err)
		return nil
	}
	_ = nc.SetDeadline(time.Time{})
	const answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + streams.Protocol + "\r\n\r\n"
	if write(nc, []byte(answer)) != nil {
		_ = nc.Close()
		return nil
	}
	return &conn{Conn: nc, r: buffered.Reader}
}

// conn is a connection whose first bytes may be in a buffer.
type conn struct {
	net.Conn
	r *bufio.Reader
}

// Read implements net.Conn.
func (c *conn) Read(b []byte) (int, error) { return c.r.Read(b) }
