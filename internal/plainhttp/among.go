package plainhttp

import (
	"context"
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

// Failed has the next connection be tried at another address first. It is for an address that was dialed but does not
// answer.
func (a *Among) Failed() {
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

// Through returns a client as New does, whose connections are to these addresses alone.
func (a *Among) Through(set func(*http.Transport)) *http.Client {
	return New(func(t *http.Transport) {
		if set != nil {
			set(t)
		}
		dial := t.DialContext
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return a.Dial(ctx, dial) }
	})
}
