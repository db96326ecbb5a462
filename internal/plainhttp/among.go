package plainhttp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
)

// Among dials one of several addresses of a service, of which only the elected one listens. Its methods may be called
// by any goroutine.
type Among struct {
	addrs []string

	mu    sync.Mutex
	first int // that is dialed first: the last one that has answered
}

// NewAmong takes HOST:PORT, or several of them with commas between.
func NewAmong(addrs string) *Among { return &Among{addrs: strings.Split(addrs, ",")} }

// First is the host in URLs of the service, whichever address is dialed.
func (a *Among) First() string { return a.addrs[0] }

// Dial tries each address once.
func (a *Among) Dial(ctx context.Context, dial func(ctx context.Context, network, addr string) (net.Conn, error)) (
	c net.Conn, err error,
) {
	a.mu.Lock()
	first := a.first
	a.mu.Unlock()
	var errs error
	for i := range a.addrs {
		next := (first + i) % len(a.addrs)
		if c, err = dial(ctx, "tcp", a.addrs[next]); err == nil {
			a.prefer(first, next)
			return c, nil
		}
		if errs == nil {
			errs = err
		} else {
			errs = fmt.Errorf("%w; %w", errs, err)
		}
	}
	return nil, errs
}

// failed has the next connection be tried at another address first: a process that is frozen still takes connections.
func (a *Among) failed() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.first = (a.first + 1) % len(a.addrs)
}

// prefer sets the address that is dialed first, unless another goroutine has done so meanwhile.
func (a *Among) prefer(old, now int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.first == old {
		a.first = now
	}
}

// Through returns a client as New does, whose connections are to these addresses alone. A request that fails, but was
// not canceled, has the next one be sent to another address.
func (a *Among) Through(set func(*http.Transport)) *http.Client {
	c := New(func(t *http.Transport) {
		if set != nil {
			set(t)
		}
		dial := t.DialContext
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return a.Dial(ctx, dial) }
	})
	c.Transport = failover{c.Transport.(*http.Transport), a}
	return c
}

// failover is a transport that leaves an address which has failed.
type failover struct {
	*http.Transport
	among *Among
}

// RoundTrip implements http.RoundTripper.
func (f failover) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := f.Transport.RoundTrip(r)
	if err != nil && !errors.Is(err, context.Canceled) && len(f.among.addrs) > 1 {
		f.among.failed()
		f.CloseIdleConnections() // they lead to the same process
	}
	return resp, err
}
