// Package probe measures one node and its network for a check of nodes. It has the TCP test of a pair and of every rail
// between them (Prober), the rate of loopback (Loopback), RDMA with external tools, and the state of the node's
// interfaces without a partner (Host).
//
// A test opens a listener on an ephemeral port for as long as it lasts and leaves nothing. Both ends prove that they
// have the key of this very test, before a byte of data is sent or taken.
package probe

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"dlrover-run/netcheck"
)

// Config of a Prober.
type Config struct {
	// ID is this node's, as Peer.ID of the other end's assignment has it.
	ID string
	// NICs are the interfaces to test, in rail order; without any the one rail is Addr.
	NICs []netcheck.NIC
	Addr string
	// Loopback is the result of Loopback on this node, in 10^6 bit/s; 0: not known.
	Loopback float64
	// RDMATool is the path of perftest's ib_write_bw, "" for no tests with RDMA (see FindRDMA).
	RDMATool string
	// Start starts the tool, if this process reaps children that it does not know; nil: Cmd.Start and Cmd.Wait.
	Start Start `json:"-"`
}

// Prober carries out the tests of one node. It is safe for concurrent use.
type Prober struct {
	cfg     Config
	pace    *plan // of tests: in place of the plans
	limits  limits
	mu      sync.Mutex
	early   []*net.TCPListener // of the next test in which this end serves, by rail
	used    []string           // tests that were begun, the newest last
	noticed []netcheck.Finding
}

// keepUsed is the number of tests that a Prober remembers, so that none is carried out again.
const keepUsed = 1024

// RDMASkipped is the kind of a finding with the reason why RDMA was not tested.
const RDMASkipped = "rdma.skipped"

// Noticed returns the tests' findings about this node other than their results, each once.
func (p *Prober) Noticed() []netcheck.Finding {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.noticed)
}

func (p *Prober) notice(found []netcheck.Finding, peer string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range found {
		if f.Peer = peer; len(p.noticed) < netcheck.MaxFindings && !f.In(p.noticed) {
			p.noticed = append(p.noticed, f)
		}
	}
}

// New returns a Prober.
func New(cfg Config) *Prober { return &Prober{cfg: cfg, limits: usual} }

// Rails are tested at the same time: one after the other, eight of them would take half a minute where a whole check is
// to take ten seconds. A job uses them all at once, too. If their sum is more than the CPUs can do, cpu_bound marks a
// low rate that the network does not cause.

// rail is one pair of interfaces of a test.
type rail struct {
	number int
	out    outlet
	allow  []netip.Addr // where the peer may be
	mtu    int          // of both interfaces, 0 when it is not known
	mbps   int          // of the slower, 0 when it is not known
	limits limits
}

// Listen opens the listeners of the next Serve, one for each rail, and returns their addresses. They accept nobody
// before it: a peer that connects waits in the kernel. Nil: there are none, and Serve opens its own.
func (p *Prober) Listen(ctx context.Context) (addrs []string) {
	own, f := p.nics(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := len(p.early); f == nil && i < len(own); i++ {
		var ln *net.TCPListener
		o, err := newOutlet(own[i], nil)
		if err == nil {
			ln, err = o.listen(ctx)
		}
		if err != nil {
			p.closeLocked()
			return nil
		}
		p.early = append(p.early, ln)
	}
	for _, ln := range p.early {
		addrs = append(addrs, ln.Addr().String())
	}
	return addrs
}

// Close closes the listeners for which no Serve has come.
func (p *Prober) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closeLocked()
}

func (p *Prober) closeLocked() {
	for _, ln := range p.early {
		_ = ln.Close()
	}
	p.early = nil
}

// listeners takes those of Listen, for the first n rails.
func (p *Prober) listeners(n int) []*net.TCPListener {
	p.mu.Lock()
	defer p.mu.Unlock()
	n = min(n, len(p.early))
	taken := p.early[:n:n]
	p.early = p.early[n:]
	p.closeLocked()
	return taken
}

// Serve is the serving end of a test. It opens one listener for each rail, passes their addresses, host:port by rail,
// to ready, and takes part in the test. ready must return when ctx is done; its error ends the test. All is over, and
// everything closed, by a.Left or soon after ctx is done.
func (p *Prober) Serve(ctx context.Context, a netcheck.Assignment, ready func(addrs []string) error) netcheck.Result {
	ctx, cancel, limit := within(ctx, a)
	defer cancel()
	rails, f := p.begin(ctx, a)
	if f != nil {
		return result(a, nil, f)
	}
	doors, f := p.openDoors(ctx, a, rails, limit)
	defer func() {
		for _, d := range doors {
			d.close()
			d.greeters.Wait()
		}
	}()
	if f != nil {
		return result(a, nil, f)
	}
	var addrs []string
	for i, d := range doors {
		addrs = append(addrs, d.addr())
		rails[i].out.bind = false
	}
	if err := ready(addrs); err != nil {
		if ctx.Err() != nil {
			return result(a, nil, ended(ctx, faultf(netcheck.Own, "saying where this end listens: %v", err)))
		}
		return result(a, nil, faultf(netcheck.Own, "saying where this end listens: %v", err))
	}
	return p.test(ctx, a, rails, func(ctx context.Context, i int) (*session, *fault) {
		conns, key, f := doors[i].wait(ctx)
		if f != nil {
			return nil, f
		}
		return p.session(a, rails[i], serverRole, conns, key, limit), nil
	})
}

// Dial is the other end: it connects to a.Peer.Addrs. All is over, and everything closed, by a.Left or soon after ctx
// is done.
func (p *Prober) Dial(ctx context.Context, a netcheck.Assignment) netcheck.Result {
	ctx, cancel, limit := within(ctx, a)
	defer cancel()
	rails, f := p.begin(ctx, a)
	if f != nil {
		return result(a, nil, f)
	}
	if len(a.Peer.Addrs) == 0 {
		return result(a, nil, faultf(netcheck.Own, "the assignment names no address of %s", a.Peer.Name))
	}
	rails = rails[:min(len(rails), len(a.Peer.Addrs))]
	for i := range rails {
		if a.Told { // the other end may get its assignment later
			rails[i].limits.proof = max(rails[i].limits.proof, toldProof)
		}
	}
	return p.test(ctx, a, rails, func(ctx context.Context, i int) (*session, *fault) {
		conns, key, f := connect(ctx, &rails[i], newTicket(a, rails[i].number, p.cfg.ID, dialerRole), a.Peer.Addrs[i])
		if f != nil {
			return nil, f
		}
		for _, c := range conns {
			_ = c.SetDeadline(limit)
		}
		return p.session(a, rails[i], dialerRole, conns, key, limit), nil
	})
}

// toldProof is the time of a handshake with an end that listens before it has its assignment.
const toldProof = 4 * time.Second

// minLeft is the least time for a test, even if its assignment has less.
const minLeft = 100 * time.Millisecond

func within(ctx context.Context, a netcheck.Assignment) (context.Context, context.CancelFunc, time.Time) {
	limit := time.Now().Add(max(a.Left, minLeft))
	ctx, cancel := context.WithDeadline(ctx, limit)
	return ctx, cancel, limit
}

// begin finds the rails of a test. A test that was begun before is not begun again: its key has served.
func (p *Prober) begin(ctx context.Context, a netcheck.Assignment) ([]rail, *fault) {
	switch {
	case ctx.Err() != nil:
		return nil, ended(ctx, faultf(netcheck.Stalled, "the test was not over in time"))
	case len(a.Key) < 16:
		return nil, faultf(netcheck.Own, "the key of the test has %d bytes: need 16 at least", len(a.Key))
	case !p.use(a.Test):
		return nil, faultf(netcheck.Own, "test %s was carried out before, and its key serves once", a.Test)
	}
	allow, err := peerAddrs(ctx, a.Peer)
	if err != nil {
		return nil, faultf(netcheck.Own, "%v", err)
	}
	return p.rails(ctx, a.Peer, allow)
}

func (p *Prober) use(test string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.Contains(p.used, test) {
		return false
	}
	if len(p.used) == keepUsed {
		p.used = p.used[1:]
	}
	p.used = append(p.used, test)
	return true
}

func (p *Prober) rails(ctx context.Context, peer netcheck.Peer, allow []netip.Addr) ([]rail, *fault) {
	own, f := p.nics(ctx)
	if f != nil {
		return nil, f
	}
	theirs := peer.NICs
	if len(theirs) == 0 {
		theirs = []netcheck.NIC{{}}
	}
	var rails []rail
	for i := range min(len(own), len(theirs)) {
		o, err := newOutlet(own[i], allow)
		if err != nil {
			return nil, faultf(netcheck.Own, "rail %d: %v", i, err)
		}
		rails = append(rails, rail{number: i, out: o, allow: allow, mtu: smaller(own[i].MTU, theirs[i].MTU),
			mbps: smaller(own[i].Mbps, theirs[i].Mbps), limits: p.limits})
	}
	return rails, nil
}

// nics are the interfaces to test.
func (p *Prober) nics(ctx context.Context) ([]netcheck.NIC, *fault) {
	if len(p.cfg.NICs) > 0 {
		return p.cfg.NICs, nil
	}
	addrs, err := resolve(ctx, p.cfg.Addr)
	if err != nil {
		return nil, faultf(netcheck.Own, "%v", err)
	}
	return []netcheck.NIC{{Addr: addrs[0].String()}}, nil
}

// smaller of two numbers; 0 is unknown.
func smaller(a, b int) int {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// peerAddrs are the only addresses that take part, in addition to this node's.
func peerAddrs(ctx context.Context, peer netcheck.Peer) ([]netip.Addr, error) {
	var all []netip.Addr
	if peer.Addr != "" {
		addrs, err := resolve(ctx, peer.Addr)
		if err != nil {
			return nil, err
		}
		all = addrs
	}
	for _, n := range peer.NICs {
		a, err := netip.ParseAddr(n.Addr)
		if err != nil {
			return nil, fmt.Errorf("address %q of %s's interface %q is not an IP address", n.Addr, peer.Name, n.Name)
		}
		all = append(all, a.Unmap().WithZone(""))
	}
	return all, nil
}

// resolve returns the addresses of a host, which most often is one already.
func resolve(ctx context.Context, host string) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{a.Unmap().WithZone("")}, nil
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err == nil && len(addrs) == 0 {
		err = fmt.Errorf("no address")
	}
	if err != nil {
		return nil, fmt.Errorf("address %q of a node: %w", host, err)
	}
	for i, a := range addrs {
		addrs[i] = a.Unmap().WithZone("")
	}
	return addrs, nil
}

func (p *Prober) openDoors(ctx context.Context, a netcheck.Assignment, rails []rail, limit time.Time) (
	[]*door, *fault) {
	var doors []*door
	listeners := p.listeners(len(rails))
	for i, r := range rails {
		if i == len(listeners) {
			ln, err := r.out.listen(ctx)
			if err != nil {
				return doors, faultf(netcheck.Own, "listening at %s: %v", r.out.from, err)
			}
			listeners = append(listeners, ln)
		}
		doors = append(doors, openDoor(listeners[i], r, newTicket(a, r.number, p.cfg.ID, serverRole), limit,
			max(maxStrangers/len(rails), fewStrangers)))
	}
	return doors, nil
}

func (p *Prober) session(a netcheck.Assignment, r rail, as role, conns []*net.TCPConn, key []byte,
	limit time.Time) *session {
	s := &session{role: as, rail: r.number, out: r.out, mtu: r.mtu, mbps: r.mbps, plan: fullPlan, pings: 500, limit: limit,
		limits: r.limits, ctl: newControl(conns[0], key, as, limit), streams: conns[1:],
		rdma: rdmaEnd{start: p.cfg.Start, limits: r.limits, tool: p.cfg.RDMATool, hca: r.out.nic.HCA}}
	if from, err := netip.ParseAddrPort(conns[0].RemoteAddr().String()); err == nil {
		s.peer = from.Addr().Unmap()
	}
	if a.Quick {
		s.plan, s.pings, s.rdma = quickPlan, 100, rdmaEnd{}
	}
	if p.pace != nil {
		s.plan = *p.pace
	}
	return s
}

// test runs all rails at the same time; open gets the connections of one.
func (p *Prober) test(ctx context.Context, a netcheck.Assignment, rails []rail,
	open func(context.Context, int) (*session, *fault)) netcheck.Result {
	sessions, faults := make([]*session, len(rails)), make([]*fault, len(rails))
	var all sync.WaitGroup
	for i := range rails {
		all.Go(func() {
			sessions[i], faults[i] = open(ctx, i)
			if faults[i] == nil {
				faults[i] = sessions[i].run(ctx)
			}
			if faults[i] != nil && len(rails) > 1 {
				faults[i] = faultf(faults[i].class, "rail %d (%s): %s", i, rails[i].out.nic.Name, faults[i].text)
			}
		})
	}
	all.Wait()
	r := result(a, p.flows(sessions), worst(faults))
	for _, s := range sessions {
		if s != nil {
			p.notice(s.notices, a.Peer.Name)
		}
	}
	return r
}

// cpuBusy is the share of its CPUs from which on an end is its own limit.
const cpuBusy = 0.95

// loopbackRoom is how much more than a rate loopback must reach for the rate to be the network's.
const loopbackRoom = 1.3

// flows collects the measurements, and marks those in which this end was its own limit.
func (p *Prober) flows(sessions []*session) []netcheck.Flow {
	var flows []netcheck.Flow
	busy, sum := 0.0, 0.0
	for _, s := range sessions {
		if s != nil && (s.flow.Mbps > 0 || s.flow.Segments > 0 || s.flow.P50 > 0 || s.flow.MTU > 0) {
			flows = append(flows, s.flow)
			flows = append(flows, s.more...)
			busy, sum = max(busy, s.busy), sum+s.flow.Mbps
		}
	}
	bound := busy >= cpuBusy || p.cfg.Loopback > 0 && p.cfg.Loopback < loopbackRoom*sum
	for i := range flows {
		flows[i].CPUBound = bound && flows[i].Kind == ""
	}
	return flows
}

func result(a netcheck.Assignment, flows []netcheck.Flow, f *fault) netcheck.Result {
	r := netcheck.Result{Test: a.Test, Flows: flows}
	if f != nil {
		r.Class, r.Text = f.class, f.text
	}
	return r
}
