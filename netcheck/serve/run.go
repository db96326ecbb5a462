package serve

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/runhost"
	"dlrover-run/netcheck"
)

// run is a Check with a clock and with held requests. Its lock is held for one step at a time. Of Config only Topology
// is called under the lock, because the rendezvous calls gone with its own lock held.
type run struct {
	runhost.Run
	hub *Hub
	id  string

	spec    netcheck.Spec
	check   check // nil before the first Expect
	nodes   map[string]*member
	active  bool // a check has begun and not ended
	keys    map[string]*key
	seq     uint64      // of the newest assignment; larger than any of an earlier service
	sweeper *time.Timer // nil: no request is held
	began   time.Time   // the newest check
	used    time.Time   // when something happened last
}

// member is a node that has been told to be checked.
type member struct {
	visit    string   // "" before it has arrived
	hosts    []string // where it may listen
	newest   netcheck.Assignment
	since    time.Time // when that was made
	readied  bool      // it has sent Ready for it, or need not
	reported bool      // it has reported on it
	waiter   *waiter
}

// waiter is a request that is held. Its answer is given once, with the run locked, and must not block.
type waiter struct {
	seq    uint64
	answer func(netcheck.Assignment, error)
	until  time.Time // when it is answered without news
}

// least is how long apart requests are looked for that were held long enough.
const least = time.Second

// key is the secret of one test, for as long as the newest assignment of some node is of that test.
type key struct {
	secret []byte
	uses   int
}

func (r *run) expect(subjects, helpers []string) error {
	spec, err := r.hub.cfg.Spec(r.id)
	if err != nil {
		return err
	}
	names := r.names(subjects, helpers)
	r.Lock()
	defer r.Unlock()
	if r.Err() != nil {
		return r.Err()
	}
	now := time.Now()
	if r.check == nil || !r.active && spec != r.spec {
		r.startLocked(spec)
	}
	for _, id := range slices.Concat(subjects, helpers) {
		if r.nodes[id] == nil {
			r.nodes[id] = &member{}
		}
	}
	r.beginLocked(now)
	r.stepLocked(now, netcheck.Expect{IDs: subjects, Helpers: helpers, Names: names})
	return nil
}

// names are those that the rendezvous has for IDs.
func (r *run) names(ids ...[]string) map[string]string {
	if r.hub.cfg.Names == nil {
		return nil
	}
	return r.hub.cfg.Names(r.id, slices.Concat(ids...))
}

// startLocked makes a Check of the present rules. All nodes leave the old one.
func (r *run) startLocked(spec netcheck.Spec) {
	var seed [8]byte
	_, _ = rand.Read(seed[:]) // never fails
	n := uint64(0)
	for _, b := range seed {
		n = n<<8 | uint64(b)
	}
	for id := range r.nodes {
		r.dropLocked(id)
	}
	r.spec = spec
	r.check = r.hub.cfg.check(netcheck.Config{Spec: spec, Seed: n, Topology: r.hub.cfg.Topology})
}

// beginLocked marks the beginning of a check with the next event, if none is running.
func (r *run) beginLocked(now time.Time) {
	if !r.active {
		r.active, r.began = true, now
	}
}

func (r *run) gone(id string) {
	r.Lock()
	defer r.Unlock()
	if r.Err() == nil {
		r.goneLocked(id)
	}
}

func (r *run) goneLocked(id string) {
	if r.nodes[id] != nil {
		r.dropLocked(id)
		r.stepLocked(time.Now(), netcheck.Gone{ID: id})
	}
}

// leaveLocked ends a visit. The launcher may begin another one until the rendezvous has another directive for it. Two
// orders to check may follow each other closely, as after a daemon's restart.
func (r *run) leaveLocked(m *member, id string) {
	r.releaseLocked(m)
	m.tell(rest(0), nil)
	*m = member{}
	r.stepLocked(time.Now(), netcheck.Gone{ID: id})
}

// dropLocked forgets a member: its launcher may not take part any more.
func (r *run) dropLocked(id string) {
	m := r.nodes[id]
	r.releaseLocked(m)
	m.tell(netcheck.Assignment{}, notTold(r.id))
	delete(r.nodes, id)
}

// next steps in the request's message, and waits for an assignment that the node does not know.
func (r *run) next(ctx context.Context, req Request) (netcheck.Assignment, error) {
	type reply struct {
		netcheck.Assignment
		err error
	}
	news := make(chan reply, 1)
	w := &waiter{seq: req.Seq, answer: func(a netcheck.Assignment, err error) { news <- reply{a, err} }}
	if a, err, done := r.take(req, w); done {
		return a, err
	}
	select {
	case got := <-news:
		return got.Assignment, got.err
	case <-ctx.Done():
		r.drop(req.ID, w, context.Cause(ctx))
	}
	got := <-news // of drop, or of an earlier answer
	return got.Assignment, got.err
}

// rest is the answer without news for a node that has the assignment seq.
func rest(seq uint64) netcheck.Assignment { return netcheck.Assignment{Seq: seq, Duty: netcheck.Rest} }

// drop answers a request that is still held: there is no news.
func (r *run) drop(id string, w *waiter, err error) {
	r.Lock()
	defer r.Unlock()
	if m := r.nodes[id]; m != nil && m.waiter == w {
		m.tell(rest(w.seq), err)
	}
}

// take steps in the request's message. It returns the answer, or leaves w to be answered later.
func (r *run) take(req Request, w *waiter) (_ netcheck.Assignment, err error, done bool) {
	r.Lock()
	defer r.Unlock()
	if r.Err() != nil {
		return netcheck.Assignment{}, r.Err(), true
	}
	now := time.Now()
	m := r.nodes[req.ID]
	if m != nil && m.visit == req.Visit && req.Leave {
		r.leaveLocked(m, req.ID)
		return rest(req.Seq), nil, true
	}
	if m != nil && req.Arrive != nil && m.visit != req.Visit {
		w.seq = 0
		r.arriveLocked(now, m, req)
	}
	switch {
	case m == nil:
		return netcheck.Assignment{}, notTold(r.id), true
	case m.visit != req.Visit:
		if m.visit == "" { // it will arrive after its local checks
			r.stepLocked(now, netcheck.Busy{ID: req.ID})
		}
		return netcheck.Assignment{Duty: Introduce}, nil, true
	}
	if err := r.heardLocked(now, m, req); err != nil {
		return netcheck.Assignment{}, err, true
	}
	switch {
	case r.nodes[req.ID] != m: // the message ended its part
		return netcheck.Assignment{}, notTold(r.id), true
	case m.newest.Duty != "" && m.newest.Seq != w.seq:
		return m.present(now), nil, true
	case req.NoWait:
		return rest(w.seq), nil, true
	}
	m.tell(rest(w.seq), nil) // of this node only the newest request is held
	m.waiter, w.until = w, now.Add(hold)
	if r.sweeper == nil {
		r.sweeper = time.AfterFunc(hold, r.sweep)
	}
	return netcheck.Assignment{}, nil, false
}

// sweep answers the requests that were held long enough.
func (r *run) sweep() {
	r.Lock()
	defer r.Unlock()
	now := time.Now()
	var next time.Time
	for _, m := range r.nodes {
		switch {
		case m.waiter == nil:
		case !m.waiter.until.After(now):
			m.tell(rest(m.waiter.seq), nil)
		case next.IsZero() || m.waiter.until.Before(next):
			next = m.waiter.until
		}
	}
	r.sweeper = nil
	if !next.IsZero() && r.Err() == nil {
		r.sweeper = time.AfterFunc(max(next.Sub(now), least), r.sweep)
	}
}

func (r *run) arriveLocked(now time.Time, m *member, req Request) {
	n := *req.Arrive
	n.ID = req.ID
	r.releaseLocked(m)
	m.tell(rest(0), nil)
	m.visit, m.newest, m.readied, m.reported = req.Visit, netcheck.Assignment{}, false, false
	m.hosts = hosts(n)
	r.beginLocked(now)
	r.stepLocked(now, netcheck.Arrive{Node: n})
	if m.newest.Duty == "" {
		r.listensLocked(now, m, req)
	}
}

// listensLocked steps in where a node listens already. With other addresses than its own it has to send Ready.
func (r *run) listensLocked(now time.Time, m *member, req Request) {
	if len(req.Listens) > 0 && m.owns("listens", req.Listens) == nil {
		r.stepLocked(now, netcheck.Listens{ID: req.ID, Addrs: req.Listens})
	}
}

// owns returns an error if an address is not the node's.
func (m *member) owns(what string, addrs []string) error {
	for _, addr := range addrs {
		if host, _, _ := net.SplitHostPort(addr); !slices.Contains(m.hosts, host) {
			return fmt.Errorf("%w: %s: %q is none of the node's addresses %q", errBadRequest, what, addr, m.hosts)
		}
	}
	return nil
}

// hosts are the addresses to which a node may have others connect.
func hosts(n netcheck.Node) []string {
	hs := make([]string, 0, 1+len(n.NICs))
	if n.Addr != "" {
		hs = append(hs, n.Addr)
	}
	for _, nic := range n.NICs {
		if !slices.Contains(hs, nic.Addr) {
			hs = append(hs, nic.Addr)
		}
	}
	return hs
}

// heardLocked steps in a Ready or Report of the newest assignment, once. One of another test is late, and void.
func (r *run) heardLocked(now time.Time, m *member, req Request) error {
	a := &m.newest
	serves := a.Duty == netcheck.Serve || a.Duty == netcheck.Join
	switch {
	case req.Ready != nil && req.Ready.Test == a.Test && serves && !m.readied:
		if err := m.owns("ready.addrs", req.Ready.Addrs); err != nil {
			return err
		}
		m.readied = true
		r.stepLocked(now, netcheck.Ready{ID: req.ID, Test: req.Ready.Test, Addrs: req.Ready.Addrs})
	case req.Report != nil && req.Report.Test == tested(a) && !m.reported:
		m.reported = true
		r.listensLocked(now, m, req)
		r.stepLocked(now, netcheck.Report{ID: req.ID, Result: *req.Report})
	}
	return nil
}

// tested is the Test of the report that a is answered with.
func tested(a *netcheck.Assignment) string {
	if a.Duty == netcheck.Decided {
		return netcheck.AfterVerdict
	}
	return a.Test
}

// tell answers the held request, if there is one.
func (m *member) tell(a netcheck.Assignment, err error) {
	if w := m.waiter; w != nil {
		m.waiter = nil
		w.answer(a, err)
	}
}

// present is the newest assignment with the time that is left now. A node that is too late for a test is told to rest.
func (m *member) present(now time.Time) netcheck.Assignment {
	a := m.newest
	if a.Peer.ID != "" {
		a.Peer.ID = netcheck.Alias(a.Peer.ID)
	}
	if a.Left > 0 {
		if a.Left -= now.Sub(m.since); a.Left <= 0 {
			return rest(a.Seq)
		}
	}
	return a
}

func (r *run) stepLocked(now time.Time, ev netcheck.Event) {
	r.used = now
	for _, a := range r.check.Step(now, ev) {
		r.performLocked(now, a)
	}
	r.Arm(now, r.check.Next())
}

func (r *run) performLocked(now time.Time, a netcheck.Action) {
	switch {
	case a.Assign != nil:
		r.assignLocked(now, a.To, *a.Assign)
	case a.Silent != "":
		r.silentLocked(a.Silent, a.Verdict)
	case a.Note != nil:
		n := r.aliased(*a.Note)
		r.Tell(func() { r.hub.cfg.Note(r.id, n) })
		if a.Note.Event == job.EventCheckEnded {
			r.active = false
			r.hub.stats.ended(now.Sub(r.began))
		}
	}
}

// aliased is a note that names a node by its ID, because it never came, without that.
func (r *run) aliased(n job.Note) job.Note {
	if r.nodes[n.Node] != nil {
		n.Text = strings.ReplaceAll(n.Text, n.Node, "the node "+netcheck.Alias(n.Node))
		n.Node = ""
	}
	return n
}

func (r *run) assignLocked(now time.Time, to string, a netcheck.Assignment) {
	m := r.nodes[to]
	if m == nil {
		return // it has left in the same step
	}
	r.releaseLocked(m)
	r.seq++
	a.Seq = r.seq
	if a.Test != "" {
		a.Key = r.keyLocked(a.Test)
	}
	m.newest, m.since, m.readied, m.reported = a, now, a.Told, false
	if a.Duty == netcheck.Decided {
		r.decidedLocked(to, m)
	}
	m.tell(m.present(now), nil)
}

// decidedLocked counts a verdict. An excluded node reports that to the rendezvous itself, which ends its part here.
// Without such a report, as from a stopped or dead node, the rendezvous would wait until the node is found lost.
func (r *run) decidedLocked(id string, m *member) {
	v, seq := m.newest.Verdict, m.newest.Seq
	r.hub.stats.decided(v)
	if v != nil && v.Excluded {
		time.AfterFunc(obeyTime, func() { r.enforce(id, m, seq) })
	}
}

func (r *run) enforce(id string, m *member, seq uint64) {
	r.Lock()
	defer r.Unlock()
	if r.Err() != nil || r.nodes[id] != m || m.newest.Seq != seq {
		return
	}
	r.barLocked(id, m.newest.Verdict)
}

// silentLocked bars a node that the Check does not wait for any longer.
func (r *run) silentLocked(id string, v *netcheck.Verdict) {
	r.hub.stats.decided(v)
	if r.nodes[id] == nil || v == nil || !v.Excluded { // its launcher, or the gate's time, answers for it
		return
	}
	r.barLocked(id, v)
}

func (r *run) barLocked(id string, v *netcheck.Verdict) {
	r.dropLocked(id)
	aspect, reason := v.Aspect(), v.Reason
	r.Tell(func() { r.hub.cfg.Bar(r.id, id, aspect, reason) })
}

// keyLocked is the secret of a test, for one more node.
func (r *run) keyLocked(test string) []byte {
	k := r.keys[test]
	if k == nil {
		k = &key{secret: make([]byte, 32)}
		_, _ = rand.Read(k.secret) // never fails
		r.keys[test] = k
	}
	k.uses++
	return k.secret
}

// releaseLocked lets the key of a member's newest assignment go.
func (r *run) releaseLocked(m *member) {
	if k := r.keys[m.newest.Test]; k != nil && m.newest.Key != nil {
		if k.uses--; k.uses == 0 {
			delete(r.keys, m.newest.Test)
		}
	}
	m.newest.Key = nil
}

// Tick implements runhost.Machine.
func (r *run) Tick(now time.Time) { r.stepLocked(now, netcheck.Tick{}) }

// Idle implements runhost.Machine.
func (r *run) Idle(now time.Time) bool { return !r.active && now.Sub(r.used) > retention }

// Closed implements runhost.Machine. It ends every held request.
func (r *run) Closed() {
	if r.sweeper != nil {
		r.sweeper.Stop()
	}
	for _, m := range r.nodes {
		m.tell(netcheck.Assignment{}, r.Err())
	}
}

func (r *run) picture() (netcheck.Picture, error) {
	r.Lock()
	defer r.Unlock()
	if r.Err() != nil {
		return netcheck.Picture{}, r.Err()
	}
	if r.check == nil {
		return netcheck.Picture{}, unknownRun(r.id)
	}
	p := r.check.Picture()
	p.Nodes = slices.Clone(p.Nodes)
	for i := range p.Nodes {
		p.Nodes[i].Node.ID = netcheck.Alias(p.Nodes[i].Node.ID)
	}
	return p, nil
}
