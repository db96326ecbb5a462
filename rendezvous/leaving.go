package rendezvous

import (
	"fmt"
	"slices"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

// Leaving. A node announces its departure while its workers still run. All nodes of its world, including itself, get a
// Stop in one step. So the state in their workers' memory is saved together, and no worker sees a broken connection
// first. The others form the next world as soon as they have joined again. They do not wait for the rest of the leaving
// node's work, and it is not charged.

// beginLeave takes a node that will leave out of all that is to come.
func (r *Round) beginLeave(now time.Time, e Leaving) error {
	n, err := r.members.find(e.ID)
	if err != nil {
		return err
	}
	if n.state == leaving || n.state == succeeded || r.epoch.phase == finished {
		return nil // it is known, or the run does not need the node any more
	}
	reason := text.Clip(e.Reason, maxReason)
	text := reason
	if e.Grace > 0 {
		text += fmt.Sprintf(" (within %s)", e.Grace.Round(time.Second/10))
	}
	r.out.note(job.EventLeaving, n.Name, text)
	cause := job.Cause{Kind: job.CauseLeave, Node: n.Name,
		Text: fmt.Sprintf("node %d (%s) is leaving: %s", n.rank, n.Name, reason)}
	switch {
	case n.idle():
	case r.memory.rebuild != nil:
		r.memory.forgo(now, n, cause, job.Loss{Reason: reason, At: now})
		r.out.direct(n, Directive{Kind: job.Stop, Cause: &cause}) // its Run would be no news
	default:
		r.epoch.lose(n, job.Loss{Reason: reason, At: now})
		r.breakWorld(now, cause)
	}
	r.members.become(n, leaving)
	return nil
}

// drain has all nodes of the name leave, and keeps others of that name without workers. A launcher that does not
// support this stays, barred.
func (r *Round) drain(now time.Time, name string, c *job.Cause) {
	ns := r.members.sorted(func(n *node) bool { return n.Name == name && n.can(CanLeave) })
	for _, n := range ns {
		n.drained = c
	}
	for _, n := range ns {
		_ = r.beginLeave(now, Leaving{ID: n.ID, Reason: c.Text}) // it is here
	}
	r.checks.barName(name, c)
	r.enforce(now)
	for _, n := range ns {
		if n.dir.Leave == nil {
			r.out.direct(n, Directive{Kind: job.Bar, Cause: c})
		}
	}
}

// shortage is the error if the sound nodes that are here, apart from those that the order drains, form no world of
// Least nodes.
func (o *Order) shortage(m *members, p *Params) error {
	if o.Least == 0 {
		return nil
	}
	count := 0
	for _, n := range m.nodes {
		fit := n.state == member || (n.state == waiting || n.state == checking) && n.bar == nil
		if fit && n.Name != o.Node && !n.suspect() {
			count++
		}
	}
	least := max(o.Least, p.Min)
	if size := p.fit(count); size < least {
		return fmt.Errorf("%w: without node %q the world has %d nodes, and %d are needed", ErrBadOrder, o.Node, size, least)
	}
	return nil
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
	rebuilds := r.memory.rebuild != nil
	if r.epoch.votes && (rebuilds && n.rank >= 0 || r.epoch.seated(n)) && !n.idle() {
		heard := slices.MaxFunc([]time.Time{n.since, n.detached}, time.Time.Compare)
		r.epoch.away = append(r.epoch.away, away{n.ID, n.Name, n.rank, heard, silent && n.mute(), rebuilds})
	}
	if n.idle() || n.state == succeeded || n.state == leaving || r.epoch.phase == finished {
		return // it has no work to do; the world does not need it any more
	}
	loss := job.Loss{Reason: reason, At: lossTime(now, n, kind), Silent: silent}
	cause := job.Cause{Kind: kind, Node: n.Name, Text: fmt.Sprintf("node %d (%s) is gone: %s", n.rank, n.Name, reason)}
	if rebuilds {
		r.memory.forgo(now, n, cause, loss)
		return
	}
	r.epoch.lose(n, loss)
	r.breakWorld(now, cause)
}

// lossTime is when the node went away, not when patience ran out.
func lossTime(now time.Time, n *node, kind job.CauseKind) time.Time {
	if kind == job.CauseLoss && n.attached == 0 {
		return n.detached
	}
	return now
}
