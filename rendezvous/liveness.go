package rendezvous

import (
	"cmp"
	"fmt"
	"time"

	"dlrover-run/internal/job"
)

// Liveness rules. A node whose connection broke is suspect at once; a launcher that is alive dials again within
// milliseconds.
const (
	// BrokenGrace is how long a node with a broken connection may stay away while its world trains. A kernel that sends
	// FIN or RST is alive. A launcher on it would have dialled again within hundredths of a second, or a good second if
	// the first SYN was lost.
	BrokenGrace = 1500 * time.Millisecond
	// brokenGraceFailing replaces BrokenGrace when the world is broken anyway: the
	// survivors' workers have failed, so nothing is gained by waiting longer.
	brokenGraceFailing = 250 * time.Millisecond
	// SuspectAfter is how long a host may give no sign of life, not even its kernel's answer to a probe, until it is
	// suspect. It is lost at once then if the world is broken anyway, else after Params.NodeTimeout.
	SuspectAfter = 5 * time.Second
	// silentGrace is the default of Params.NodeTimeout: how long a node may have no request open without its connection
	// having broken, or may be silent. It also replaces BrokenGrace when most nodes are suspect at once: then it is the
	// daemon's own network that is in doubt.
	silentGrace = 15 * time.Second
	// attributionWindow is how long a failure that would end the run waits for the
	// news that a node has died: workers notice a dead peer as fast as we do.
	attributionWindow = 300 * time.Millisecond
)

// suspect: its connection broke, and it has not come back.
func (n *node) suspect() bool { return n.broken }

func (r *Round) lose(now time.Time, n *node, reason string) {
	r.depart(now, n, job.CauseLoss, reason, true)
}

// depart removes a node. A member that departs before it is done breaks the world. Silent means that it sent no Leave.
func (r *Round) depart(now time.Time, n *node, kind job.CauseKind, reason string, silent bool) {
	r.members.remove(n)
	if n.state == leaving {
		kind = job.CauseLeave // as it has announced
	}
	note := r.out.note(job.Event(kind), n.Name, reason)
	note.ID = n.ID
	if r.epoch.seated(n) {
		note.Rank = n.rank
	}
	r.shortage.keepBar(n)
	if n.idle() || n.state == succeeded || n.state == leaving || r.epoch.phase == finished {
		return // it has no work to do; the world does not need it any more
	}
	if r.resume != nil {
		r.resume.forgo(n)
		r.resume.hurry(now)
		return
	}
	r.epoch.lose(n, job.Loss{Reason: reason, At: lossTime(now, n, kind), Silent: silent})
	text := fmt.Sprintf("node %d (%s) is gone: %s", n.rank, n.Name, reason)
	r.breakWorld(now, job.Cause{Kind: kind, Node: n.Name, Text: text})
}

// lossTime is when the node went away, not when patience ran out.
func lossTime(now time.Time, n *node, kind job.CauseKind) time.Time {
	if kind == job.CauseLoss && n.attached == 0 {
		return n.detached
	}
	return now
}

func (r *Round) attach(e Attach) error {
	n := r.members.nodes[e.ID]
	if n == nil {
		return ErrUnknownNode
	}
	n.attached++
	if n.broken && !r.account.failPendingAt.IsZero() {
		r.account.failPendingAt = r.account.newest.brokeAt.Add(attributionWindow) // it was waited for
	}
	n.broken, n.silent, n.hungUp = false, false, false
	return nil
}

func (r *Round) detach(now time.Time, e Detach) error {
	n := r.members.nodes[e.ID]
	if n == nil {
		return nil // it has left while its request was open
	}
	n.attached = max(n.attached-1, 0)
	if n.attached > 0 {
		return nil
	}
	n.detached, n.broken, n.hungUp = now, e.Broken, false
	if e.Silent {
		n.detached = now.Add(-SuspectAfter)
		r.fallSilent(n)
	}
	if n.broken && n.state == waiting && r.epoch.phase != finished {
		// It has no workers to lose: if it lives, it joins again at once.
		r.lose(now, n, "its connection broke while it was waiting")
		return nil
	}
	r.watchLiveness(n.detached.Add(r.grace(n)))
	return nil
}

// silence: nothing is known of a node that has another request open.
func (r *Round) silence(e Silence) {
	n := r.members.nodes[e.ID]
	if n == nil || n.attached > 0 || n.broken {
		return
	}
	n.broken = true
	r.fallSilent(n)
	r.watchLiveness(n.detached.Add(r.grace(n)))
}

// hungUp makes n suspect, but does not lose it: a launcher that lives may have closed one connection of several. On a
// busy machine it is not back in a second.
func (r *Round) hungUp(now time.Time, e HungUp) {
	if n := r.members.nodes[e.ID]; r.Away(e.ID) {
		n.broken, n.hungUp, n.detached = true, true, now
		r.watchLiveness(now.Add(r.grace(n)))
	}
}

// Away: the node with this ID has no request open, and nothing is known of its connection.
func (r *Round) Away(id string) bool {
	n := r.members.nodes[id]
	return n != nil && n.attached == 0 && !n.broken
}

// closedPort ends the wait for a launcher that is dead. Where most nodes are suspect, a middlebox may have refused.
func (r *Round) closedPort(now time.Time, e Refused) {
	n := r.members.nodes[e.ID]
	if n == nil || n.attached > 0 || !n.broken || n.silent || r.members.inDoubt() {
		return
	}
	r.lose(now, n, "its connection broke, and its launcher's port is closed")
}

func (r *Round) fallSilent(n *node) {
	n.silent = true
	r.out.note(job.EventSuspect, n.Name, fmt.Sprintf("its host has given no sign of life for %s", SuspectAfter))
}

// nodeTimeout is the run's; an older launcher sends none.
func (r *Round) nodeTimeout() time.Duration { return cmp.Or(r.params.NodeTimeout, defaultNodeTimeout) }

// grace is how long the detached node n may stay away.
func (r *Round) grace(n *node) time.Duration {
	switch {
	case n.hungUp, n.silent && r.epoch.phase == forming && !r.epoch.fresh():
		return SuspectAfter
	case !n.broken, n.silent:
		return r.nodeTimeout()
	case r.epoch.phase == forming && !r.epoch.fresh():
		return brokenGraceFailing
	default:
		return BrokenGrace
	}
}

func (r *Round) watchLiveness(at time.Time) {
	if r.liveAt.IsZero() || at.Before(r.liveAt) {
		r.liveAt = at
	}
}

// expire drops the nodes that stayed away for too long. It scans the nodes only
// when the earliest deadline has passed, so that its cost is not paid per event.
func (r *Round) expire(now time.Time) {
	if r.liveAt.IsZero() || now.Before(r.liveAt) {
		return
	}
	r.liveAt = time.Time{}
	away := r.members.sorted(func(n *node) bool { return n.attached == 0 })
	doubt := r.members.inDoubt()
	for _, n := range away {
		r.expireNode(now, n, doubt)
	}
}

// Life is where the launcher of a node listens; the zero value: nowhere, or there is no such node.
func (r *Round) Life(id string) Life {
	if n := r.members.nodes[id]; n != nil {
		return n.Node.Life
	}
	return Life{}
}

func (r *Round) expireNode(now time.Time, n *node, doubt bool) {
	grace := r.grace(n)
	if doubt {
		grace = max(grace, r.nodeTimeout())
	}
	if due := n.detached.Add(grace); now.Before(due) {
		r.watchLiveness(due)
		return
	}
	if n.broken && !n.silent {
		r.lose(now, n, fmt.Sprintf("its connection broke and it did not come back within %s", grace))
		return
	}
	r.lose(now, n, fmt.Sprintf("silent for %s", grace))
}
