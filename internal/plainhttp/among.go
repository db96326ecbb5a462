package plainhttp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// DialFunc makes connections.
type DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// Among dials one of several addresses of a service, of which only the elected one listens. Its methods may be called
// by any goroutine.
type Among struct {
	looks looks
	wrap  func(DialFunc) DialFunc // see Over; nil: as they are

	mu    sync.Mutex
	addrs []string
	first int                  // that is dialed first: the last one that has answered
	conns map[*connection]bool // that lead to addrs; nil: they are never replaced
}

// Addresses checks the value of an option or variable from, HOST:PORT or several of them with commas between, for
// NewAmong.
func Addresses(from, value string) (string, error) {
	var all []string
	for text := range strings.SplitSeq(value, ",") {
		host, port, err := net.SplitHostPort(strings.TrimSpace(text))
		n, notNumber := strconv.ParseUint(port, 10, 16)
		if err != nil || host == "" || notNumber != nil || n == 0 {
			return "", fmt.Errorf("%s=%s: need a host and a port from 1 to 65535, such as node0:29400 or [::1]:50001",
				from, value)
		}
		all = append(all, net.JoinHostPort(host, port))
	}
	return strings.Join(all, ","), nil
}

// NewAmong takes HOST:PORT, or several of them with commas between.
func NewAmong(addrs string) *Among {
	return &Among{addrs: strings.Split(addrs, ","), looks: usualLooks}
}

// Over has all connections be made through a dialer that wrap returns, such as one of TLS. It is to be called before
// the first one.
func (a *Among) Over(wrap func(DialFunc) DialFunc) { a.wrap = wrap }

func (a *Among) wrapped(dial DialFunc) DialFunc {
	if a.wrap == nil {
		return dial
	}
	return a.wrap(dial)
}

// NewReplaceable is an Among for addresses that Replace may change.
func NewReplaceable(addrs string) *Among {
	a := NewAmong(addrs)
	a.conns = map[*connection]bool{}
	return a
}

// Replace takes other addresses, and ends the connections to those that are not among them, if a is of NewReplaceable.
func (a *Among) Replace(addrs string) {
	a.mu.Lock()
	a.addrs, a.first = strings.Split(addrs, ","), 0
	var old []*connection
	for c := range a.conns {
		if !slices.Contains(a.addrs, c.to) {
			old = append(old, c)
		}
	}
	a.mu.Unlock()
	for _, c := range old {
		_ = c.Close() // its user has the error
	}
}

// connection is one that Replace can end.
type connection struct {
	net.Conn
	to    string
	among *Among
}

// Close implements net.Conn.
func (c *connection) Close() error {
	c.among.mu.Lock()
	delete(c.among.conns, c)
	c.among.mu.Unlock()
	return c.Conn.Close()
}

// NetConn is the connection below.
func (c *connection) NetConn() net.Conn { return c.Conn }

// made returns a connection as its user gets it.
func (a *Among) made(c net.Conn, to string) (net.Conn, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.conns == nil {
		return c, nil
	}
	if !slices.Contains(a.addrs, to) { // replaced meanwhile
		_ = c.Close()
		return nil, fmt.Errorf("%s does not serve any longer", to)
	}
	tracked := &connection{c, to, a}
	a.conns[tracked] = true
	return tracked, nil
}

// First is the host in URLs of the service, whichever address is dialed.
func (a *Among) First() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.addrs[0]
}

// Dial tries each address once.
func (a *Among) Dial(ctx context.Context, dial DialFunc) (c net.Conn, err error) {
	a.mu.Lock()
	addrs, first := a.addrs, a.first
	a.mu.Unlock()
	var errs error
	for i := range addrs {
		next := (first + i) % len(addrs)
		if c, err = dial(ctx, "tcp", addrs[next]); err == nil {
			a.prefer(first, next)
			if c, err = a.made(c, addrs[next]); err == nil && len(addrs) > 1 {
				c = via{c, next}
			}
			return c, err
		}
		if errs == nil {
			errs = err
		} else {
			errs = fmt.Errorf("%w; %w", errs, err)
		}
	}
	return nil, errs
}

// Failed has the next connection be tried at another address first: a process that is frozen, or on standby, still
// takes connections.
func (a *Among) Failed() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.first = (a.first + 1) % len(a.addrs)
}

// only reports whether there is one address.
func (a *Among) only() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.addrs) == 1
}

// turnTo sets the address that is dialed first.
func (a *Among) turnTo(i int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.first = i % len(a.addrs) // they may have been replaced
}

// prefer sets the address that is dialed first, unless another goroutine has done so meanwhile.
func (a *Among) prefer(old, now int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.first == old && now < len(a.addrs) {
		a.first = now
	}
}

// Through returns a client as New does, whose connections are to these addresses alone. A request that fails, but was
// not canceled, has the next one be sent to another address. One that has no answer for two seconds is sent again, to
// another process than the one that has it, when that serves: see LeaderPath. One that a server has no room for is sent
// again when the server says so (429).
func (a *Among) Through(set func(*http.Transport)) *http.Client {
	c := New(func(t *http.Transport) {
		if set != nil {
			set(t)
		}
		dial := t.DialContext
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return a.Dial(ctx, a.wrapped(dial)) }
	})
	c.Transport = later{failover{c.Transport.(*http.Transport), a}}
	return c
}

// failover is a transport that leaves an address which has failed.
type failover struct {
	*http.Transport
	among *Among
}

// RoundTrip implements http.RoundTripper.
func (f failover) RoundTrip(r *http.Request) (*http.Response, error) {
	if f.among.only() {
		return f.Transport.RoundTrip(r)
	}
	for {
		resp, moved, err := f.try(r)
		if !moved || r.Context().Err() != nil || !repeats(r) {
			return resp, err
		}
		if r, err = again(r); err != nil {
			return nil, err
		}
	}
}

// repeats reports whether a request can be sent again.
func repeats(r *http.Request) bool { return r.Body == nil || r.GetBody != nil }

// again is a copy of a request, to be sent again.
func again(r *http.Request) (_ *http.Request, err error) {
	r = r.WithContext(r.Context())
	if r.GetBody != nil {
		r.Body, err = r.GetBody()
	}
	return r, err
}

// try sends a request once; moved: it is to be sent again, to another address.
func (f failover) try(r *http.Request) (resp *http.Response, moved bool, err error) {
	q := f.among.ask(r)
	resp, err = f.Transport.RoundTrip(r.WithContext(q.ctx))
	moved = q.end()
	if err == nil && !moved && resp.StatusCode != http.StatusSwitchingProtocols { // which ends the request
		resp.Body = answered{resp.Body, q.cancel}
		return resp, false, nil
	}
	q.cancel()
	if moved && err == nil {
		_ = resp.Body.Close()
		resp, err = nil, context.Canceled
	}
	failed := err != nil && !moved && !errors.Is(err, context.Canceled)
	if failed {
		f.among.Failed()
	}
	if failed || moved {
		f.CloseIdleConnections() // they lead to the same process
	}
	return resp, moved, err
}
