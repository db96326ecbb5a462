package master

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"dlrover-run/internal/app/etcd"
	"dlrover-run/internal/retry"
	"dlrover-run/rendezvous/lead"
)

// A leader whose store does not answer goes on while all other candidates vouch for it; package etcd says why that is
// safe. It asks them in its answers to their requests, and their next request has the answer.
const (
	asks    = 700 * time.Millisecond  // after so long without an answer of the store
	word    = 1500 * time.Millisecond // for which a candidate that vouches does not serve
	fresh   = time.Second             // age of a question whose answer still counts; less than word
	noNews  = 2 * time.Second         // after which the store's silence is told
	most    = 64                      // candidates that a leader remembers
	poll    = 20 * time.Millisecond
	maxAddr = 256 // bytes
)

// failsafe is a store whose leader may go on while it is away.
type failsafe interface {
	reporter
	Failsafe(vouched func(lead.Term, []string) bool)
	Vouchers(ctx context.Context) (etcd.Vouchers, error)
	Serves(term lead.Term)
	Candidates() []string
	Holds() bool
}

// audience is what a leader knows of the candidates that follow it.
type audience struct {
	term  lead.Term
	began time.Time

	mu      sync.Mutex
	heard   map[string]time.Duration // by address: the newest question, as time since began, that it has answered
	tenants map[string]*tenants      // by address
}

func newAudience(term lead.Term) *audience {
	return &audience{term: term, began: time.Now(), heard: map[string]time.Duration{}, tenants: map[string]*tenants{}}
}

// tenants are the processes that follow the leader under one address. The second one may have been started in place of
// the first, which is not heard of again then.
type tenants struct {
	first, second string
	turns         int    // of the second in a row
	twin          string // the second, which the first has outlived
}

// settled is after how many turns in a row the second is taken for the only one.
const settled = 20

// meet notes a question of a process, and reports whether another one that lives has had its address before.
func (a *audience) meet(addr, id string) (twin bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	t := a.tenants[addr]
	switch {
	case id == "" || len(id) > maxAddr || len(addr) > maxAddr: // an older master has none
	case t == nil && len(a.tenants) < most:
		a.tenants[addr] = &tenants{first: id}
	case t == nil:
	case id == t.first:
		t.twin, t.turns = t.second, 0
	case id != t.second:
		t.second, t.turns = id, 1
	case t.twin == id:
		return true
	default:
		if t.turns++; t.turns > settled {
			*t = tenants{first: id}
		}
	}
	return false
}

// hear notes that a candidate has answered a question of this leadership.
func (a *audience) hear(addr string, question time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, known := a.heard[addr]; !known && (len(a.heard) >= most || len(addr) > maxAddr) {
		return
	}
	if question <= time.Since(a.began) {
		a.heard[addr] = max(a.heard[addr], question)
	}
}

// vouch reports whether all candidates have answered a question that was asked a moment ago.
func (a *audience) vouch(candidates []string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Since(a.began)
	return !slices.ContainsFunc(candidates, func(addr string) bool {
		question, heard := a.heard[addr]
		return !heard || now-question > fresh
	})
}

// promise is the word of a candidate that it will not serve.
type promise struct {
	mu      sync.Mutex
	term    lead.Term // of the leader that has it
	until   time.Time
	refused bool // this process is elected
}

// give promises not to serve for a while. It reports false if this process cannot promise that.
func (p *promise) give(term lead.Term) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refused || p.term != term && time.Now().Before(p.until) {
		return false
	}
	p.term, p.until = term, time.Now().Add(word)
	return true
}

// void ends the promise to a leader that is gone.
func (p *promise) void(term lead.Term) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.term == term {
		p.until = time.Time{}
	}
}

// refuse has nothing be promised while this process is elected.
func (p *promise) refuse(elected bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refused = elected
}

// rest is how long it still binds.
func (p *promise) rest() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Until(p.until)
}

// holds is whether this process may answer; nil: always.
func (t *tenure) holds() func() bool {
	if s, ok := t.election.store.(interface{ Holds() bool }); ok {
		return s.Holds
	}
	return nil
}

var errYields = fmt.Errorf("%w: it is left to a master that the one before knows", lead.ErrDeposed)

// permit returns, after the election, when no earlier leader that goes on without the store can serve any more.
func (e *election) permit(ctx context.Context) error {
	s, ok := e.store.(failsafe)
	if !ok {
		return nil
	}
	v, err := s.Vouchers(ctx)
	switch {
	case err != nil:
		return err
	case len(v.Candidates) == 0 || v.Addr == e.addr: // the process of this address is another one now
		return nil
	case slices.Contains(v.Candidates, e.addr):
		// An earlier process of the same address may have given its word.
		for early := word - time.Since(e.began); early > 0 || e.promise.rest() > 0; early = word - time.Since(e.began) {
			if gone(ctx, v.Addr) {
				return nil
			}
			if !retry.Sleep(ctx, poll) {
				return lead.ErrDeposed
			}
		}
		return nil
	}
	return e.outlast(ctx, s, v)
}

// outlast waits for the end of a leader that does not know this candidate, or leaves it to one that it knows.
func (e *election) outlast(ctx context.Context, s failsafe, v etcd.Vouchers) error {
	known := func(addr string) bool { return slices.Contains(v.Candidates, addr) }
	until := time.Now().Add(etcd.Unanswered)
	for said := false; time.Now().Before(until); said = true {
		switch {
		case gone(ctx, v.Addr):
			return nil
		case slices.ContainsFunc(s.Candidates(), known):
			return errYields
		case !said:
			e.log.Warn("elected, but not serving yet: the master before does not know this one, and may go on without "+
				"etcd. This one serves when that host refuses connections, or at the time given. If the process is gone for "+
				"certain, remove the key PREFIX/vouchers from etcd", "addr", v.Addr, "candidates", v.Candidates, "until", until)
		}
		if !retry.Sleep(ctx, redial) {
			return lead.ErrDeposed
		}
		if now, err := s.Vouchers(ctx); err == nil && len(now.Candidates) == 0 { // somebody knows that it is gone
			return nil
		}
	}
	return nil
}

// gone reports whether the host of a master says that nobody listens at its address.
func gone(ctx context.Context, addr string) bool {
	dialer := net.Dialer{Timeout: redial}
	c, err := dialer.DialContext(ctx, "tcp", addr)
	if err == nil {
		_ = c.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// tellSilence says once that the store is away, and once that it is back, until ctx ends.
func (e *election) tellSilence(ctx context.Context) {
	s, ok := e.store.(failsafe)
	if !ok {
		return
	}
	for away := false; retry.Sleep(ctx, redial); {
		switch silent := s.Silence() > noNews; {
		case silent && !away && s.Holds():
			e.log.Warn("the masters' store does not answer; this master goes on for as long as all others follow it")
			away = true
		case !silent && away:
			e.log.Info("the masters' store answers again")
			away = false
		}
	}
}

// heldListener has connections that answer nothing once another master may serve, also where this process was frozen
// and has not noticed yet.
type heldListener struct {
	net.Listener
	holds func() bool
}

func (l heldListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return heldConn{c, l.holds}, nil
}

type heldConn struct {
	net.Conn
	holds func() bool
}

// NetConn is the connection below.
func (c heldConn) NetConn() net.Conn { return c.Conn }

func (c heldConn) Write(b []byte) (int, error) {
	if !c.holds() {
		_ = c.Close()
		return 0, lead.ErrDeposed
	}
	return c.Conn.Write(b)
}
