package plainhttp

import (
	"bufio"
	"context"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"
	"time"
)

// LeaderPath is where the elected process answers a GET with 204, and with the token checked.
const LeaderPath = "/v1/leader"

// looks are the times of a request that has no answer. A process that is frozen, or whose host is silent, does not end
// its connections; and one that only holds a request does not answer either. So the other addresses are dialed, where
// nobody listens as a rule: that costs both hosts two packets.
type looks struct {
	quiet    time.Duration // before the first look
	every    time.Duration // between the first two, and twice as long after each; shortened by up to a third at random
	most     time.Duration // between two
	patience time.Duration // with one address
}

var usualLooks = looks{quiet: 2 * time.Second, every: 750 * time.Millisecond, most: 4 * time.Second,
	patience: 250 * time.Millisecond}

// next is the pause after n looks.
func (l looks) next(n int) time.Duration {
	pause := l.every
	for ; n > 1 && pause < l.most; n-- {
		pause *= 2
	}
	pause = min(pause, l.most)
	return pause - rand.N(pause/3+1)
}

// via is a connection to one of several addresses.
type via struct {
	net.Conn
	at int
}

// NetConn is the connection below.
func (v via) NetConn() net.Conn { return v.Conn }

// question is a request that waits for its answer.
type question struct {
	among  *Among
	token  string // of the header Authorization
	ctx    context.Context
	cancel context.CancelFunc

	mu    sync.Mutex
	timer *time.Timer
	looks int  // so far
	at    int  // the address that it was sent to; -1: none yet
	over  bool // it has its answer, or has failed
	moved bool // it is to be sent to another address
}

// ask begins to look for another address while r has no answer.
func (a *Among) ask(r *http.Request) *question {
	q := &question{among: a, token: r.Header.Get("Authorization"), at: -1}
	q.ctx, q.cancel = context.WithCancel(r.Context())
	q.ctx = httptrace.WithClientTrace(q.ctx, &httptrace.ClientTrace{GotConn: q.sent})
	q.mu.Lock()
	defer q.mu.Unlock()
	q.timer = time.AfterFunc(a.looks.quiet+a.looks.next(0)/4, q.look)
	return q
}

func (q *question) sent(i httptrace.GotConnInfo) {
	if v, ok := i.Conn.(via); ok {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.at = v.at
	}
}

// look moves the request if another process serves than the one that has it.
func (q *question) look() {
	q.mu.Lock()
	at, n := q.at, q.looks
	q.mu.Unlock()
	to := q.among.elsewhere(q.ctx, at, q.token, n)
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.over:
	case to < 0 || q.at != at:
		q.looks++
		q.timer.Reset(q.among.looks.next(q.looks))
	default:
		q.moved = true
		q.among.turnTo(to)
		q.cancel()
	}
}

// end ends the looks. It reports whether the request is to be sent to another address.
func (q *question) end() (moved bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.over = true
	q.timer.Stop()
	return q.moved
}

// elsewhere returns the address of a process that serves while the one at another address, unless that is -1, does not
// answer; -1: there is none. After n looks it asks one of the others that listen, each time another one: those that may
// be elected next do so in some elections, and the request may be held for long.
func (a *Among) elsewhere(ctx context.Context, at int, token string, n int) int {
	a.mu.Lock()
	addrs := a.addrs
	a.mu.Unlock()
	for i := range addrs {
		i = (i + n) % len(addrs)
		if i == at {
			continue
		}
		listens, serves := a.asks(ctx, addrs[i], token)
		switch {
		case serves:
			if at >= 0 && at < len(addrs) {
				// A process that was frozen and has woken may not know yet that it serves no longer.
				if _, still := a.asks(ctx, addrs[at], token); still {
					return -1
				}
			}
			return i
		case listens && n > 0:
			return -1
		}
	}
	return -1
}

// asks reports whether somebody listens at an address, and whether that is the elected process.
func (a *Among) asks(ctx context.Context, addr, token string) (listens, serves bool) {
	ctx, cancel := context.WithTimeout(ctx, a.looks.patience)
	defer cancel()
	var dialer net.Dialer
	c, err := a.wrapped(dialer.DialContext)(ctx, "tcp", addr)
	if err != nil {
		return false, false
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+a.First()+LeaderPath, nil)
	if err != nil {
		return true, false
	}
	r.Close = true
	if token != "" {
		r.Header.Set("Authorization", token)
	}
	if r.Write(c) != nil {
		return true, false
	}
	resp, err := http.ReadResponse(bufio.NewReader(io.LimitReader(c, maxHeader)), r)
	if err != nil {
		return true, false
	}
	_ = resp.Body.Close()
	return true, resp.StatusCode == http.StatusNoContent
}

// answered is the body of an answer; its request lasts until it is closed.
type answered struct {
	io.ReadCloser
	end context.CancelFunc
}

func (a answered) Close() error {
	defer a.end()
	return a.ReadCloser.Close()
}
