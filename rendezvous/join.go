package rendezvous

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"dlrover-run/internal/duration"
	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

func (r *Round) join(now time.Time, e Join) error {
	if r.epoch.phase == finished {
		if err := r.reopen(now, e); err != nil {
			return err
		}
	}
	if n := r.members.nodes[e.Node.ID]; n != nil {
		r.rejoin(now, n, e)
		return nil
	}
	if err := r.admit(e); err != nil {
		r.shortage.tellRefused(e.Node, err)
		return err
	}
	if r.epoch.fresh() && len(r.members.nodes) == 0 {
		*r.params = e.Params.WithDefaults()
		r.epoch.formingAt = now
		r.orders.open(e, r.params.Hold)
	}
	if r.params.MaxRestarts == Unlimited {
		r.params.MaxRestarts = e.Params.MaxRestarts
	}
	r.liveness.arrived(now)
	n := r.members.arrived(now, e.Node)
	r.learnWork(e)
	r.sealer.cameAt = now
	n.differs = e.Params.WithDefaults() != *r.params
	r.replace(now, n)
	r.memory.learn(now, e)
	r.orders.restoreCommand(e)
	if c := r.memory.pause(n, e); c != nil {
		r.pause(now, c, &e.Seen)
	}
	if c := r.memory.bar(now, n, e); c != nil {
		r.barName(now, n.Name, c)
	}
	if !r.memory.adopt(now, n, e) {
		r.checks.queue(now, n)
	}
	r.out.note(job.EventJoin, n.Name, fmt.Sprintf("%d slots", n.Slots)).Machine = n.Machine
	return nil
}

// Lacks describes the nodes that the run waits for.
func (r *Round) Lacks() Lack { return r.shortage.lacks() }

// rejoin is a Join of a node that is already here: after the Stop of the present
// epoch, or else a repeated request that changes nothing.
func (r *Round) rejoin(now time.Time, n *node, e Join) {
	if e.Stopped != r.epoch.id || n.idle() || n.state == leaving {
		return
	}
	if w := r.memory.rebuild; w != nil {
		if !slices.Contains(w.stopped, n) {
			w.stopped = append(w.stopped, n)
		}
		return
	}
	if n.state != pending { // an earlier daemon had stopped it, unknown to this one
		r.breakWorld(now, restartedAcross())
	}
	r.account.progress(e.Progress)
	n.Slots, n.Addr, n.Addrs = e.Node.Slots, e.Node.Addr, e.Node.Addrs
	n.Peer, n.Via = e.Node.Peer, e.Node.Via
	n.Ports, n.Bases = e.Node.Ports, e.Node.Bases
	r.epoch.record(e.Failures)
	r.checks.queue(now, n)
}

// admit holds a newcomer against the run's rules.
func (r *Round) admit(e Join) error {
	if err := r.check(e); err != nil {
		return fmt.Errorf("%w: %w", ErrRefused, err)
	}
	if !r.params.Static || r.epoch.fresh() && len(r.members.nodes) == 0 {
		return nil
	}
	if o := r.members.wisher(e.Node.Rank); o != nil && !o.supersededBy(e.Node) {
		return fmt.Errorf("%w: %d by %s; give every node its own --node-rank", ErrTaken, e.Node.Rank, o.Name)
	}
	return nil
}

func (r *Round) check(e Join) error {
	p := e.Params.WithDefaults()
	if err := p.Validate(); err != nil {
		return err
	}
	if r.members.left[e.Node.ID] {
		return fmt.Errorf("node %q has left the run", e.Node.Name)
	}
	if len(e.Work) > MaxName {
		return fmt.Errorf("work: %d bytes; need at most %d", len(e.Work), MaxName)
	}
	if e.Node.ID == "" || e.Node.Slots < 0 {
		return fmt.Errorf("node %q needs an id and no fewer than 0 slots, has %d", e.Node.Name, e.Node.Slots)
	}
	if err := e.Node.checkNames(); err != nil {
		return err
	}
	if err := e.Node.checkOffers(); err != nil {
		return err
	}
	if len(r.members.nodes) > 0 || !r.epoch.fresh() {
		if err := r.conflict(e); err != nil {
			return err
		}
	}
	if len(r.members.nodes) >= 2*p.Max+1000 {
		return fmt.Errorf("%d nodes are already here for at most %d", len(r.members.nodes), p.Max)
	}
	if rank := e.Node.Rank; p.Static && (rank < 0 || rank >= p.Max) {
		return fmt.Errorf("node rank %d: the static rendezvous of %d nodes needs --node-rank from 0 to %d",
			rank, p.Max, p.Max-1)
	}
	return nil
}

// conflict names the option, of those that all nodes must share, in which a newcomer differs from the run. A newcomer
// that cannot gate is of a version without checks, and counts as cleared.
func (r *Round) conflict(e Join) error {
	p := e.Params.WithDefaults()
	if !e.Node.can(CanGate) {
		p.Check = r.params.Check
	}
	return cmp.Or(p.conflict(*r.params), r.orders.cannotFollow(e.Node))
}

func (n Node) checkNames() error {
	for _, name := range []string{n.ID, n.Name, n.Role, n.Machine} {
		if len(name) > MaxName || !text.Printable(name) {
			return fmt.Errorf("the id, name, role or machine %.100q of a node: %s, at most %d bytes",
				name, text.PrintableRule, MaxName)
		}
	}
	if len(n.Addrs) > MaxAddrs {
		return fmt.Errorf("node %q brings %d addresses; at most %d are kept", n.Name, len(n.Addrs), MaxAddrs)
	}
	for _, addr := range append([]string{n.Addr, n.IP}, n.Addrs...) {
		if len(addr) > MaxName {
			return fmt.Errorf("node %q brings the address %.100q of %d bytes; at most %d are kept",
				n.Name, addr, len(addr), MaxName)
		}
	}
	return nil
}

// checkOffers checks a node's extra offers against the bounds.
func (n Node) checkOffers() error {
	if len(n.Ports) > MaxPorts {
		return fmt.Errorf("node %q brings %d ports; at most %d are kept", n.Name, len(n.Ports), MaxPorts)
	}
	if len(n.Bases) > maxBases {
		return fmt.Errorf("node %q brings %d first ports; at most %d are kept", n.Name, len(n.Bases), maxBases)
	}
	for _, p := range slices.Concat(n.Ports, n.Bases) {
		if p < 1 || p > 65535 {
			return fmt.Errorf("node %q brings port %d; need 1 to 65535", n.Name, p)
		}
	}
	if p := n.Life.Port; p < 0 || p > 65535 || len(n.Life.Key) > MaxName {
		return fmt.Errorf("node %q lives at port %d with a key of %d bytes; need 1 to 65535, and at most %d", n.Name, p,
			len(n.Life.Key), MaxName)
	}
	if len(n.Can) > maxAbilities {
		return fmt.Errorf("node %q brings %d abilities; at most %d are kept", n.Name, len(n.Can), maxAbilities)
	}
	return nil
}

// replace drops a dead node when its replacement arrives.
func (r *Round) replace(now time.Time, n *node) {
	if o := r.members.wisher(n.Rank); o != nil && o.supersededBy(n.Node) {
		r.depart(now, o, job.CauseLoss, "replaced by "+n.Name, true)
	}
	if o := r.members.wisher(n.Rank); o == nil || n.Generation >= o.Generation {
		r.members.wishes[n.Rank] = n
	}
}

// supersededBy: a pod with the same node rank proves that a suspect is dead, and one
// of a later generation that any is.
func (o *node) supersededBy(n Node) bool {
	return o.suspect() || o.state == leaving || o.Generation > 0 && n.Generation > o.Generation
}

func (r *Round) leave(now time.Time, e Leave) error {
	n := r.members.nodes[e.ID]
	if n == nil && (!e.Killed || len(e.ID) > MaxName) {
		return ErrUnknownNode
	}
	r.members.leave(e.ID)
	if n == nil {
		return ErrUnknownNode // its join may still be under way
	}
	r.epoch.record(e.Failures)
	kind := job.CauseLeave
	if e.Killed {
		kind = job.CauseLoss
	}
	r.depart(now, n, kind, e.Reason, false)
	return nil
}

// reopen answers a Join to a finished run: a launcher that was started before the
// end belongs to that run, and is one of its nodes from then on; a later one opens the run anew.
func (r *Round) reopen(now time.Time, e Join) error {
	if now.Add(-e.Node.Uptime).Before(r.finishedAt) {
		if err := r.conflict(e); err != nil {
			return fmt.Errorf("%w: %w", ErrRefused, err)
		}
		r.liveness.arrived(now)
		n := r.members.arrived(now, e.Node)
		r.members.become(n, waiting)
		r.out.direct(n, r.epoch.verdict())
		return nil
	}
	if r.sameJob(now, e) {
		r.tellSucceeded(now, e)
		return nil
	}
	if len(r.members.nodes) > 0 {
		return ErrFinishing
	}
	r.reset()
	return nil
}

// Bounds of sameJob.
const (
	sameJobFor = 10 * time.Minute // Kubernetes replaces a pod that is gone within this time
	maxWorks   = 64               // of one run
)

// sameJob reports whether a node that joins a run which has succeeded is of the same job, such as a recreated pod. A
// node with other work, or one that comes later, is of another job by the same name.
func (r *Round) sameJob(now time.Time, e Join) bool {
	return r.epoch.outcome == job.Succeeded && r.cfg.Run != "" && now.Sub(r.finishedAt) < sameJobFor &&
		slices.Contains(r.works, e.Work) && r.check(e) == nil
}

// learnWork records the work of the run's nodes.
func (r *Round) learnWork(e Join) {
	if e.Work != "" && len(r.works) < maxWorks && !slices.Contains(r.works, e.Work) {
		r.works = append(r.works, e.Work)
	}
}

// tellSucceeded answers a node that comes to a run that had succeeded before: it is done.
func (r *Round) tellSucceeded(now time.Time, e Join) {
	text := fmt.Sprintf("run %s has succeeded, %s ago", r.cfg.Run, duration.Text(now.Sub(r.finishedAt).Round(time.Second)))
	instead := "to do it again, give another --rdzv-id or, first, dlroverctl forget " + r.cfg.Run
	r.liveness.arrived(now)
	n := r.members.arrived(now, e.Node)
	r.members.become(n, waiting)
	r.out.note(job.EventLate, n.Name, "the run has succeeded; nothing is started")
	text += ": nothing is started; " + instead
	r.out.direct(n, Directive{Kind: job.Done, Cause: &job.Cause{Kind: job.CauseEnded, Text: text}})
}

// reset makes r as New does, with a new term. Bars are of names and stay, and so does a pause of a run that has not
// finished.
func (r *Round) reset() {
	if r.epoch.phase != finished {
		r.out.ended()
	}
	r.cfg.Term = r.out.seq + 1
	next := New(*r.cfg)
	next.members.left, next.orders.bars = r.members.left, r.orders.bars
	next.out.acts, next.out.told, next.out.free = r.out.acts, r.out.told, r.out.free
	if r.epoch.phase != finished {
		next.orders.command, next.orders.commandIn = r.orders.command, r.orders.commandIn
		if !r.account.spent.Held { // a run that has failed is over when everybody has left
			next.orders.paused, next.orders.pausedIn, next.orders.unpaused = r.orders.paused, r.orders.pausedIn, r.orders.unpaused
		}
	}
	*r = *next
}
