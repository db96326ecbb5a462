package pyproto

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/internal/pickle"
	"dlrover-run/internal/plainhttp"
)

// ClientConfig holds the identity of the client, and its master.
type ClientConfig struct {
	Addr   string // host:port
	Caller Caller
	HTTP   bool    // JSON over HTTP/1.1 in place of gRPC
	Speak  Dialect // "": Comm
	// Dialed receives the master's address for every new connection; it may be nil.
	Dialed func(net.Addr)
}

// Client calls the procedures of a master. Close ends its connections.
type Client struct {
	cfg     ClientConfig
	hc      *http.Client
	foreign atomic.Bool // the last connection has received another protocol
	old     bool        // the master is of version 0.3

	mu    sync.Mutex
	conns map[*greeted]bool // those that are open
}

// Errors of a Client.
var (
	// ErrNoMaster: something answers that is no master of DLRover, or one of another transport.
	ErrNoMaster = errors.New("no master of DLRover answers")
	// errRefused: the master has rejected the request, or failed on the way.
	errRefused = errors.New("the master of DLRover refused")
)

// callTimeout bounds one call, as DLRover's agents do.
const callTimeout = 60 * time.Second

// silence bounds how long data sent to a master may stay without an acknowledgement of its host: then the connection is
// closed, and the next call makes another. There are no pings of HTTP/2, because Python masters hang up on them.
const silence = 15 * time.Second

// tcpUserTimeout is the socket option TCP_USER_TIMEOUT of Linux, in milliseconds.
const tcpUserTimeout = 18

// NewClient returns a Client, which connects on first use.
func NewClient(cfg ClientConfig) *Client {
	if cfg.Speak == "" {
		cfg.Speak = Comm
	}
	c := &Client{cfg: cfg, conns: map[*greeted]bool{}}
	c.hc = plainhttp.New(func(t *http.Transport) {
		t.DialContext, t.IdleConnTimeout, t.Protocols = c.dial, 0, new(http.Protocols)
		t.Protocols.SetHTTP1(cfg.HTTP)
		t.Protocols.SetUnencryptedHTTP2(!cfg.HTTP)
	})
	return c
}

func (c *Client) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: 5 * time.Second, Control: noticeSilence, KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: 5 * time.Second, Interval: 3 * time.Second, Count: 3,
	}}
	nc, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	if c.cfg.Dialed != nil {
		c.cfg.Dialed(nc.RemoteAddr())
	}
	g := &greeted{Conn: nc, c: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns[g] = true
	return g, nil
}

// noticeSilence is best effort: without it, detection takes longer.
func noticeSilence(_, _ string, raw syscall.RawConn) error {
	return raw.Control(func(fd uintptr) {
		_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(silence.Milliseconds()))
	})
}

// greeted is a connection whose other end must identify its protocol first.
type greeted struct {
	net.Conn
	c     *Client
	heard bool // for the one goroutine that reads
}

// Read fails if the first byte shows that something else answers.
func (g *greeted) Read(b []byte) (int, error) {
	n, err := g.Conn.Read(b)
	if n == 0 || g.heard {
		return n, err
	}
	g.heard = true
	want := byte(0) // of the length of the frame SETTINGS, with which HTTP/2 begins
	if g.c.cfg.HTTP {
		want = 'H' // TTP/1.1
	}
	g.c.foreign.Store(b[0] != want)
	if b[0] != want {
		return 0, errForeign
	}
	return n, err
}

// Close ends the connection.
func (g *greeted) Close() error {
	g.c.mu.Lock()
	delete(g.c.conns, g)
	g.c.mu.Unlock()
	return g.Conn.Close()
}

var errForeign = fmt.Errorf("%w: it speaks another protocol", ErrNoMaster)

// Close ends the connections, and with them the calls that are under way. To net/http one is not idle on which a
// cancelled call was never answered.
func (c *Client) Close() {
	c.hc.CloseIdleConnections()
	c.mu.Lock()
	open := slices.Collect(maps.Keys(c.conns))
	c.mu.Unlock()
	for _, g := range open {
		_ = g.Close()
	}
}

// Caller is the identity that the client sends.
func (c *Client) Caller() Caller { return c.cfg.Caller }

// Old: the master is of version 0.3.
func (c *Client) Old() bool { return c.old }

// Dialect is the one that the client speaks.
func (c *Client) Dialect() Dialect { return c.cfg.Speak }

// New makes a message for this master.
func (c *Client) New(name string, fields ...Field) *Message { return c.cfg.Speak.New(name, fields...) }

// Get asks the master. The answer is nil if the master has none, such as to a message that it does not know.
func (c *Client) Get(ctx context.Context, m *Message) (*Message, error) {
	data, _, err := c.call(ctx, "get", m)
	if err != nil || len(data) == 0 {
		return nil, err
	}
	return ReadMessage(data)
}

// Report sends a report to the master; errRefused: the master has not accepted it.
func (c *Client) Report(ctx context.Context, m *Message) error {
	_, r, err := c.call(ctx, "report", m)
	if err != nil || r.Success {
		return err
	}
	return fmt.Errorf("%w %s: %s", errRefused, m.Class.Name, reasonOr(r.Reason))
}

func reasonOr(reason string) string {
	if reason == "" {
		return "it gives no reason"
	}
	return reason
}

func (c *Client) call(ctx context.Context, name string, m *Message) ([]byte, response, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if c.cfg.HTTP {
		return c.callHTTP(ctx, name, wrap(c.cfg.Caller, m))
	}
	return c.callGRPC(ctx, name, RequestBody(c.cfg.Caller, m))
}

func wrap(from Caller, m *Message) envelope {
	return envelope{NodeID: from.NodeID, NodeType: from.NodeType, Data: pickle.Encode(m)}
}

// RequestBody is the body of a call by gRPC, for callers that repeat the same request. The JobUID is not in it, but in
// the header job_uid.
func RequestBody(from Caller, m *Message) []byte { return frame(wrap(from, m).marshal()) }

func (c *Client) request(ctx context.Context, path, kind string, body []byte) (*http.Response, error) {
	u := url.URL{Scheme: "http", Host: c.cfg.Addr, Path: path}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String(), bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("master at %s: %w", c.cfg.Addr, err)
	}
	req.Header.Set("Content-Type", kind)
	if c.cfg.Caller.JobUID != "" {
		req.Header.Set(jobUID, c.cfg.Caller.JobUID)
	}
	if !c.cfg.HTTP {
		req.Header.Set("Te", "trailers")
	}
	resp, err := c.hc.Do(req)
	if err != nil && c.foreign.Load() { // net/http's own error depends on its state then
		err = fmt.Errorf("%w (%w)", errForeign, err)
	}
	return resp, err
}

func (c *Client) callGRPC(ctx context.Context, name string, body []byte) ([]byte, response, error) {
	resp, err := c.request(ctx, GRPCPath+name, "application/grpc", body)
	if err != nil {
		return nil, response{}, err
	}
	defer resp.Body.Close()
	body, err = readAnswer(resp.Body)
	if err != nil {
		return nil, response{}, err
	}
	if err := statusOf(resp); err != nil {
		return nil, response{}, err
	}
	if body, err = readFrame(bytes.NewReader(body)); err != nil {
		return nil, response{}, err
	}
	if name == "report" {
		r, err := parseResponse(body)
		return nil, r, err
	}
	answer, err := parseEnvelope(body)
	return answer.Data, response{Success: true}, err
}

// readAnswer reads to the end, behind which gRPC has its status.
func readAnswer(r io.Reader) ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(r, maxAnswer+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the master's answer: %w", err)
	case len(body) > maxAnswer:
		return nil, fmt.Errorf("the master's answer has more than %d bytes", maxAnswer)
	}
	return body, nil
}

// maxAnswer is room for a message and its envelope.
const maxAnswer = maxMessage + 4096

// statusOf reads gRPC's status, which comes behind the body, or in the header if there is none.
func statusOf(resp *http.Response) error {
	from := resp.Trailer
	if resp.Header.Get("Grpc-Status") != "" {
		from = resp.Header
	}
	code, err := strconv.Atoi(from.Get("Grpc-Status"))
	if resp.StatusCode != http.StatusOK || err != nil {
		return fmt.Errorf("%w: HTTP %s", ErrNoMaster, resp.Status)
	}
	text, err := url.PathUnescape(from.Get("Grpc-Message"))
	if err != nil {
		text = from.Get("Grpc-Message")
	}
	switch code {
	case codeOK:
		return nil
	case codeUnimplemented:
		return fmt.Errorf("%w: gRPC status %d: %.300s", ErrNoMaster, code, text)
	case codeUnauthenticated:
		return fmt.Errorf("%w (gRPC status %d: %.300s)", ErrJobUID, code, text)
	}
	return fmt.Errorf("%w: gRPC status %d: %.300s", errRefused, code, text)
}

func (c *Client) callHTTP(ctx context.Context, name string, e envelope) ([]byte, response, error) {
	body, err := json.Marshal(map[string]any{
		"node_id": e.NodeID, "node_type": e.NodeType, "data": base64.StdEncoding.EncodeToString(e.Data),
	})
	if err != nil {
		return nil, response{}, err
	}
	resp, err := c.request(ctx, "/"+name, "application/json", body)
	if err != nil {
		return nil, response{}, err
	}
	defer resp.Body.Close()
	data, err := readAnswer(resp.Body)
	switch {
	case err != nil:
		return nil, response{}, err
	case resp.StatusCode == http.StatusNotAcceptable:
		return nil, response{}, fmt.Errorf("%w (%.300s)", ErrJobUID, data)
	case resp.StatusCode == http.StatusInternalServerError:
		return nil, response{}, fmt.Errorf("%w: HTTP %s: %.300q", errRefused, resp.Status, data)
	case resp.StatusCode != http.StatusOK:
		return nil, response{}, fmt.Errorf("%w: HTTP %s", ErrNoMaster, resp.Status)
	}
	m, err := ReadMessage(data)
	if err != nil || m.Class.Name != "BaseResponse" {
		return nil, response{}, fmt.Errorf("%w: its answer is none", ErrNoMaster)
	}
	success, _ := m.Get("success").(bool)
	return BytesOf(m.Get("data")), response{Success: success}, nil
}
