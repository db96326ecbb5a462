package checkpointd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"dlrover-run/checkpointd/board"
	"dlrover-run/checkpointd/replica"
	"dlrover-run/checkpointd/shm"
)

// anyRank stands for a save whose every holder has the full state.
const anyRank = -1

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
	key      string       // of the epoch that known belongs to
	known    []board.Peer // all nodes of the epoch
	partners []replica.Peer
	pending  map[origin]awaiting // newest save to be copied
}

// origin is what the saves of a rank into a directory have in common.
type origin struct {
	rank int
	dir  string
}

// awaiting is a save that is to be copied.
type awaiting struct {
	seg   *segment
	saved time.Time
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
	p := &peers{d: d, nodes: nodes, port: ln.Addr().(*net.TCPAddr).Port, wake: make(chan struct{}, 1), pending: map[origin]awaiting{},
		client: &replica.Client{Token: d.cfg.Token, Rate: d.cfg.Rate}}
	p.server = replica.NewServer(d.cfg.Token, shelf{d}, d.log)
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
	p.mu.Unlock()
	if w.GroupWorldSize < 2 || p.ctx.Err() != nil {
		return
	}
	p.wg.Go(func() {
		self := board.Peer{Node: w.GroupRank, Addr: net.JoinHostPort(p.d.cfg.Addr, strconv.Itoa(p.port)), Switch: p.d.cfg.Switch, Copies: p.d.holds()}
		all, err := p.d.cfg.Remote.Peers(p.ctx, w.Key(), self, w.GroupWorldSize, peersPatience)
		if err != nil {
			if p.ctx.Err() == nil {
				p.d.log.Warn("cannot learn the addresses of the other nodes: no copies in this epoch", "err", err)
			}
			return
		}
		p.meet(w, all)
	})
}

func (p *peers) meet(w World, all []board.Peer) {
	as := make([]replica.Peer, len(all))
	for i, a := range all {
		as[i] = replica.Peer{Node: a.Node, Addr: a.Addr, Switch: a.Switch}
	}
	partners := replica.Partners(w.GroupRank, as, p.nodes-1)
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	if p.d.world != w {
		return // the answer came late: there is another epoch
	}
	p.mu.Lock()
	p.key, p.known, p.partners = w.Key(), all, partners
	p.mu.Unlock()
	p.d.changedLocked()
	p.nudge()
}

func (p *peers) nudge() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// holds lists what this node could give to others.
func (d *Daemon) holds() []board.Copy {
	var out []board.Copy
	d.held(func(_ string, _ *segment, _ shm.Header, m shm.Meta) {
		c := board.Copy{Rank: m.Rank, Shard: m.Shard, Save: m.Save, Step: m.Step}
		if m.Resize == "any" {
			c.Rank = anyRank
		}
		if !slices.Contains(out, c) {
			out = append(out, c)
		}
	})
	return out
}

// replicate gives a new save to the pusher. Of a rank only the newest waits. A state
// that every node holds anyway needs no copies.
func (d *Daemon) replicate(s *segment, saved time.Time, m shm.Meta) {
	d.wantCopies(m.Replicas)
	d.mu.Lock()
	p := d.peers
	d.mu.Unlock()
	if p == nil || m.Resize == "any" {
		return
	}
	p.mu.Lock()
	from := origin{m.Rank, m.Dir}
	if old, ok := p.pending[from]; !ok || !saved.Before(old.saved) {
		p.pending[from] = awaiting{s, saved}
	}
	p.mu.Unlock()
	p.nudge()
}

func (p *peers) push() {
	for {
		select {
		case <-p.wake:
		case <-p.ctx.Done():
			return
		}
		for s, to := p.next(); s != nil; s, to = p.next() {
			p.copyTo(s, to)
		}
	}
}

// next takes a pending save, once the partners are known.
func (p *peers) next() (*segment, []replica.Peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.partners) == 0 || p.ctx.Err() != nil {
		return nil, nil
	}
	for from, a := range p.pending {
		delete(p.pending, from)
		return a.seg, p.partners
	}
	return nil, nil
}

func (p *peers) copyTo(s *segment, to []replica.Peer) {
	pin, err := s.seg.Pin()
	if err != nil {
		return // a newer save is on its way
	}
	defer pin.Release()
	for _, peer := range to {
		err := p.client.Push(p.ctx, peer.Addr, pin)
		p.d.mu.Lock()
		if err == nil {
			p.d.count.CopiesSent++
			p.d.count.CopiedBytes += int64(len(pin.Used()))
		} else {
			p.d.count.CopiesFailed++
		}
		p.d.mu.Unlock()
		if err != nil && p.ctx.Err() == nil {
			p.d.log.Warn("cannot copy a checkpoint to another node", "step", pin.Meta.Step, "rank", pin.Meta.Rank, "node", peer.Node, "err", err)
		}
	}
}

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
	have := int64(-1)
	for _, o := range d.offered(r) {
		have = max(have, o.Step)
	}
	for _, h := range p.holders(w.GroupRank, r.Rank, have) {
		if p.fetchOne(ctx, h) {
			return
		}
	}
}

type holder struct {
	node int
	addr string
	copy board.Copy
}

// holders are the nodes that have something newer than step have for rank: first the
// saves of which the most shards are left, for only whole ones can be loaded, and the
// newest of these.
func (p *peers) holders(self, rank int, have int64) []holder {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []holder
	shards := map[string]map[int]bool{}
	for _, peer := range p.known {
		for _, c := range peer.Copies {
			if shards[c.Save] == nil {
				shards[c.Save] = map[int]bool{}
			}
			shards[c.Save][c.Shard] = true
			if peer.Node != self && (c.Rank == rank || c.Rank == anyRank) && c.Step > have {
				out = append(out, holder{peer.Node, peer.Addr, c})
			}
		}
	}
	slices.SortStableFunc(out, func(a, b holder) int {
		return cmp.Or(len(shards[b.copy.Save])-len(shards[a.copy.Save]), cmp.Compare(b.copy.Step, a.copy.Step))
	})
	return out
}

func (p *peers) fetchOne(ctx context.Context, h holder) bool {
	if _, err := (shelf{p.d}).Copy(h.copy.Rank, h.copy.Save); err == nil {
		return true // another local rank has fetched it
	}
	seg, err := p.client.Fetch(ctx, h.addr, h.copy.Rank, h.copy.Save, shelf{p.d}.Incoming)
	if err != nil {
		p.d.log.Warn("cannot fetch a checkpoint from another node", "step", h.copy.Step, "rank", h.copy.Rank, "node", h.node, "err", err)
		return false
	}
	p.d.log.Info("fetched a checkpoint from another node", "step", h.copy.Step, "rank", h.copy.Rank, "node", h.node)
	shelf{p.d}.Published(seg)
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	p.d.count.CopiesFetched++
	return true
}

// shelf is where copies lie: two for each owner. The newest complete one is never touched; the next copy goes into the
// memory of the other, or takes its place.
type shelf struct{ d *Daemon }

const (
	// reuseTries and reusePause bound the wait for those who look at a copy for a moment. One that loads it takes longer,
	// and is not waited for.
	reuseTries = 5
	reusePause = 10 * time.Millisecond
)

// slot is one of the two places of an owner.
type slot struct {
	name  string
	seg   *shm.Segment // nil: cannot be opened
	seq   uint64
	saved time.Time // zero: cannot be read
	step  int64
	epoch string
	dir   string
	err   error // why it cannot be read
}

// Incoming implements replica.Store.
func (s shelf) Incoming(m shm.Meta, size int64) (*shm.Incoming, error) {
	a, b := s.slot(m.Rank, 0), s.slot(m.Rank, 1)
	for _, have := range []slot{a, b} {
		if have.err == nil && have.dir == m.Dir && have.epoch == m.Epoch && have.step > m.Step {
			return nil, fmt.Errorf("rank %d: step %d is older than step %d, which is here", m.Rank, m.Step, have.step)
		}
	}
	if b.before(a) {
		a = b
	}
	if in := a.reuse(size); in != nil {
		return in, nil
	}
	free, err := shm.Free(s.d.cfg.Dir.Path())
	if err != nil {
		return nil, err
	}
	if size > free {
		return nil, fmt.Errorf("no room for a copy of rank %d: %d bytes, %d are free in %s", m.Rank, size, free, s.d.cfg.Dir.Path())
	}
	return s.d.cfg.Dir.Incoming(a.name, size)
}

func (a slot) before(b slot) bool {
	if c := a.saved.Compare(b.saved); c != 0 {
		return c < 0
	}
	if a.empty() != b.empty() {
		return a.empty()
	}
	return a.step < b.step
}

// empty says that there is nothing to lose. What cannot be read for another reason may be the newest copy.
func (a slot) empty() bool {
	return errors.Is(a.err, shm.ErrIncomplete) || errors.Is(a.err, fs.ErrNotExist)
}

func (s shelf) slot(rank, k int) slot {
	out := slot{name: fmt.Sprintf("peer/r%d-%d.seg", rank, k), step: -1}
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
	out.saved, out.step, out.epoch, out.dir = p.Header.Saved, p.Meta.Step, p.Meta.Epoch, p.Meta.Dir
	return out
}

// reuse returns nil if a new file is needed. A complete copy that is taken over is the older of two.
func (old slot) reuse(size int64) *shm.Incoming {
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
func (s shelf) Published(seg *shm.Segment) {
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
func (s shelf) Copy(rank int, save string) (*shm.Pinned, error) {
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
