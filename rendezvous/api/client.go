package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"

	"dlrover-run/internal/httperr"
	"dlrover-run/internal/job"
	"dlrover-run/internal/plainhttp"
	"dlrover-run/internal/secure"
	"dlrover-run/rendezvous"
)

// requestTimeout bounds every request but Watch and Events, and watchTimeout those, which
// the daemon holds for at most a minute.
const (
	requestTimeout = 10 * time.Second
	watchTimeout   = 90 * time.Second
)

// Client speaks to the Hub of another process. It keeps one connection. While Watch is under way, a report has one that
// is closed afterwards: a second open connection would double the daemon's open files when 10,000 nodes restart.
type Client struct {
	among    *plainhttp.Among
	tokens   *plainhttp.Tokens
	tls      *secure.Layer // nil: none
	hc       *http.Client
	dialed   func(peer net.Addr) // nil: no callback
	watching atomic.Int32        // requests of Watch
	ended    chan struct{}       // see Ended; has room for one
}

// NewClient returns a Client of the daemon at host:port, or at one of several with commas between, of which only the
// elected one listens. It connects on first use.
func NewClient(addr, token string) *Client { return newClient(plainhttp.NewAmong(addr), token) }

// NewFollower returns a Client of the daemon at host:port until Follow names another one.
func NewFollower(addr, token string) *Client { return newClient(plainhttp.NewReplaceable(addr), token) }

// Follow turns to the daemon at another host:port. Requests that are under way at the former one fail.
func (c *Client) Follow(addr string) { c.among.Replace(addr) }

func newClient(among *plainhttp.Among, token string) *Client {
	c := &Client{among: among, ended: make(chan struct{}, 1)}
	c.TokenFrom(func() []string { return []string{token} })
	c.hc = c.among.Through(func(t *http.Transport) {
		t.DialContext, t.IdleConnTimeout = c.dial, 5*time.Second
		t.WriteBufferSize, t.ReadBufferSize = 4<<10, 4<<10
	})
	return c
}

// TokenFrom has f called for the tokens of every request: the first is sent, and another one if that is refused. It is
// to be called before the first request.
func (c *Client) TokenFrom(f func() []string) { c.tokens = plainhttp.NewTokens(f) }

// Over has all connections speak TLS, and returns c. It is to be called before the first request; nil changes nothing.
func (c *Client) Over(l *secure.Layer) *Client {
	c.tls = l
	c.among.Over(l.Dial)
	return c
}

// To returns a Client of the daemon at another host:port, with the same token and the same TLS.
func (c *Client) To(addr string) *Client {
	to := NewClient(addr, "").Over(c.tls)
	to.tokens = c.tokens
	return to
}

// WhenDialed has f called with the daemon's address whenever a connection was made. It is to be called before the first
// request.
func (c *Client) WhenDialed(f func(peer net.Addr)) { c.dialed = f }

func (c *Client) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: 2 * time.Second, KeepAliveConfig: keepAlive} // two SYNs are lost by then
	nc, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	if c.dialed != nil {
		c.dialed(nc.RemoteAddr())
	}
	return &clientConn{nc, c}, nil
}

// clientConn notifies its Client of its end.
type clientConn struct {
	net.Conn
	client *Client
}

// NetConn is the connection below.
func (c *clientConn) NetConn() net.Conn { return c.Conn }

// Close implements net.Conn. The transport calls it also when the other end has closed.
func (c *clientConn) Close() error {
	select {
	case c.client.ended <- struct{}{}:
	default:
	}
	return c.Conn.Close()
}

// Ended receives when a connection has ended, also one without a request. It is for one reader.
func (c *Client) Ended() <-chan struct{} { return c.ended }

// Move has all requests from now on go to another address, HOST:PORT. It must come from a server that has the token, or
// from one of the job's launchers.
func (c *Client) Move(addr string) {
	c.among.Replace(addr)
	c.hc.CloseIdleConnections()
}

// Addr is where requests go, HOST:PORT; the first of several addresses.
func (c *Client) Addr() string { return c.among.First() }

// Close ends the idle connections.
func (c *Client) Close() { c.hc.CloseIdleConnections() }

// Join implements Service.
func (c *Client) Join(ctx context.Context, run string, ev rendezvous.Join) error {
	return c.post(ctx, run, "join", joining(ev), nil)
}

func joining(ev rendezvous.Join) joinBody {
	now := time.Now()
	if ev.Resume != nil {
		r := *ev.Resume
		r.Failures = dated(r.Failures, now)
		ev.Resume = &r
	}
	ev.Failures = dated(ev.Failures, now)
	return joinBody{ev, sent{now}}
}

// Report implements Service.
func (c *Client) Report(ctx context.Context, run string, ev rendezvous.Event) error {
	switch e := ev.(type) {
	case rendezvous.Ready:
		return c.post(ctx, run, "ready", readyBody{Ready: e}, nil)
	case rendezvous.Success:
		return c.post(ctx, run, "success", successBody{Success: e}, nil)
	case rendezvous.Stepped:
		return c.post(ctx, run, "stepped", e, nil)
	case rendezvous.Failing:
		now := time.Now()
		e.Failures = dated(e.Failures, now)
		return c.post(ctx, run, "failing", failingBody{e, sent{now}}, nil)
	case rendezvous.Cleared:
		now := time.Now()
		e.Until = wall(e.Until, now)
		return c.post(ctx, run, "cleared", clearedBody{e, sent{now}}, nil)
	case rendezvous.Barred:
		return c.post(ctx, run, "barred", e, nil)
	case rendezvous.Doubt:
		return c.post(ctx, run, "doubt", e, nil)
	case rendezvous.Leaving:
		return c.post(ctx, run, "leaving", e, nil)
	}
	return fmt.Errorf("%w: %T cannot be reported", ErrBadRequest, ev)
}

// Leave implements Service.
func (c *Client) Leave(ctx context.Context, run string, ev rendezvous.Leave) (e job.Evidence, err error) {
	now := time.Now()
	ev.Failures = dated(ev.Failures, now)
	err = c.post(ctx, run, "leave", leaveBody{ev, sent{now}}, &e)
	return e, err
}

// LeaveRequest is the complete request of a Leave, to be sent on a connection of its own by a process without a Client,
// which speaks no TLS.
func (c *Client) LeaveRequest(run string, ev rendezvous.Leave) ([]byte, error) {
	if c.tls != nil {
		return nil, fmt.Errorf("leave run %q: without TLS: %w", run, errors.ErrUnsupported)
	}
	body, err := json.Marshal(ev)
	if err != nil {
		return nil, fmt.Errorf("leave run %q: %w", run, err)
	}
	req, err := c.request(context.Background(), http.MethodPost, "/v1/runs/"+url.PathEscape(run)+"/leave", body)
	if err != nil {
		return nil, err
	}
	req.Close = true
	if token := c.tokens.Sent(); token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	var b bytes.Buffer
	err = req.Write(&b)
	return b.Bytes(), err
}

// World implements Service.
func (c *Client) World(ctx context.Context, run string) (ms []job.Member, err error) {
	err = c.get(ctx, requestTimeout, "/v1/runs/"+url.PathEscape(run)+"/world", &ms)
	return ms, err
}

// Watch implements Service. A daemon of an older version answers a Join at once.
func (c *Client) Watch(ctx context.Context, run, id string, after Cursor) (n News, err error) {
	q := url.Values{"after": {strconv.FormatUint(after.Directive, 10)}}
	if after.WithNotices {
		q.Set("notices", strconv.FormatUint(after.Notices, 10))
	}
	if after.Waits > 0 {
		q.Set("waits", strconv.FormatInt(after.Waits.Milliseconds(), 10))
	}
	c.watching.Add(1)
	defer c.watching.Add(-1)
	path := "/v1/runs/" + url.PathEscape(run)
	if after.Join == nil {
		q.Set("node", id)
		err = c.get(noticing(ctx), watchTimeout, path+"/watch?"+q.Encode(), &n)
		return n, err
	}
	data, err := json.Marshal(joining(*after.Join))
	if err != nil {
		return n, fmt.Errorf("join run %q: %w", run, err)
	}
	err = c.do(noticing(ctx), watchTimeout, http.MethodPost, path+"/join?"+q.Encode(), false, data, &n)
	if err == nil && n.Seq == 0 {
		err = ErrNothingNew
	}
	return n, err
}

// Order does as Hub.Order.
func (c *Client) Order(ctx context.Context, run string, o rendezvous.Order) error {
	return c.post(ctx, run, "orders", o, nil)
}

// Notify does as Hub.Notify.
func (c *Client) Notify(ctx context.Context, run, node, topic, body string) error {
	return c.post(ctx, run, "notices", noticeBody{node, topic, body}, nil)
}

// Forget does as Hub.Forget.
func (c *Client) Forget(ctx context.Context, run string) error {
	return c.post(ctx, run, "forget", struct{}{}, nil)
}

// Events does as Hub.Events.
func (c *Client) Events(ctx context.Context, run string, after uint64) (es Events, err error) {
	query := "?after=" + strconv.FormatUint(after, 10)
	err = c.get(ctx, watchTimeout, "/v1/runs/"+url.PathEscape(run)+"/events"+query, &es)
	return es, err
}

// Runs describes every run of the daemon.
func (c *Client) Runs(ctx context.Context) (rs []RunStatus, err error) {
	err = c.get(ctx, requestTimeout, "/v1/runs", &rs)
	return rs, err
}

func (c *Client) post(ctx context.Context, run, verb string, body, into any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("%s run %q: %w", verb, run, err)
	}
	once := c.watching.Load() > 0
	return c.do(ctx, requestTimeout, http.MethodPost, "/v1/runs/"+url.PathEscape(run)+"/"+verb, once, data, into)
}

func (c *Client) get(ctx context.Context, timeout time.Duration, path string, into any) error {
	return c.do(ctx, timeout, http.MethodGet, path, false, nil, into)
}

// maxMoves bounds the redirects that one request follows.
const maxMoves = 3

// do makes a request, which the timeout bounds if it is not 0. A server may redirect it, and all later ones: whoever
// does so has got the token already, and could pass it on itself.
func (c *Client) do(
	ctx context.Context, timeout time.Duration, method, path string, once bool, body []byte, into any,
) (err error) {
	for range 1 + maxMoves {
		err = c.try(ctx, timeout, method, path, once, body, into)
		moved, ok := errors.AsType[*MovedError](err)
		if !ok {
			return err
		}
		c.Move(moved.To)
	}
	return err
}

func (c *Client) try(
	ctx context.Context, timeout time.Duration, method, path string, once bool, body []byte, into any,
) error {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	req, err := c.request(ctx, method, path, body)
	if err != nil {
		return err
	}
	req.Close = once
	resp, err := c.tokens.Do(c.hc, req)
	if err != nil {
		return err // a *url.Error, which names method and address
	}
	defer resp.Body.Close()
	return readReply(resp, into)
}

func (c *Client) request(ctx context.Context, method, path string, body []byte) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+c.among.First()+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("rendezvous at %s: %w", c.among.First(), err)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	return req, nil
}

// maxReply bounds a reply: the world table of MaxNodes nodes.
const maxReply = 32 << 20

func readReply(resp *http.Response, into any) error {
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxReply))
	switch {
	case err != nil:
		return fmt.Errorf("read the daemon's reply: %w", err)
	case resp.StatusCode == http.StatusNoContent:
		return ErrNothingNew
	case resp.StatusCode == http.StatusOK && into == nil:
		return nil
	case resp.StatusCode == http.StatusOK:
		if err := json.Unmarshal(data, into); err != nil {
			return fmt.Errorf("the daemon's reply is not ours (another service on this port?): %w", err)
		}
		return nil
	}
	e, ok := httperr.Parse(data)
	if !ok {
		const who = "no rendezvous daemon answers here (another service on this port, or an older version?)"
		return fmt.Errorf("%w: HTTP %s: %s", ErrBadRequest, resp.Status, who)
	}
	return errorOf(e)
}
