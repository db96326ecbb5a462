package checkpointd

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/replica"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/retry"
	"dlrover-run/internal/stable"
)

// pendingCopy is a save that is to be copied.
type pendingCopy struct {
	save  string
	saved time.Time
	done  map[int]bool // partners that have it, by node
}

// origin identifies the saves of a rank into a directory.
type origin struct {
	rank int
	dir  string
}

// backoff is when to try a partner again that could not be reached.
type backoff struct {
	until  time.Time
	pauses retry.Backoff
	pause  time.Duration // the last one
}

// enqueue queues a save for the partners that do not have it. It may be called twice for one save: by the worker, and
// when the partners are known.
func (p *peers) enqueue(saved time.Time, m shm.Meta) {
	if m.Resize == "any" {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	from := origin{m.Rank, m.Dir}
	olds := []pendingCopy{p.copied[from], p.pending[from]}
	if slices.ContainsFunc(olds, func(old pendingCopy) bool { return saved.Before(old.saved) }) {
		return
	}
	done := map[int]bool{}
	for _, peer := range p.known {
		done[peer.Node] = slices.ContainsFunc(peer.Copies,
			func(c coordinator.Copy) bool { return c.Rank == m.Rank && c.Save == m.Save })
	}
	for _, old := range olds {
		for node, has := range old.done {
			done[node] = done[node] || has && old.save == m.Save
		}
	}
	p.pending[from] = pendingCopy{m.Save, saved, done}
}

// push copies pending saves, and tries again when a partner was unreachable.
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

// next finds a pending save for partners that are reachable. If there is none, due is when to try the unreachable ones;
// zero if no copy waits for them.
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
			if until := p.unreachable[peer.Node].until; !until.After(now) {
				t.to = append(t.to, peer)
			} else if due.IsZero() || until.Before(due) {
				due = until
			}
		}
		if len(t.to) > 0 {
			stable.Sort(t.to, func(a, b replica.Peer) int { // those that may keep us waiting come last
				return cmp.Compare(p.unreachable[a.Node].pause, p.unreachable[b.Node].pause)
			})
			t.pendingCopy, t.from, t.key = a, from, p.key
			return t, due
		}
		if !owed {
			p.copied[from] = a
			delete(p.pending, from)
		}
	}
	return copyTask{}, due
}

func (p *peers) copyTo(t copyTask) {
	if t.to = p.reachable(t); len(t.to) == 0 {
		return
	}
	pin := p.segs.pinned(p.ctx, t.from, t.save)
	if pin == nil { // a newer save is on its way
		p.forget(t)
		return
	}
	defer pin.Release()
	for _, peer := range t.to {
		err := p.sendTo(peer, pin)
		if p.ctx.Err() != nil {
			return
		}
		p.count.add(func(n *Counters) {
			if err != nil {
				n.CopiesFailed++
				return
			}
			n.CopiesSent++
			n.CopiedBytes += int64(len(pin.Used()))
		})
		was, is := p.recordResult(t, peer.Node, err)
		log := p.log.With("step", pin.Meta.Step, "rank", pin.Meta.Rank, "node", peer.Node)
		switch {
		case err != nil && !(was && is):
			log.Warn("cannot copy a checkpoint to another node", "again", is, "err", err)
		case err == nil && was:
			log.Info("a checkpoint is copied to another node again")
		}
	}
}

// reachable returns the partners of a task without those that are still away: to find that out must not keep the
// segment from its worker.
func (p *peers) reachable(t copyTask) (to []replica.Peer) {
	for _, peer := range t.to {
		p.mu.Lock()
		_, away := p.unreachable[peer.Node]
		p.mu.Unlock()
		if away && !p.reach(&peer) {
			p.recordResult(t, peer.Node, errAway)
			p.count.add(func(n *Counters) { n.CopiesFailed++ })
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

// sendTo copies a save to a partner, also when that has moved.
func (p *peers) sendTo(to replica.Peer, pin *shm.Pinned) error {
	err := p.client.Push(p.ctx, to.Addr, pin)
	if !absent(err) || p.ctx.Err() != nil {
		return err
	}
	if addr := p.renew(p.ctx, to.Node); addr != "" && addr != to.Addr {
		err = p.client.Push(p.ctx, addr, pin)
	}
	return err
}

// recordResult records how a task for a node went, and returns whether the node was away before and is now.
func (p *peers) recordResult(t copyTask, node int, err error) (was, is bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.key != t.key {
		return false, false // nodes have other numbers now
	}
	old, was := p.unreachable[node]
	if absent(err) {
		if !was {
			old.pauses = retry.Backoff{First: awayFirst, Most: awayMost}
		}
		old.pause = old.pauses.Next()
		old.until = time.Now().Add(old.pause)
		p.unreachable[node] = old
		return was, true
	}
	delete(p.unreachable, node)
	if a := p.pending[t.from]; a.save == t.save {
		a.done[node] = true // or it does not want it
	}
	return was, false
}

// absent distinguishes a node that could not be reached from one that refused, or whose copy is not wanted here.
func absent(err error) bool {
	return err != nil && !errors.Is(err, replica.ErrRefused) && !errors.Is(err, replica.ErrMissing) &&
		!errors.Is(err, errUnwanted)
}
