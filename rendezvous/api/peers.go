package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// errStranger: the server has no job token, and the caller's host is none of its job's. A pod may get its name later
// than it starts, so trying again may help.
var errStranger = errors.New("the rendezvous has no job token and serves the hosts of its job alone")

// How names are looked up.
const (
	peerLookups = 16               // at a time
	peerLookup  = 2 * time.Second  // for one name
	peerWait    = 5 * time.Second  // of a request
	peerPass    = 10 * time.Second // for all names; the next pass begins with those that are left
	peerPause   = time.Second      // between two passes, and
	peerCost    = 4 * time.Millisecond
	peerFresh   = 30 * time.Second // how long an address is its name's without another look
	peerSay     = 10 * time.Second // between two lines of the log
)

// PeersConfig lists the hosts of a job.
type PeersConfig struct {
	Names []string // of hosts, or addresses
	Text  string   // the same for people
	// Lookup finds the addresses of a name; nil asks the resolver.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)
	Log    *slog.Logger
}

// Peers decides by its address whether a host is one of a job, whose host names it has. It looks the names up when an
// unknown address comes. So the new address of a replaced host is accepted, and the old one forgotten. While a resolver
// does not answer, the last results stay. It owns a goroutine while addresses are unknown, until Close.
type Peers struct {
	cfg     PeersConfig
	ctx     context.Context
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	lookups chan struct{} // holds one for each

	mu      sync.Mutex
	hosts   []peerHost
	at      map[netip.Addr]int // which of the hosts
	waiting chan struct{}      // closed when the next pass has ended; nil: no request waits for one
	busy    bool               // there is a goroutine for passes
	next    time.Time          // no pass begins before
	said    time.Time
	refused int // since then
}

type peerHost struct {
	name  string
	fixed bool // the name is an address
	addrs []netip.Addr
	asked time.Time
}

// NewPeers looks nothing up.
func NewPeers(cfg PeersConfig) *Peers {
	if cfg.Lookup == nil {
		cfg.Lookup = func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		}
	}
	p := &Peers{cfg: cfg, lookups: make(chan struct{}, peerLookups), at: map[netip.Addr]int{}}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	for i, name := range cfg.Names {
		h := peerHost{name: name}
		if a, err := netip.ParseAddr(name); err == nil {
			h.fixed = true
			p.at[bareAddr(a)] = i
		}
		p.hosts = append(p.hosts, h)
	}
	return p
}

func bareAddr(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }

// Close ends the lookups. Nil is closed.
func (p *Peers) Close() {
	if p == nil {
		return
	}
	p.mu.Lock()
	p.cancel()
	p.mu.Unlock()
	p.wg.Wait()
}

// Check returns errStranger unless one of the hosts has the address.
func (p *Peers) Check(ctx context.Context, addr netip.Addr) error {
	ctx, cancel := context.WithTimeout(ctx, peerWait)
	defer cancel()
	addr = bareAddr(addr)
	if p.confirmed(ctx, addr) {
		return nil
	}
	p.await(ctx)
	if _, known := p.host(addr); known {
		return nil
	}
	return p.turnAway(addr)
}

func (p *Peers) host(addr netip.Addr) (h peerHost, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i, known := p.at[addr]
	if known {
		h = p.hosts[i]
	}
	return h, known
}

// confirmed looks again whether a name still has its address, if that was long ago.
func (p *Peers) confirmed(ctx context.Context, addr netip.Addr) bool {
	h, known := p.host(addr)
	if !known || h.fixed || time.Since(h.asked) < peerFresh {
		return known
	}
	p.mu.Lock()
	i := p.at[addr]
	p.mu.Unlock()
	p.resolve(ctx, i)
	_, known = p.host(addr)
	return known
}

// await returns after all names have been looked up, or as many as there was time for.
func (p *Peers) await(ctx context.Context) {
	p.mu.Lock()
	if p.ctx.Err() != nil {
		p.mu.Unlock()
		return
	}
	if p.waiting == nil {
		p.waiting = make(chan struct{})
	}
	done := p.waiting
	if !p.busy {
		p.busy = true
		p.wg.Go(p.passes)
	}
	p.mu.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
	case <-p.ctx.Done():
	}
}

// passes looks all names up for as long as a request waits for it.
func (p *Peers) passes() {
	for p.pause() {
		p.mu.Lock()
		done := p.waiting
		p.waiting, p.busy = nil, done != nil
		p.mu.Unlock()
		if done == nil {
			return
		}
		n := p.pass()
		p.mu.Lock()
		p.next = time.Now().Add(max(peerPause, time.Duration(n)*peerCost))
		p.mu.Unlock()
		close(done)
	}
}

// pause waits until the next pass may begin. It reports false after Close.
func (p *Peers) pause() bool {
	p.mu.Lock()
	t := time.NewTimer(time.Until(p.next))
	p.mu.Unlock()
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-p.ctx.Done():
		return false
	}
}

// pass returns how many names it has looked up.
func (p *Peers) pass() int {
	ctx, cancel := context.WithTimeout(p.ctx, peerPass)
	defer cancel()
	order := p.order()
	var n atomic.Int64
	var wg sync.WaitGroup
	for range min(peerLookups, len(order)) {
		wg.Go(func() {
			for i := n.Add(1) - 1; int(i) < len(order) && ctx.Err() == nil; i = n.Add(1) - 1 {
				p.resolve(ctx, order[i])
			}
		})
	}
	wg.Wait()
	return min(int(n.Load()), len(order))
}

// order begins with the hosts that have no address, and of these with the one that has waited longest.
func (p *Peers) order() (all []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, h := range p.hosts {
		if !h.fixed {
			all = append(all, i)
		}
	}
	slices.SortFunc(all, func(a, b int) int {
		x, y := p.hosts[a], p.hosts[b]
		return cmp.Or(min(len(x.addrs), 1)-min(len(y.addrs), 1), x.asked.Compare(y.asked))
	})
	return all
}

// resolve looks a name up. A name that does not exist has no address; if no server answers, the name keeps its
// addresses.
func (p *Peers) resolve(ctx context.Context, i int) {
	select {
	case p.lookups <- struct{}{}:
		defer func() { <-p.lookups }()
	case <-ctx.Done():
		return
	}
	ctx, cancel := context.WithTimeout(ctx, peerLookup)
	defer cancel()
	addrs, err := p.cfg.Lookup(ctx, p.cfg.Names[i])
	gone, isDNS := errors.AsType[*net.DNSError](err)
	p.mu.Lock()
	defer p.mu.Unlock()
	h := &p.hosts[i]
	h.asked = time.Now()
	if err != nil && !(isDNS && gone.IsNotFound) {
		return
	}
	for _, a := range h.addrs {
		if p.at[a] == i {
			delete(p.at, a)
		}
	}
	h.addrs = nil
	for _, a := range addrs {
		a = bareAddr(a)
		h.addrs = append(h.addrs, a)
		if j, known := p.at[a]; !known || !p.hosts[j].fixed {
			p.at[a] = i
		}
	}
}

// turnAway logs rejected hosts, at a limited rate.
func (p *Peers) turnAway(addr netip.Addr) error {
	p.mu.Lock()
	p.refused++
	n := p.refused
	say := time.Since(p.said) >= peerSay
	if say {
		p.said, p.refused = time.Now(), 0
	}
	p.mu.Unlock()
	if say {
		p.cfg.Log.Warn("a host that is not of this job was turned away", "addr", addr.String(), "times", n,
			"hosts", p.cfg.Text)
	}
	return fmt.Errorf("%w: this one has the address %s, and none of these has it: %s; %s", errStranger, addr, p.cfg.Text,
		tokenFix)
}

// tokenFix is the advice if there is no job token.
const tokenFix = "give the job a token: the same DLROVER_TOKEN (openssl rand -hex 16) or --token-file everywhere"

// checkPeer is for a request from another host to a server without a token. Its connection is known from then on.
func (s *server) checkPeer(req *http.Request, addr netip.Addr) error {
	if c := lineOf(req.Context()); c == nil || !c.peer.Load() {
		if ofThisHost(addr) { // of a process that has closed its end, and could be any
			return fmt.Errorf("%w: the connection is within this host, and nobody has its other end", ErrUnauthorized)
		}
		if err := s.cfg.Peers.Check(req.Context(), addr); err != nil {
			return err
		}
		if c != nil {
			c.peer.Store(true)
		}
	}
	if s.launchers(req) {
		return nil
	}
	return fmt.Errorf("%w: this rendezvous has none, and serves other hosts only what launchers need; run this where it "+
		"is served, as its user, or %s", ErrUnauthorized, tokenFix)
}

// ofThisHost: when it cannot be known, too.
func ofThisHost(addr netip.Addr) bool {
	as, err := net.InterfaceAddrs()
	return err != nil || slices.ContainsFunc(as, func(a net.Addr) bool {
		p, err := netip.ParsePrefix(a.String())
		return err == nil && bareAddr(p.Addr()) == bareAddr(addr)
	})
}

// launchers reports whether a launcher makes this request, by its method and the part of its path after the run.
func (s *server) launchers(req *http.Request) bool {
	rest, is := strings.CutPrefix(req.URL.EscapedPath(), "/v1/runs/")
	_, call, _ := strings.Cut(rest, "/")
	call = req.Method + " " + call
	return is && (slices.Contains(ownCalls, call) || slices.Contains(s.cfg.PeerCalls, call))
}

// ownCalls are the requests of launchers to the API itself, not to mounts.
var ownCalls = []string{"POST join", "GET watch", "POST ready", "POST failing", "POST success", "POST stepped",
	"POST cleared", "POST barred", "POST doubt", "POST leaving", "POST leave", "GET world"}
