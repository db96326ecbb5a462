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
	// suspect. It is lost at once then if the world is broken anyway.
	SuspectAfter = 3 * time.Second
	// UnreachableAfter is how long a host may give no sign of life that answers no new connection either.
	// Params.NodeTimeout replaces it. A link that was down for 3 s has more than half a second left for an answer: the
	// last one may have come a second before.
	UnreachableAfter = 4600 * time.Millisecond
	// hungUpGrace is how long a launcher may stay away that has closed its connection between two requests.
	hungUpGrace = 5 * time.Second
	// silentGrace is the default of Params.NodeTimeout: how long a node may have no request open without its connection
	// having broken, or its host may be silent that nobody could examine. It also replaces BrokenGrace when most nodes
	// are suspect at once: then it is the daemon's own network that is in doubt.
	silentGrace = 15 * time.Second
	// attributionWindow is how long a failure that would end the run waits for the
	// news that a node has died: workers notice a dead peer as fast as we do.
	attributionWindow = 300 * time.Millisecond
)

// liveness notices nodes that go away without a word.
type liveness struct {
	params  *Params
	members *members
	epoch   *epoch
	out     *outbox

	at time.Time // earliest deadline, never too late
}

func (p Params) nodeTimeout() time.Duration { return cmp.Or(p.NodeTimeout, silentGrace) }

// apply books a change of a node's connection, and returns the node if that makes it a lost one, and why.
func (l *liveness) apply(now time.Time, ev Event) (lost *node, why string) {
	switch e := ev.(type) {
	case Detach:
		return l.detach(now, e)
	case Refused:
		return l.refused(e)
	case Silence:
		l.silence(e)
	case Unreachable:
		l.unreachable(e)
	case HungUp:
		l.hungUp(now, e)
	}
	return nil, ""
}

// arrived expects a sign of life from a newcomer.
func (l *liveness) arrived(now time.Time) { l.watch(now.Add(l.params.nodeTimeout())) }

// attach books a request of a node, and reports whether the node was suspect.
func (l *liveness) attach(id string) (back bool, err error) {
	n, err := l.members.find(id)
	if err != nil {
		return false, err
	}
	n.attached++
	back = n.broken
	n.broken, n.silent, n.unreachable = false, false, false
	return back, nil
}

func (l *liveness) detach(now time.Time, e Detach) (lost *node, why string) {
	n := l.members.nodes[e.ID]
	if n == nil {
		return nil, "" // it has left while its request was open
	}
	n.attached = max(n.attached-1, 0)
	if n.attached > 0 {
		return nil, ""
	}
	n.detached, n.broken, n.hungUp = now, e.Broken, false
	if e.Silent {
		n.detached = now.Add(-SuspectAfter)
		l.fallSilent(n)
	}
	if n.broken && n.state == waiting && l.epoch.phase != finished {
		// It has no workers to lose: if it lives, it joins again at once.
		return n, "its connection broke while it was waiting"
	}
	l.expect(n)
	return nil, ""
}

// silence: nothing is known of a node that has another request open.
func (l *liveness) silence(e Silence) {
	if n := l.members.nodes[e.ID]; n != nil && n.away() {
		n.broken = true
		l.fallSilent(n)
		l.expect(n)
	}
}

// unreachable shortens the wait for a silent host. Where more than half of the nodes are suspect, that says nothing of
// this one: they may all have been cut off from here together.
func (l *liveness) unreachable(e Unreachable) {
	n := l.members.nodes[e.ID]
	if n != nil && n.silent && 2*l.members.suspects() <= len(l.members.nodes) {
		n.unreachable = true
		l.expect(n)
	}
}

// hungUp makes n suspect, but does not lose it: a launcher that lives may have closed one connection of several. On a
// busy machine it is not back in a second. A launcher that ends its workers keeps its connection, and dials again at
// once if that closes: it has the grace of a broken request.
func (l *liveness) hungUp(now time.Time, e HungUp) {
	if n := l.members.nodes[e.ID]; n != nil && n.away() {
		n.broken, n.hungUp, n.detached = true, n.state != pending, now
		l.expect(n)
	}
}

// refused ends the wait for a launcher that is dead. Where most nodes are suspect, a middlebox may have refused.
func (l *liveness) refused(e Refused) (lost *node, why string) {
	n := l.members.nodes[e.ID]
	if n == nil || !n.suspect() || n.silent || l.members.inDoubt() {
		return nil, ""
	}
	return n, "its connection broke, and its launcher's port is closed"
}

func (l *liveness) fallSilent(n *node) {
	n.silent, n.unreachable = true, false
	l.out.note(job.EventSuspect, n.Name, fmt.Sprintf("its host has given no sign of life for %s", SuspectAfter))
}

// grace is how long the detached node n may stay away.
func (l *liveness) grace(n *node) time.Duration {
	failing := l.epoch.phase == forming && !l.epoch.fresh()
	switch {
	case n.hungUp:
		return hungUpGrace
	case n.silent && failing:
		return SuspectAfter
	case n.unreachable:
		return cmp.Or(l.params.NodeTimeout, UnreachableAfter)
	case !n.broken, n.silent:
		return l.params.nodeTimeout()
	case failing:
		return brokenGraceFailing
	default:
		return BrokenGrace
	}
}

// expect has the detached node n looked at when its grace is over.
func (l *liveness) expect(n *node) { l.watch(n.detached.Add(l.grace(n))) }

func (l *liveness) watch(at time.Time) {
	if l.at.IsZero() || at.Before(l.at) {
		l.at = at
	}
}

// due are the nodes that may have stayed away for too long; doubt says that most are suspect. It scans the nodes only
// when the earliest deadline has passed, so that its cost is not paid per event.
func (l *liveness) due(now time.Time) (away []*node, doubt bool) {
	if l.at.IsZero() || now.Before(l.at) {
		return nil, false
	}
	l.at = time.Time{}
	return l.members.sorted(func(n *node) bool { return n.attached == 0 }), l.members.inDoubt()
}

// expired is why a node that is due is lost, or "".
func (l *liveness) expired(now time.Time, n *node, doubt bool) string {
	grace := l.grace(n)
	if doubt {
		grace = max(grace, l.params.nodeTimeout())
	}
	if due := n.detached.Add(grace); now.Before(due) {
		l.watch(due)
		return ""
	}
	if n.broken && !n.silent {
		return fmt.Sprintf("its connection broke and it did not come back within %s", grace)
	}
	return fmt.Sprintf("silent for %s", grace)
}
