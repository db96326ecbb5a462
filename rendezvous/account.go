package rendezvous

import (
	"fmt"
	"time"

	"dlrover-run/internal/duration"
	"dlrover-run/internal/job"
)

// account counts the restarts that a run spends of its Budget. Every end of an epoch has a cost, which is booked at the
// next seal. By then it is known whether a node has come or gone meanwhile: that explains the failure, and costs
// nothing. Whether a further restart is allowed is decided when the epoch breaks, and once more before the run fails.
type account struct {
	params   *Params
	restarts int
	spent    Spent
	spentIn  job.EpochID // the newest epoch that was known to the node that brought spent
	sent     *Spent      // spent, for directives; nil: it has changed, or is zero
	newest   attempt

	backoffAt     time.Time // no world is sealed before
	failPendingAt time.Time // the run fails then, unless a node turns out to have died
}

// progress books how far the workers of the newest epoch have come.
func (a *account) progress(p job.Progress) { a.newest.progress = a.newest.progress.With(p.Reached()) }

// ran books that workers were started, or began to wait because the run is held.
func (a *account) ran(now time.Time, held bool) {
	a.newest.ranAt = now
	if a.spent.Since.IsZero() && a.params.Budget.Deadline > 0 && !held {
		a.spent.Since, a.sent = now, nil
	}
}

// stepped books a first step, which ends the wait for it, or progress since.
func (a *account) stepped(p job.Progress) {
	if p == (job.Progress{}) {
		p = job.Progress{Step: 1, Stepping: true}
	}
	a.progress(p)
}

// broke books that they are being stopped.
func (a *account) broke(now time.Time) { a.newest.brokeAt = now }

// hopeless: the broken epoch cannot be followed by another one.
func (a *account) hopeless(now time.Time) bool {
	c := a.newest.cost
	return c.final || c.hold || c.charge && a.restarts >= a.params.MaxRestarts || a.overrun(now) != ""
}

// futile: no restart may follow a failure that, by its own, ends nothing.
func (a *account) futile(now time.Time, c cost) bool {
	before := a.newest.cost
	a.newest.cost = c
	futile := !c.hold && a.hopeless(now)
	a.newest.cost = before
	return futile
}

// escalate lets a further report of an epoch that has failed count for more than the first one, as a policy wants on
// purpose. It returns whether the run has to fail then. A mere restart counts no more: most failures only follow the
// first.
func (a *account) escalate(now time.Time, d Decision) (hopeless bool) {
	more := d.consequence()
	if !more.final && !more.hold && !more.leave {
		return false
	}
	c := &a.newest.cost
	c.final, c.hold, c.charge = c.final || more.final, c.hold || more.hold, c.charge || more.charge
	return a.hopeless(now)
}

// failPending lets the run fail soon, unless a node turns out to have died.
func (a *account) failPending(now time.Time, alone bool) {
	a.failPendingAt = now
	if !alone {
		a.failPendingAt = now.Add(attributionWindow)
	}
}

// cameBack ends the wait for a suspect node, which might have explained the failure.
func (a *account) cameBack() {
	if !a.failPendingAt.IsZero() {
		a.failPendingAt = a.newest.brokeAt.Add(attributionWindow)
	}
}

// overrun returns the bound that a further restart would break, or "".
func (a *account) overrun(now time.Time) string {
	c, b := a.newest.cost, a.params.Budget
	if !c.count {
		return ""
	}
	if at := a.newest.brokeAt; !at.IsZero() {
		now = at // the condition was true then
	}
	streak, fruitless := a.newest.streaks(now, a.spent)
	same := a.newest.same(now, a.spent)
	switch {
	case b.SameFailures > 0 && same >= b.SameFailures:
		return fmt.Sprintf("workers have failed %d times in a row before their first step (--same-failures): %s",
			same, c.text)
	case a.sumSpent():
		return fmt.Sprintf("%d restarts of the job, whether they have brought progress or not (--backoff-limit)",
			a.spent.Sum)
	case b.BackoffLimit >= 0 && streak >= b.BackoffLimit:
		return fmt.Sprintf("%d restarts in a row have brought no progress (--backoff-limit)", streak)
	case b.NoProgress > 0 && fruitless >= b.NoProgress:
		return fmt.Sprintf("%d restarts in a row have brought neither a newer checkpoint nor more steps (--no-progress)",
			fruitless)
	}
	for _, w := range b.Windows {
		if n := a.spent.within(now, w, c); w.Max > 0 && n >= w.Max {
			return fmt.Sprintf("%d restarts of %s within %s (--restart-window)", n, w.subject(c), duration.Text(w.Per))
		}
	}
	return ""
}

// sumSpent: BackoffLimit bounds all restarts together, and there have been as many.
func (a *account) sumSpent() bool {
	b := a.params.Budget
	return b.Sum && b.BackoffLimit >= 0 && a.spent.Sum >= b.BackoffLimit
}

// always reports whether the restart policy Always starts workers that have succeeded once more, and charges that.
func (a *account) always() bool {
	again := a.params.Always && a.restarts < a.params.MaxRestarts && !a.sumSpent()
	a.newest.cost.charge = a.newest.cost.charge || again
	return again
}

// backOff delays the next seal, counted from the failure.
func (a *account) backOff(now time.Time, id job.EpochID, out *outbox) {
	if !a.newest.cost.count {
		return
	}
	streak, _ := a.newest.streaks(now, a.spent)
	d := a.params.Budget.backoff(streak, id)
	if d == 0 {
		return
	}
	a.backoffAt = now.Add(d)
	out.note(job.EventBackOff, "", fmt.Sprintf(
		"%d restarts in a row have brought no progress; the next start waits %s", streak,
		d.Round(100*time.Microsecond)))
}

// backingOff: the next world has to wait. It does not if a node has come or gone: that explains the failure.
func (a *account) backingOff(now time.Time, elastic bool) bool {
	if !elastic && now.Before(a.backoffAt) {
		return true
	}
	a.backoffAt = time.Time{}
	return false
}

// book enters the end of the newest epoch, at the seal of the next one. An elastic end costs nothing.
func (a *account) book(now time.Time, elastic bool) {
	t, s, b := &a.newest, a.spent, a.params.Budget
	charged, counts := t.cost.charge && !elastic, t.cost.count && !elastic
	s.Streak, s.Fruitless = t.streaks(now, a.spent)
	s.Same, s.Alike = 0, ""
	if t.fruitful(now, s.Best) {
		s.Best = reached(s.Best, t.progress)
	}
	if counts {
		s.Streak++
		s.Fruitless++
		s.remember(now, b.Windows, t.cost)
		s.Same = t.same(now, a.spent)
	}
	if s.Same > 0 {
		s.Alike = t.cost.alike
	}
	if b.Sum && (counts || charged) {
		s.Sum++
	}
	*a = account{params: a.params, restarts: a.restarts, spent: s}
	if charged {
		a.restarts++
	}
}

// directive is the value of Directive.Spent; all nodes share it.
func (a *account) directive() *Spent {
	if a.sent == nil && !a.spent.zero() {
		s := a.spent
		s.Recent = s.Recent[max(0, len(s.Recent)-maxRecentTold):]
		a.sent = &s
	}
	return a.sent
}

// restore takes over the budget that an earlier daemon had sent to the node, unless a newer epoch is known. Of one
// epoch what is larger counts; after the end of a pause, which may begin a new budget, the known value.
func (a *account) restore(now time.Time, e Join, fresh, unpaused bool) {
	a.restarts = max(a.restarts, e.Restarts)
	same := e.Seen == a.spentIn
	if e.Spent == nil || !fresh || a.spentIn.Newer(e.Seen) || same && unpaused {
		return
	}
	s := e.Spent.brought(now, e.Paused != nil)
	if same {
		s = s.larger(a.spent)
	}
	a.spent, a.spentIn, a.sent = s, e.Seen, nil
}

// hold books that the run is paused instead of failing, for d or, if that is 0, until an order.
func (a *account) hold(now time.Time, d time.Duration) (until string) {
	a.spent.Held, a.sent = true, nil
	if d == 0 {
		return "until an order"
	}
	a.spent.HeldUntil = now.Add(d)
	return "for " + duration.Text(d)
}

// pauseBegins and pauseEnds keep pauses out of the Deadline. A run that resumes after a failure begins with a new
// budget.
func (a *account) pauseBegins(now time.Time) {
	if a.spent.PausedAt.IsZero() { // else it began in the time of an earlier daemon
		a.spent.PausedAt, a.sent = now, nil
	}
}

// unpaused drops a pause of an earlier daemon that has ended.
func (a *account) unpaused() {
	if !a.spent.PausedAt.IsZero() {
		a.spent.PausedAt, a.sent = time.Time{}, nil
	}
}

func (a *account) pauseEnds(now time.Time) {
	if !a.spent.Since.IsZero() && !a.spent.PausedAt.IsZero() {
		a.spent.Since = a.spent.Since.Add(now.Sub(a.spent.PausedAt))
	}
	if a.spent.Held {
		a.spent = Spent{Since: a.spent.Since, Best: a.spent.Best}
	}
	a.spent.PausedAt, a.backoffAt, a.sent = time.Time{}, time.Time{}, nil
}

// limit is when time alone ends the run, and why; zero when it never does. A start is one whose first step is awaited.
func (a *account) limit(paused *job.Cause, start bool) (at time.Time, c *job.Cause) {
	b, ranAt := a.params.Budget, a.newest.ranAt
	switch {
	case paused != nil:
		if a.spent.Held {
			return a.spent.HeldUntil, paused
		}
		return time.Time{}, nil
	case !a.spent.Since.IsZero() && b.Deadline > 0:
		at = a.spent.Since.Add(b.Deadline)
		c = &job.Cause{Kind: job.CauseDeadline,
			Text: fmt.Sprintf("the job has taken longer than %s (--deadline)", duration.Text(b.Deadline))}
	}
	waits := start && b.StartDeadline > 0 && a.newest.progress.Step == 0 && !ranAt.IsZero()
	if due := ranAt.Add(b.StartDeadline); waits && (c == nil || due.Before(at)) {
		at = due
		c = &job.Cause{Kind: job.CauseNoStep, Text: fmt.Sprintf(
			"no worker has made a step within %s of its start (--start-deadline)", duration.Text(b.StartDeadline))}
	}
	return at, c
}

// status is the remaining budget, for people. The newest epoch has the id.
func (a *account) status(id job.EpochID) *BudgetStatus {
	s, b := a.spent, a.params.Budget
	st := &BudgetStatus{
		Streak: s.Streak, Limit: b.BackoffLimit, NextWait: b.backoff(s.Streak, id), Fruitless: s.Fruitless,
		BackoffUntil: a.backoffAt, Recent: s.Recent, HeldUntil: s.HeldUntil, Sum: s.Sum, SumCounts: b.Sum,
	}
	if !s.Since.IsZero() && b.Deadline > 0 {
		st.Deadline = s.Since.Add(b.Deadline)
	}
	return st
}
