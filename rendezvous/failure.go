package rendezvous

import (
	"fmt"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

// breakFailed ends the epoch because workers of n have failed.
func (r *Round) breakFailed(now time.Time, n *node, d Decision, fs []job.Failure) {
	c := job.Cause{Kind: job.CauseFailure, Node: n.Name, Text: firstText(fs, n)}
	r.breakCharged(now, c, costOf(n, d, fs))
	r.evict(now, n, d, c)
}

// evict goes on without n if that is decided about it.
func (r *Round) evict(now time.Time, n *node, d Decision, c job.Cause) {
	if !r.account.failPendingAt.IsZero() || d != RestartElsewhere && d != Shrink || n.state != pending {
		return
	}
	c.Text = text.Clip(c.Text, maxOrderText)
	if n.can(CanLeave) {
		n.drained = &c
		r.members.become(n, leaving)
		r.out.direct(n, Directive{Kind: job.Stop, Cause: &c})
	}
	if (d == RestartElsewhere || !n.can(CanLeave)) && r.orders.roomForBar(n.Name) {
		r.barName(now, n.Name, &c)
	}
}

// breakCharged ends the epoch at a cost. The run fails if that is final or exceeds the remaining budget, unless a node
// turns out to have died.
func (r *Round) breakCharged(now time.Time, c job.Cause, price cost) {
	r.account.newest.cost = price
	if r.account.hopeless(now) {
		r.failPending(now)
	}
	r.breakWorld(now, c)
	if r.account.failPendingAt.IsZero() {
		r.backOff(now)
	}
}

// failPending lets the run fail soon, unless a node turns out to have died.
func (r *Round) failPending(now time.Time) {
	if r.account.failPendingAt.IsZero() {
		r.gate.leave(now)
		r.account.failPending(now, len(r.epoch.world) <= 1)
	}
}

// backOff delays the next seal, counted from the failure.
func (r *Round) backOff(from time.Time) {
	if text := r.account.backOff(from, r.epoch.id); text != "" {
		r.out.note(job.EventBackOff, "", text)
	}
}

// failRun ends a run with a pending failure, or pauses it if that is wanted.
func (r *Round) failRun(now time.Time) {
	c, price := r.epoch.cause, r.account.newest.cost
	if why := r.account.overrun(now); why != "" && !price.final && !price.hold {
		c = &job.Cause{Kind: job.CauseBudget, Node: price.node, Text: why}
	}
	b := r.params.Budget
	switch {
	case price.hold && !price.final:
		r.holdFailed(now, c, 0)
	case b.HoldFailed:
		r.holdFailed(now, c, b.HoldFor)
	default:
		r.finish(now, job.Failed, c)
	}
}

// holdFailed pauses a run that would fail, for d or, if that is 0, until an order.
func (r *Round) holdFailed(now time.Time, c *job.Cause, d time.Duration) {
	why := "the run would have failed, and is held"
	if price := r.account.newest.cost; price.hold && !price.final {
		why = "a policy holds the run"
	}
	r.account.failPendingAt, r.account.newest.cost = time.Time{}, cost{}
	if r.orders.paused != nil {
		return // it goes on when the order that paused it is taken back
	}
	r.out.note(job.EventHeld, c.Node, fmt.Sprintf("%s %s: %s", why, r.account.hold(now, d), c.Text))
	r.pause(now, c, nil)
}

// overdue ends the run when its time is over.
func (r *Round) overdue(now time.Time) bool {
	if r.epoch.phase == finished || len(r.members.nodes) == 0 {
		return false
	}
	at, c := r.account.limit(r.orders.paused, r.epoch.starting())
	if at.IsZero() || now.Before(at) {
		return false
	}
	r.finish(now, job.Failed, c)
	return true
}

// stepped: a first step ends the wait for it.
func (r *Round) stepped(e Stepped) error {
	if r.members.nodes[e.ID] == nil {
		return ErrUnknownNode
	}
	if e.EpochID == r.epoch.id {
		r.account.progress(job.Progress{Step: 1, Stepping: true})
	}
	return nil
}

// tolerate books failures of workers that do not stop the others of the world.
func (r *Round) tolerate(now time.Time, n *node, e Failing) {
	r.out.note(job.EventRankFailed, n.Name, firstText(e.Failures, n))
	n.failed = n.failed || e.Beside && n.rankBase > 0 // node 0 decides the run's result
	if e.Left > 0 {
		return
	}
	r.members.become(n, succeeded)
	n.failed = true
	r.epoch.results.exhausted++
	r.epoch.results.decision = e.Decision
	r.checkDone(now)
}

// breakExhausted ends an epoch whose workers have all failed, one after the other.
func (r *Round) breakExhausted(now time.Time) {
	n := r.epoch.world[0]
	var fs []job.Failure
	if len(r.epoch.failures) > 0 {
		fs = r.epoch.failures[:1]
	}
	r.breakFailed(now, n, r.epoch.results.decision, fs)
}

// escalate lets a further report of an epoch that has failed count for more than the first one.
func (r *Round) escalate(now time.Time, d Decision) {
	failed := r.epoch.cause != nil && r.epoch.cause.Kind == job.CauseFailure
	if !failed || !oneOf(d, Permanent, Hold, RestartElsewhere, Shrink) {
		return
	}
	r.account.escalate(d)
	if r.account.hopeless(now) {
		r.failPending(now)
	}
}
