package checkpointd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/replica"
	"dlrover-run/checkpointd/retry"
	"dlrover-run/checkpointd/shm"
)

// anyRank stands for a save whose every holder has the full state.
const anyRank = -1

// Times for nodes whose daemon is away: it may be started again and listen elsewhere.
const (
	awayFirst     = 250 * time.Millisecond // until a copy is tried again; doubles
	awayMost      = 8 * time.Second        // up to this
	fetchFirst    = 100 * time.Millisecond // until a fetch is tried again; doubles
	fetchTries    = 5                      // then it is given up
	renewPatience = 2 * time.Second        // for a coordinator that has lost its memory
	pinPatience   = time.Second            // for a writer that is about to unlock its segment
)

// peers keeps copies of our shards on other nodes, and theirs here.
type peers struct {
	d      *Daemon
	nodes  int // that hold each shard, this one included
	server *replica.Server
	client *replica.Client
	port   int
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	wake   chan struct{}

	mu       sync.Mutex
	key      string             // of the epoch that known belongs to
	known    []coordinator.Peer // all nodes of the epoch
	partners []replica.Peer
	pending  map[origin]pendingCopy // newest save to be copied
	given    map[origin]pendingCopy // newest save that all partners have, or do not want
	away     map[int]backoff        // partners that could not be reached, by node
	asking   context.CancelFunc     // ends the exchange of the epoch
}

// origin is what the saves of a rank into a directory have in common.
type origin struct {
	rank int
	dir  string
}

// pendingCopy is a save that is to be copied.
type pendingCopy struct {
	save  string
	saved time.Time
	done  map[int]bool // partners that have it, by node
}

// backoff is when to try a partner again that could not be reached.
type backoff struct {
	until  time.Time
	pauses retry.Backoff
	pause  time.Duration // the last one
}

// wantCopies starts keeping copies on nodes nodes, this one included.
func (d *Daemon) wantCopies(nodes int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if nodes < 2 || d.peers != nil || d.world.GroupWorldSize < 2 || d.ctx.Err() != nil {
		return
	}
	p, err := d.newPeers(nodes)
	if err != nil {
		d.log.Warn("checkpoints are not copied to other nodes", "err", err)
		return
	}
	d.peers = p
	p.exchange(d.world)
}

func (d *Daemon) newPeers(nodes int) (*peers, error) {
	if d.cfg.Remote == nil || d.cfg.Addr == "" {
		return nil, errors.New("copies need a rendezvous that all nodes reach: use --rdzv-backend=c10d or dlrover-master")
	}
	ln, err := net.Listen("tcp", net.JoinHostPort(d.cfg.Addr, "0"))
	if err != nil {
		return nil, fmt.Errorf("listen for copies of other nodes: %w", err)
	}
	p := &peers{d: d, nodes: nodes, port: ln.Addr().(*net.TCPAddr).Port, wake: make(chan struct{}, 1), pending: map[origin]pendingCopy{}, given: map[origin]pendingCopy{}, away: map[int]backoff{}, asking: func() {},
		client: &replica.Client{Token: d.cfg.Token}}
	p.server = replica.NewServer(d.cfg.Token, replicaStore{d}, d.log)
	p.ctx, p.cancel = context.WithCancel(d.ctx)
	p.wg.Go(func() { _ = p.server.Serve(ln) }) // ends with Close
	p.wg.Go(p.push)
	return p, nil
}

func (p *peers) close() {
	p.cancel()
	p.server.Close()
	p.wg.Wait()
}

// exchange learns, in the background, who else is in the epoch and what they hold.
func (p *peers) exchange(w World) {
	p.mu.Lock()
	p.key, p.known, p.partners = "", nil, nil // those of another epoch
	clear(p.away)
	clear(p.given)
	for _, a := range p.pending {
		clear(a.done)
	}
	p.asking()
	ctx, cancel := context.WithCancel(p.ctx)
	p.asking = cancel
	p.mu.Unlock()
	if w.GroupWorldSize < 2 || p.ctx.Err() != nil {
		return
	}
	p.wg.Go(func() {
		all, err := p.ask(ctx, w, peersPatience)
		if err != nil {
			if ctx.Err() == nil {
				p.d.log.Warn("cannot learn the addresses of the other nodes: no copies in this epoch", "err", err)
			}
			return
		}
		p.meet(w, all)
	})
}

// ask tells the coordinator where this node is and what it holds, and learns the same of the others.
func (p *peers) ask(ctx context.Context, w World, patience time.Duration) ([]coordinator.Peer, error) {
	self := coordinator.Peer{Node: w.GroupRank, Addr: net.JoinHostPort(p.d.cfg.Addr, strconv.Itoa(p.port)), Switch: p.d.cfg.Switch, Copies: p.d.holds()}
	return p.d.cfg.Remote.Peers(ctx, w.Key(), self, w.GroupWorldSize, patience)
}

// meet takes in what the coordinator knows. Nodes that it does not know any more, because it has lost its memory, are where
// they were.
func (p *peers) meet(w World, all []coordinator.Peer) {
	p.mu.Lock()
	if p.key == w.Key() {
		all = update(p.known, all)
	}
	p.mu.Unlock()
	as := make([]replica.Peer, len(all))
	for i, a := range all {
		as[i] = replica.Peer{Node: a.Node, Addr: a.Addr, Switch: a.Switch}
	}
	partners := replica.Partners(w.GroupRank, as, p.nodes-1)
	p.d.mu.Lock()
	if p.d.world != w {
		p.d.mu.Unlock()
		return // the answer came late: there is another epoch
	}
	p.mu.Lock()
	first := p.key != w.Key()
	p.key, p.known, p.partners = w.Key(), all, partners
	p.mu.Unlock()
	p.d.changedLocked()
	p.d.mu.Unlock()
	if first { // the partners may be others
		p.d.held(func(name string, _ *segment, h shm.Header, m shm.Meta) {
			if ours(name) {
				p.want(h.Saved, m)
			}
		})
	}
	p.nudge()
}

// update returns the nodes of known and news, in order, as the latter has them.
func update(known, news []coordinator.Peer) []coordinator.Peer {
	byNode := map[int]coordinator.Peer{}
	for _, peer := range slices.Concat(known, news) {
		byNode[peer.Node] = peer
	}
	return slices.SortedFunc(maps.Values(byNode), func(a, b coordinator.Peer) int { return a.Node - b.Node })
}

func (p *peers) nudge() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// holds lists what this node could give to others.
func (d *Daemon) holds() []coordinator.Copy {
	var out []coordinator.Copy
	d.held(func(_ string, _ *segment, h shm.Header, m shm.Meta) {
		c := coordinator.Copy{Rank: m.Rank, Shard: m.Shard, Save: m.Save, Step: m.Step, Dir: m.Dir, SavedNS: h.Saved.UnixNano(), Shards: m.Shards}
		if m.Resize == "any" {
			c.Rank = anyRank
		}
		if !slices.Contains(out, c) {
			out = append(out, c)
		}
	})
	return out
}

// replicate gives a new save to the pusher. Of a rank and directory only the newest waits. A state
// that every node holds anyway needs no copies.
func (d *Daemon) replicate(saved time.Time, m shm.Meta) {
	d.wantCopies(m.Replicas)
	d.mu.Lock()
	p := d.peers
	d.mu.Unlock()
	if p != nil {
		p.want(saved, m)
		p.nudge()
	}
}

// want has a save copied to the partners that do not have it. It may be told of one save twice: by the worker, and when
// the partners are known.
func (p *peers) want(saved time.Time, m shm.Meta) {
	if m.Resize == "any" {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	from := origin{m.Rank, m.Dir}
	olds := []pendingCopy{p.given[from], p.pending[from]}
	if slices.ContainsFunc(olds, func(old pendingCopy) bool { return saved.Before(old.saved) }) {
		return
	}
	done := map[int]bool{}
	for _, peer := range p.known {
		done[peer.Node] = slices.ContainsFunc(peer.Copies, func(c coordinator.Copy) bool { return c.Rank == m.Rank && c.Save == m.Save })
	}
	for _, old := range olds {
		for node, has := range old.done {
			done[node] = done[node] || has && old.save == m.Save
		}
	}
	p.pending[from] = pendingCopy{m.Save, saved, done}
}

// push copies what is pending, and tries again when a partner was away.
func (p *peers) push() {
	for p.ctx.Err() == nil {
		t, due := p.next(time.Now())
		if len(t.to) > 0 {
			p.copyTo(t)
			continue
		}
		var again <-chan time.Time
		if !due.IsZero() {
			again = time.After(time.Until(due))
		}
		select {
		case <-p.wake:
		case <-again:
		case <-p.ctx.Done():
		}
	}
}

// copyTask is a pending save and the partners to try now.
type copyTask struct {
	pendingCopy
	from origin
	key  string // of the epoch
	to   []replica.Peer
}

// next finds a pending save for partners that are not known to be away. If there is none, due is when to look for
// those that are; zero if nobody waits for them.
func (p *peers) next(now time.Time) (t copyTask, due time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for from, a := range p.pending {
		owed := len(p.partners) == 0 // they are not known yet
		for _, peer := range p.partners {
			if a.done[peer.Node] {
				continue
			}
			owed = true
			if until := p.away[peer.Node].until; !until.After(now) {
				t.to = append(t.to, peer)
			} else if due.IsZero() || until.Before(due) {
				due = until
			}
		}
		if len(t.to) > 0 {
			slices.SortStableFunc(t.to, func(a, b replica.Peer) int { // those that may keep us waiting come last
				return cmp.Compare(p.away[a.Node].pause, p.away[b.Node].pause)
			})
			t.pendingCopy, t.from, t.key = a, from, p.key
			return t, due
		}
		if !owed {
			p.given[from] = a
			delete(p.pending, from)
		}
	}
	return copyTask{}, due
}

func (p *peers) copyTo(t copyTask) {
	if t.to = p.reachable(t); len(t.to) == 0 {
		return
	}
	pin := p.d.pinned(p.ctx, t.from, t.save)
	if pin == nil { // a newer save is on its way
		p.forget(t)
		return
	}
	defer pin.Release()
	for _, peer := range t.to {
		err := p.give(peer, pin)
		if p.ctx.Err() != nil {
			return
		}
		p.d.mu.Lock()
		if err == nil {
			p.d.count.CopiesSent++
			p.d.count.CopiedBytes += int64(len(pin.Used()))
		} else {
			p.d.count.CopiesFailed++
		}
		p.d.mu.Unlock()
		was, is := p.book(t, peer.Node, err)
		log := p.d.log.With("step", pin.Meta.Step, "rank", pin.Meta.Rank, "node", peer.Node)
		switch {
		case err != nil && !(was && is):
			log.Warn("cannot copy a checkpoint to another node", "again", is, "err", err)
		case err == nil && was:
			log.Info("a checkpoint is copied to another node again")
		}
	}
}

// pinned pins a save of ours, nil if it is no longer here.
func (d *Daemon) pinned(ctx context.Context, of origin, save string) (pin *shm.Pinned) {
	ctx, cancel := context.WithTimeout(ctx, pinPatience)
	defer cancel()
	d.held(func(name string, s *segment, h shm.Header, m shm.Meta) {
		if pin == nil && ours(name) && m.Save == save && m.Rank == of.rank && m.Dir == of.dir {
			pin, _ = s.pin(ctx, h.Seq) // nil: it is gone
		}
	})
	return pin
}

// reachable returns the partners of a task without those that are still away: to find that out must not keep the
// segment from its worker.
func (p *peers) reachable(t copyTask) (to []replica.Peer) {
	for _, peer := range t.to {
		p.mu.Lock()
		_, away := p.away[peer.Node]
		p.mu.Unlock()
		if away && !p.reach(&peer) {
			p.book(t, peer.Node, errAway)
			p.d.mu.Lock()
			p.d.count.CopiesFailed++
			p.d.mu.Unlock()
			continue
		}
		to = append(to, peer)
	}
	return to
}

var errAway = errors.New("it is still away")

// reach tries a node, also when that has moved.
func (p *peers) reach(peer *replica.Peer) bool {
	err := p.client.Reach(p.ctx, peer.Addr)
	if err == nil || p.ctx.Err() != nil {
		return err == nil
	}
	addr := p.renew(p.ctx, peer.Node)
	if addr == "" || addr == peer.Addr {
		return false
	}
	peer.Addr = addr
	return p.client.Reach(p.ctx, addr) == nil
}

func (p *peers) forget(t copyTask) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pending[t.from].save == t.save {
		delete(p.pending, t.from)
	}
}

// give copies a save to a partner, also when that has moved.
func (p *peers) give(to replica.Peer, pin *shm.Pinned) error {
	err := p.client.Push(p.ctx, to.Addr, pin)
	if !absent(err) || p.ctx.Err() != nil {
		return err
	}
	if addr := p.renew(p.ctx, to.Node); addr != "" && addr != to.Addr {
		err = p.client.Push(p.ctx, addr, pin)
	}
	return err
}

// book records how a task for a node went, and returns whether the node was away before and is now.
func (p *peers) book(t copyTask, node int, err error) (was, is bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.key != t.key {
		return false, false // nodes have other numbers now
	}
	old, was := p.away[node]
	if absent(err) {
		if !was {
			old.pauses = retry.Backoff{First: awayFirst, Most: awayMost}
		}
		old.pause = old.pauses.Next()
		old.until = time.Now().Add(old.pause)
		p.away[node] = old
		return was, true
	}
	delete(p.away, node)
	if a := p.pending[t.from]; a.save == t.save {
		a.done[node] = true // or it does not want it
	}
	return was, false
}

// absent tells that a node could not be reached from what it, or this node, does not want.
func absent(err error) bool {
	return err != nil && !errors.Is(err, replica.ErrRefused) && !errors.Is(err, replica.ErrMissing) && !errors.Is(err, errUnwanted)
}

// renew asks the coordinator where the nodes of the epoch are now, and returns the address of one; "" if it is not known.
func (p *peers) renew(ctx context.Context, node int) string {
	p.d.mu.Lock()
	w := p.d.world
	p.d.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, 2*renewPatience)
	defer cancel()
	if all, err := p.ask(ctx, w, renewPatience); err == nil {
		p.meet(w, all)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, peer := range p.known {
		if peer.Node == node && p.key == w.Key() {
			return peer.Addr
		}
	}
	return ""
}

var errUnwanted = errors.New("not for this node")

// fetch brings a rank's newest shard from another node, if that has a newer one than
// this node.
func (d *Daemon) fetch(ctx context.Context, r request) {
	d.mu.Lock()
	p, w := d.peers, d.world
	d.mu.Unlock()
	if p == nil {
		return
	}
	known := func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.key == w.Key()
	}
	if d.until(ctx, known) != nil {
		return // nobody answered in time: what is here counts
	}
	gone := map[int]bool{}
	for _, h := range p.holders(w.GroupRank, r, d.restorable(r)) {
		if gone[h.node] {
			continue
		}
		err := p.fetchFrom(ctx, h, r.Dir)
		if err == nil {
			return
		}
		gone[h.node] = absent(err)
		d.log.Warn("cannot fetch a checkpoint from another node", "step", h.copy.Step, "rank", h.copy.Rank, "node", h.node, "err", err)
	}
}

type holder struct {
	node int
	addr string
	copy coordinator.Copy
}

// holders are the nodes that have something newer for the rank and directory of r than what is here: first the saves
// that are whole, then those of which the most shards are left, for only whole ones can be loaded, and the newest of
// these.
func (p *peers) holders(self int, r request, have []Restorable) []holder {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []holder
	shards := map[string]map[int]bool{}
	for _, peer := range p.known {
		for _, c := range peer.Copies {
			if c.Dir != "" && c.Dir != r.Dir {
				continue
			}
			if shards[c.Save] == nil {
				shards[c.Save] = map[int]bool{}
			}
			shards[c.Save][c.Shard] = true
			if peer.Node != self && (c.Rank == r.Rank || c.Rank == anyRank) && newer(c, have) {
				out = append(out, holder{peer.Node, peer.Addr, c})
			}
		}
	}
	whole := func(c coordinator.Copy) int {
		if c.Shards > 0 && len(shards[c.Save]) == c.Shards {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(out, func(a, b holder) int {
		return cmp.Or(whole(b.copy)-whole(a.copy), len(shards[b.copy.Save])-len(shards[a.copy.Save]), compareAge(b.copy, a.copy))
	})
	return out
}

func newer(c coordinator.Copy, have []Restorable) bool {
	return !slices.ContainsFunc(have, func(o Restorable) bool {
		return o.Save == c.Save || compareAge(c, coordinator.Copy{Step: o.Step, SavedNS: o.SavedNS}) <= 0
	})
}

// compareAge is positive if a is newer. Not every node says when something was saved.
func compareAge(a, b coordinator.Copy) int {
	if a.SavedNS != 0 && b.SavedNS != 0 {
		return cmp.Or(cmp.Compare(a.SavedNS, b.SavedNS), cmp.Compare(a.Step, b.Step))
	}
	return cmp.Compare(a.Step, b.Step)
}

// fetchFrom waits a little for a node whose daemon is being started again.
func (p *peers) fetchFrom(ctx context.Context, h holder, dir string) error {
	pause := retry.Backoff{First: fetchFirst}
	for tries := 1; ; tries++ {
		err := p.fetchOne(ctx, h, dir)
		if !absent(err) || ctx.Err() != nil {
			return err
		}
		addr := p.renew(ctx, h.node)
		if addr != "" && addr != h.addr {
			h.addr = addr
			continue
		}
		if tries == fetchTries || !pause.Wait(ctx) {
			return err
		}
	}
}

func (p *peers) fetchOne(ctx context.Context, h holder, dir string) error {
	if pin, err := (replicaStore{p.d}).Copy(h.copy.Rank, h.copy.Save); err == nil {
		pin.Release()
		return nil // another local rank has fetched it
	}
	into := func(m shm.Meta, size int64) (*shm.Incoming, error) {
		if m.Dir != dir {
			return nil, fmt.Errorf("%w: it is of %s", errUnwanted, m.Dir)
		}
		in, err := (replicaStore{p.d}).Incoming(m, size)
		if err != nil {
			err = fmt.Errorf("%w: %w", errUnwanted, err)
		}
		return in, err
	}
	seg, err := p.client.Fetch(ctx, h.addr, h.copy.Rank, h.copy.Save, into)
	if err != nil {
		return err
	}
	p.d.log.Info("fetched a checkpoint from another node", "step", h.copy.Step, "rank", h.copy.Rank, "node", h.node)
	replicaStore{p.d}.Published(seg)
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	p.d.count.CopiesFetched++
	return nil
}

// replicaStore is where copies lie: for each owner one more than it has checkpoint directories, at least two. The newest
// complete one of a directory is never touched; the next copy goes into the memory of another, or takes its place.
type replicaStore struct{ d *Daemon }

const (
	// reuseTries and reusePause bound the wait for those who look at a copy for a moment. One that loads it takes longer,
	// and is not waited for.
	reuseTries = 5
	reusePause = 10 * time.Millisecond
	// maxSlots bounds the copies of an owner, fewSlots is what it has in any case.
	maxSlots, fewSlots = 16, 2
)

// replicaSlot is one of the segments of an owner.
type replicaSlot struct {
	name  string
	seg   *shm.Segment // nil: cannot be opened
	seq   uint64
	saved time.Time // zero: cannot be read
	made  int64     // shm.Meta.SavedNS
	step  int64
	epoch string
	dir   string
	err   error // why it cannot be read
}

// Incoming implements replica.Store.
func (s replicaStore) Incoming(m shm.Meta, size int64) (*shm.Incoming, error) {
	slots := make([]replicaSlot, maxSlots)
	for k := range slots {
		slots[k] = s.slot(m.Rank, k)
	}
	for _, have := range slots {
		if have.err == nil && have.dir == m.Dir && have.epoch == m.Epoch && have.after(m) {
			return nil, fmt.Errorf("rank %d: step %d is older than step %d, which is here", m.Rank, m.Step, have.step)
		}
	}
	free, err := shm.Free(s.d.cfg.Dir.Path())
	a := pickSlot(slots, m.Dir, err == nil && size <= free)
	if in := a.reuse(size); in != nil {
		return in, nil
	}
	if err != nil {
		return nil, err
	}
	if size > free {
		return nil, fmt.Errorf("no room for a copy of rank %d: %d bytes, %d are free in %s", m.Rank, size, free, s.d.cfg.Dir.Path())
	}
	return s.d.cfg.Dir.Incoming(a.name, size)
}

// pickSlot picks the slot for the next copy of dir: the oldest that is not the newest of its directory, else, if there is
// room for it, one more, else the oldest of another directory.
func pickSlot(slots []replicaSlot, dir string, room bool) replicaSlot {
	newest := map[string]replicaSlot{}
	for _, s := range slots {
		if n, ok := newest[s.dir]; s.err == nil && (!ok || n.compare(s) < 0) {
			newest[s.dir] = s
		}
	}
	class := map[string]int{}
	for k, s := range slots {
		extra := k >= fewSlots && errors.Is(s.err, fs.ErrNotExist)
		switch {
		case extra && room:
			class[s.name] = 1
		case extra:
			class[s.name] = 3
		case s.err != nil || newest[s.dir].name != s.name: // class 0
		case s.dir == dir:
			class[s.name] = 3
		default:
			class[s.name] = 2
		}
	}
	return slices.MinFunc(slots, func(a, b replicaSlot) int { return cmp.Or(class[a.name]-class[b.name], a.compare(b)) })
}

// after reports whether the copy was saved after m, by the same rank. Steps may go back.
func (a replicaSlot) after(m shm.Meta) bool {
	if a.made != 0 && m.SavedNS != 0 {
		return a.made > m.SavedNS
	}
	return a.step > m.Step
}

// compare is negative for what is to be given up first.
func (a replicaSlot) compare(b replicaSlot) int {
	if a.empty() != b.empty() && a.saved.Equal(b.saved) {
		if a.empty() {
			return -1
		}
		return 1
	}
	return cmp.Or(a.saved.Compare(b.saved), cmp.Compare(a.step, b.step))
}

// empty says that there is nothing to lose. What cannot be read for another reason may be the newest copy.
func (a replicaSlot) empty() bool {
	return errors.Is(a.err, shm.ErrIncomplete) || errors.Is(a.err, fs.ErrNotExist)
}

func (s replicaStore) slot(rank, k int) replicaSlot {
	out := replicaSlot{name: fmt.Sprintf("peer/r%d-%d.seg", rank, k), step: -1}
	opened, err := s.d.open(out.name)
	if err != nil {
		out.err = err
		return out
	}
	out.seg = opened.seg
	h, err := out.seg.Header() // before Pin: what comes in after that has another seq
	if err != nil {
		out.err = err
		return out
	}
	out.seq = h.Seq
	p, err := out.seg.Pin()
	if err != nil {
		out.err = err
		return out
	}
	defer p.Release()
	out.saved, out.made, out.step, out.epoch, out.dir = p.Header.Saved, p.Meta.SavedNS, p.Meta.Step, p.Meta.Epoch, p.Meta.Dir
	return out
}

// reuse returns nil if a new file is needed. A complete copy that is taken over is the older of two.
func (old replicaSlot) reuse(size int64) *shm.Incoming {
	if old.seg == nil || old.err != nil && !old.empty() {
		return nil
	}
	for try := 1; ; try++ {
		in, err := old.seg.Reuse(size, old.seq)
		if err == nil {
			return in
		}
		if !errors.Is(err, shm.ErrBusy) || try == reuseTries {
			return nil
		}
		time.Sleep(reusePause)
	}
}

// Published implements replica.Store. The daemon keeps the segment open: its memory is mapped already.
func (s replicaStore) Published(seg *shm.Segment) {
	s.d.mu.Lock()
	old := s.d.segs[seg.Name()]
	if old == nil || old.seg != seg {
		s.d.segs[seg.Name()] = &segment{seg: seg}
	}
	s.d.mu.Unlock()
	if old != nil && old.seg != seg {
		_ = old.seg.Close() // pins of it stay valid until they are released
	}
	s.d.rescan()
}

// Copy implements replica.Store.
func (s replicaStore) Copy(rank int, save string) (*shm.Pinned, error) {
	names, err := s.d.cfg.Dir.Names()
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		seg, err := s.d.open(name)
		if err != nil {
			continue
		}
		p, err := seg.seg.Pin()
		if err != nil {
			continue
		}
		if p.Meta.Save == save && (p.Meta.Rank == rank || rank == anyRank) {
			return p, nil
		}
		p.Release()
	}
	return nil, fmt.Errorf("rank %d of save %s is not held here", rank, save)
}
