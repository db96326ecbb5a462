package rendezvous

import (
	"fmt"
	"time"

	"dlrover-run/internal/job"
)

func (r *Round) failing(now time.Time, e Failing) error {
	n, err := r.members.find(e.ID)
	if err != nil {
		return err
	}
	if e.EpochID != r.epoch.id {
		return nil
	}
	r.epoch.kept.record(e.Failures)
	r.account.progress(e.Progress)
	switch {
	case r.memory.rebuild != nil:
		r.memory.rebuild.fail(now, e)
		return nil
	case r.epoch.collecting():
		if !e.Beside && r.epoch.failed() && r.account.escalate(now, e.Decision) {
			r.gate.failPending(now, r.account)
		}
		if r.account.failPendingAt.IsZero() {
			r.checks.evict(n, e.Decision, job.Cause{Kind: job.CauseFailure, Node: n.Name, Text: firstText(e.Failures, n)})
		}
		return nil
	case r.epoch.phase != running || n.state != member:
		return nil // this epoch is ending already, and why is known
	case e.Tolerated, e.Beside && r.account.futile(now, costOf(n, e.Decision, e.Failures)):
		r.out.note(job.EventRankFailed, n.Name, firstText(e.Failures, n))
		r.epoch.tolerate(n, e, r.members)
		r.checkDone(now)
		return nil
	}
	r.breakFailed(now, n, e.Decision, e.Failures)
	return nil
}

// checkDone ends the run when its success rule is met, or starts it anew when that is the policy and a restart is left.
func (r *Round) checkDone(now time.Time) {
	switch {
	case r.epoch.phase == running && r.epoch.results.exhausted >= r.epoch.working:
		first := r.epoch.kept.failures[:min(len(r.epoch.kept.failures), 1)]
		r.breakFailed(now, r.epoch.world[0], r.epoch.results.decision, first)
	case r.epoch.phase != running || !r.epoch.results.enough(r.params.Budget.Success, r.epoch.over()):
	case r.account.always():
		r.breakWorld(now, job.Cause{Kind: job.CauseFailure, Text: "all workers succeeded, and the restart policy is Always"})
	default:
		r.finish(now, job.Succeeded, nil)
	}
}

// breakFailed ends the epoch because workers of n have failed.
func (r *Round) breakFailed(now time.Time, n *node, d Decision, fs []job.Failure) {
	c := job.Cause{Kind: job.CauseFailure, Node: n.Name, Text: firstText(fs, n)}
	r.breakCharged(now, c, costOf(n, d, fs))
	if r.account.failPendingAt.IsZero() {
		r.checks.evict(n, d, c)
	}
}

// breakCharged ends the epoch at a cost. The run fails if that is final or exceeds the remaining budget, unless a node
// turns out to have died.
func (r *Round) breakCharged(now time.Time, c job.Cause, price cost) {
	r.account.newest.cost = price
	if r.account.hopeless(now) {
		r.gate.failPending(now, r.account)
	}
	r.breakWorld(now, c)
	if r.account.failPendingAt.IsZero() {
		r.account.backOff(now, r.epoch.id, r.out)
	}
}

// failPending lets the run fail soon, unless a node turns out to have died.
func (g *gate) failPending(now time.Time, a *account) {
	if a.failPendingAt.IsZero() {
		g.leave(now)
		a.failPending(now, len(g.epoch.world) <= 1)
	}
}

// breakWorld ends the current epoch: every member has to stop its workers and join
// again. The first cause stands; a loss replaces a failure, which it explains.
func (r *Round) breakWorld(now time.Time, c job.Cause) {
	broken := r.epoch.collecting()
	if !broken {
		r.epoch.breaks(now)
		r.account.broke(now)
		r.sealer.cancel()
		r.gate.reopen()
		r.out.note(job.EventBreak, c.Node, c.Text).Cause = c.Kind
	}
	if r.epoch.cause == nil || (c.Kind == job.CauseLoss && r.epoch.cause.Kind != job.CauseLoss) {
		r.epoch.cause = &c
	}
	if broken {
		return // everyone has the final directive
	}
	for _, n := range r.epoch.world {
		if !r.members.here(n) || (n.state != member && n.state != succeeded) {
			continue
		}
		r.members.become(n, pending)
		r.out.direct(n, Directive{Kind: job.Stop, Cause: r.epoch.cause})
		if n.suspect() {
			r.liveness.expect(n)
		}
	}
}

// judge decides an epoch with a pending failure. A node that died meanwhile explains the failure and costs nothing; a
// suspect is waited for. Otherwise the run fails.
func (r *Round) judge(now time.Time) {
	if r.epoch.elastic {
		r.account.failPendingAt = time.Time{}
		return
	}
	if now.Before(r.account.failPendingAt) {
		return
	}
	if !r.account.hopeless(now) { // others have reported progress meanwhile
		r.account.failPendingAt = time.Time{}
		r.account.backOff(r.account.newest.brokeAt, r.epoch.id, r.out)
		return
	}
	for _, n := range r.epoch.world {
		if n.state == pending && r.members.here(n) && n.suspect() {
			r.account.failPendingAt = n.detached.Add(r.params.nodeTimeout()) // liveness decides sooner
			return
		}
	}
	r.failRun(now)
}

// failRun ends a run with a pending failure, or pauses it if that is wanted.
func (r *Round) failRun(now time.Time) {
	c, b, price := r.epoch.cause, r.params.Budget, r.account.newest.cost
	byPolicy := price.hold && !price.final
	if why := r.account.overrun(now); why != "" && !price.final && !price.hold {
		c = &job.Cause{Kind: job.CauseBudget, Node: price.node, Text: why}
	}
	if !byPolicy && !b.HoldFailed {
		r.finish(now, job.Failed, c)
		return
	}
	r.account.failPendingAt, r.account.newest.cost = time.Time{}, cost{}
	if r.orders.paused != nil {
		return // it goes on when the order that paused it is taken back
	}
	text, d := "the run would have failed, and is held", b.HoldFor
	if byPolicy {
		text, d = "a policy holds the run", 0
	}
	r.out.note(job.EventHeld, c.Node, fmt.Sprintf("%s %s: %s", text, r.account.hold(now, d), c.Text))
	r.pause(now, c, nil)
}
