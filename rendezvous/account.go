package rendezvous

import (
	"fmt"
	"slices"
	"time"

	"dlrover-run/internal/duration"
	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

// The account of a Round's Budget. Every end of an epoch has a cost, which is booked at the next seal. By then it is
// known whether a node has come or gone meanwhile: that explains the failure, and costs nothing. Whether a further
// restart is allowed is decided when the epoch breaks, and once more before the run fails.

// Spent is the part of its Budget that a run has used. Directives carry it, and nodes return it to a restarted daemon.
// Its times are those of the first daemon's clock.
type Spent struct {
	// Since is when workers were first started, later by the time in pauses. Zero without a Deadline.
	Since time.Time `json:"since,omitzero"`
	// Streak are the restarts in a row without progress, and Fruitless those without a newer checkpoint or more steps.
	Streak    int `json:"streak,omitempty"`
	Fruitless int `json:"fruitless,omitempty"`
	// Sum are all restarts, if Budget.Sum wants them counted.
	Sum int `json:"sum,omitempty"`
	// Same is how often in a row workers have failed before their first step with the fingerprint Alike.
	Same  int    `json:"same,omitempty"`
	Alike string `json:"alike,omitempty"`
	// Best is how far the run has come.
	Best job.Progress `json:"best,omitzero"`
	// Recent are the newest restarts, the oldest first, if Windows count them.
	Recent []Restarted `json:"recent,omitempty"`
	// Held: the run would have failed, and was paused instead, until then; zero is until an order.
	Held      bool      `json:"held,omitempty"`
	HeldUntil time.Time `json:"held_until,omitzero"`
}

// Restarted is one restart, and the failure that has led to it.
type Restarted struct {
	At   time.Time `json:"at"`
	Node string    `json:"node,omitempty"`
	Rank int       `json:"rank"` // -1: none
}

// Bounds of Spent.
const (
	maxRecent     = 1024 // restarts that are kept
	maxRecentTold = 32   // and sent to nodes
	maxAlike      = 256  // bytes
)

// account is a Round's record of its Budget.
type account struct {
	Spent   Spent       `json:"spent,omitzero"`
	SpentIn job.EpochID `json:"spent_in,omitzero"` // the newest epoch that was known to the node that brought Spent

	// Of the newest epoch:
	Cost     cost         `json:"toll,omitzero"`
	Progress job.Progress `json:"progress,omitzero"`
	RanAt    time.Time    `json:"ran_at,omitzero"`   // its workers were started
	BrokeAt  time.Time    `json:"broke_at,omitzero"` // and are being stopped since then

	BackoffAt time.Time `json:"backoff_at,omitzero"` // no world is sealed before
	PausedAt  time.Time `json:"paused_at,omitzero"`
}

// cost is the price of an epoch's end, besides one of MaxRestarts.
type cost struct {
	Count bool   `json:"count,omitempty"` // in Streak and all that is like it
	Final bool   `json:"final,omitempty"` // the run fails, whatever its remaining budget
	Hold  bool   `json:"hold,omitempty"`  // the run is paused
	Node  string `json:"node,omitempty"`
	Rank  int    `json:"rank,omitempty"` // of the first failure; -1: none
	Alike string `json:"alike,omitempty"`
	Text  string `json:"text,omitempty"` // of the first failure
}

// charged reports whether d spends one of MaxRestarts. A decision of a later version does.
func (d Decision) charged() bool { return !oneOf(d, RestartFree, Permanent, Hold) }

// breakFailed ends the epoch because workers of n have failed.
func (r *Round) breakFailed(now time.Time, n *node, d Decision, fs []job.Failure) {
	c := job.Cause{Kind: job.CauseFailure, Node: n.Name, Text: firstText(fs, n)}
	r.breakCharged(now, c, d.charged(), costOf(n, d, fs))
	r.evict(now, n, d, c)
}

// costOf is the cost of failures of n's workers.
func costOf(n *node, d Decision, fs []job.Failure) cost {
	t := cost{Count: true, Final: d == Permanent, Hold: d == Hold, Node: n.Name, Rank: -1, Alike: fingerprint(fs, n),
		Text: text.Clip(firstText(fs, n), maxOrderText)}
	if len(fs) > 0 {
		t.Rank = fs[0].Rank
	}
	return t
}

// futile: no restart may follow a failure that, by its own, ends nothing.
func (r *Round) futile(now time.Time, n *node, e Failing) bool {
	charge, t := r.charge, r.account.Cost
	r.charge, r.account.Cost = e.Decision.charged(), costOf(n, e.Decision, e.Failures)
	futile := e.Decision != Hold && r.hopeless(now)
	r.charge, r.account.Cost = charge, t
	return futile
}

// escalate lets a further report of an epoch that has failed count for more than the first one, as a policy wants on
// purpose. A mere restart does not: most failures only follow the first.
func (r *Round) escalate(now time.Time, d Decision) {
	if r.epoch.cause == nil || r.epoch.cause.Kind != job.CauseFailure || !oneOf(d, Permanent, Hold, RestartElsewhere, Shrink) {
		return
	}
	t := &r.account.Cost
	t.Final, t.Hold = t.Final || d == Permanent, t.Hold || d == Hold
	r.charge = r.charge || d.charged()
	if r.hopeless(now) {
		r.failPending(now)
	}
}

// evict goes on without n if that is decided about it.
func (r *Round) evict(now time.Time, n *node, d Decision, c job.Cause) {
	if !r.failPendingAt.IsZero() || d != RestartElsewhere && d != Shrink || n.state != pending {
		return
	}
	c.Text = text.Clip(c.Text, maxOrderText)
	if n.can(CanLeave) {
		n.drained = &c
		r.members.become(n, leaving)
		r.direct(n, Directive{Kind: job.Stop, Cause: &c})
	}
	if (d == RestartElsewhere || !n.can(CanLeave)) && r.roomForBar(n.Name) {
		r.barName(now, n.Name, &c)
	}
}

// fingerprint is the common part of failures of one kind: for those of older launchers, their text.
func fingerprint(fs []job.Failure, n *node) string {
	alike := firstText(fs, n)
	if len(fs) > 0 && fs[0].Fingerprint != "" {
		alike = fs[0].Fingerprint
	}
	return text.Clip(alike, maxAlike)
}

// breakCharged ends the epoch, at the cost of a restart if charge is set, and of t. The run fails if t is final or
// exceeds the remaining budget, unless a node turns out to have died.
func (r *Round) breakCharged(now time.Time, c job.Cause, charge bool, t cost) {
	r.charge, r.account.Cost = charge, t
	if r.hopeless(now) {
		r.failPending(now)
	}
	r.breakWorld(now, c)
	if r.failPendingAt.IsZero() {
		r.backOff(now)
	}
}

// hopeless: the broken epoch cannot be followed by another one.
func (r *Round) hopeless(now time.Time) bool {
	t := r.account.Cost
	return t.Final || t.Hold || r.charge && r.epoch.restarts >= r.params.MaxRestarts || r.overrun(now) != ""
}

// overrun returns the bound that a further restart would break, or "".
func (r *Round) overrun(now time.Time) string {
	t, b := r.account.Cost, r.params.Budget
	if !t.Count {
		return ""
	}
	if at := r.account.BrokeAt; !at.IsZero() {
		now = at // the condition was true then
	}
	streak, fruitless := r.streaks(now)
	same := r.same(now)
	switch {
	case b.SameFailures > 0 && same >= b.SameFailures:
		return fmt.Sprintf("workers have failed %d times in a row before their first step (--same-failures): %s",
			same, t.Text)
	case r.sumSpent():
		return fmt.Sprintf("%d restarts of the job, whether they have brought progress or not (--backoff-limit)",
			r.account.Spent.Sum)
	case b.BackoffLimit >= 0 && streak >= b.BackoffLimit:
		return fmt.Sprintf("%d restarts in a row have brought no progress (--backoff-limit)", streak)
	case b.NoProgress > 0 && fruitless >= b.NoProgress:
		return fmt.Sprintf("%d restarts in a row have brought neither a newer checkpoint nor more steps (--no-progress)",
			fruitless)
	}
	for _, w := range b.Windows {
		if n := r.within(now, w); w.Max > 0 && n >= w.Max {
			return fmt.Sprintf("%d restarts of %s within %s (--restart-window)", n, w.subject(t), duration.Text(w.Per))
		}
	}
	return ""
}

// sumSpent: BackoffLimit bounds all restarts together, and there have been as many.
func (r *Round) sumSpent() bool {
	b := r.params.Budget
	return b.Sum && b.BackoffLimit >= 0 && r.account.Spent.Sum >= b.BackoffLimit
}

// subject is the node, rank or job whose restarts w counts after a failure.
func (w Window) subject(t cost) string {
	switch w.Scope {
	case windowRank:
		return fmt.Sprintf("rank %d", t.Rank)
	case windowNode:
		return "node " + t.Node
	}
	return "the job"
}

// within is how many restarts w counts that were like the one that is due.
func (r *Round) within(now time.Time, w Window) (n int) {
	t := r.account.Cost
	for _, e := range r.account.Spent.Recent {
		like := w.Scope == windowJob || w.Scope == windowNode && e.Node == t.Node && t.Node != "" ||
			w.Scope == windowRank && e.Rank == t.Rank && t.Rank >= 0
		if like && now.Sub(e.At) < w.Per {
			n++
		}
	}
	return n
}

// ran is for how long the workers of the newest epoch have run.
func (r *Round) ran(now time.Time) time.Duration {
	a := &r.account
	if a.RanAt.IsZero() {
		return 0
	}
	if !a.BrokeAt.IsZero() {
		now = a.BrokeAt
	}
	return now.Sub(a.RanAt)
}

// fruitful: the newest epoch has a newer checkpoint or more steps than any before or, where neither is known, was long.
func (r *Round) fruitful(now time.Time) bool {
	p := r.account.Progress
	return p.Beyond(r.account.Spent.Best) || !p.Stepping && !p.Saving && r.ran(now) >= longEpoch
}

// progressed is fruitful, but gives the benefit of the doubt: to a long epoch and, without checkpoints that the
// launchers know, to each step.
func (r *Round) progressed(now time.Time) bool {
	p := r.account.Progress
	return r.fruitful(now) || r.ran(now) >= longEpoch || !p.Saving && p.Step > 0
}

// streaks are Streak and Fruitless, without the resets that the newest epoch's progress causes.
func (r *Round) streaks(now time.Time) (streak, fruitless int) {
	if !r.progressed(now) {
		streak = r.account.Spent.Streak
	}
	if !r.fruitful(now) {
		fruitless = r.account.Spent.Fruitless
	}
	return streak, fruitless
}

// early reports whether the newest epoch ended before its first step. Where steps are unknown, a short epoch without
// progress counts as early.
func (r *Round) early(now time.Time) bool {
	p := r.account.Progress
	return p.Step == 0 && !r.progressed(now) && (p.Stepping || r.ran(now) < earlyEpoch)
}

// same is how often in a row workers have failed like this before their first step.
func (r *Round) same(now time.Time) int {
	a := &r.account
	switch {
	case a.Cost.Alike == "" || !r.early(now):
		return 0
	case a.Cost.Alike == a.Spent.Alike:
		return a.Spent.Same + 1
	}
	return 1
}

// backoff is how long a start waits after so many restarts without progress. It differs a little from epoch to epoch.
func (r *Round) backoff(streak int) time.Duration {
	b := r.params.Budget
	if streak <= 0 || b.BackoffMax <= 0 {
		return 0
	}
	d := b.BackoffMin
	for i := 1; i < streak && d < b.BackoffMax; i++ {
		d *= 2
	}
	d = min(d, b.BackoffMax)
	return d - time.Duration(mixed(r.epoch.id)%uint64(d/4+1))
}

// mixed is a number that looks random, and is the same for the same epoch.
func mixed(e job.EpochID) uint64 {
	x := e.Term ^ uint64(e.Round)<<32 ^ uint64(e.Epoch)
	for range 2 { // the finalizer of SplitMix64
		x += 0x9e3779b97f4a7c15
		x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
		x = (x ^ x>>27) * 0x94d049bb133111eb
		x ^= x >> 31
	}
	return x
}

// backOff delays the next seal, counted from the failure.
func (r *Round) backOff(now time.Time) {
	if !r.account.Cost.Count {
		return
	}
	streak, _ := r.streaks(now)
	d := r.backoff(streak)
	if d == 0 {
		return
	}
	r.account.BackoffAt = now.Add(d)
	r.note(job.EventBackOff, "", fmt.Sprintf(
		"%d restarts in a row have brought no progress; the next start waits %s", streak,
		d.Round(100*time.Microsecond)))
}

// backingOff: the next world has to wait. It does not if a node has come or gone: that explains the failure.
func (r *Round) backingOff(now time.Time) bool {
	if !r.epoch.elastic && now.Before(r.account.BackoffAt) {
		return true
	}
	r.account.BackoffAt = time.Time{}
	return false
}

// book enters the end of the newest epoch, at the seal of the next one.
func (r *Round) book(now time.Time) {
	a := &r.account
	s := &a.Spent
	counts := a.Cost.Count && !r.epoch.elastic
	same := 0
	if counts {
		same = r.same(now)
	}
	s.Streak, s.Fruitless = r.streaks(now)
	if r.fruitful(now) {
		s.Best = reached(s.Best, a.Progress)
	}
	if counts {
		s.Streak++
		s.Fruitless++
		r.bookRecent(now)
	}
	if r.params.Budget.Sum && (counts || r.charge && !r.epoch.elastic) {
		s.Sum++
	}
	if s.Same = same; same > 0 {
		s.Alike = a.Cost.Alike
	} else {
		s.Alike = ""
	}
	r.spent = nil
	*a = account{Spent: a.Spent}
}

// begun: workers are started.
func (r *Round) begun(now time.Time) {
	if r.account.Spent.Since.IsZero() && r.params.Budget.Deadline > 0 && !r.epoch.held {
		r.account.Spent.Since, r.spent = now, nil
	}
}

// reached is the best progress of a run whose newest epoch has reached o, which is further than p.
func reached(p, o job.Progress) job.Progress {
	if o.Saving && (!p.Saving || o.Checkpoint > p.Checkpoint) {
		return o // steps count from there
	}
	return p.With(o)
}

func (r *Round) bookRecent(now time.Time) {
	if r.params.Budget.Windows == ([MaxWindows]Window{}) {
		return
	}
	var longest time.Duration
	for _, w := range r.params.Budget.Windows {
		longest = max(longest, w.Per)
	}
	old := func(e Restarted) bool { return now.Sub(e.At) >= longest }
	recent := slices.DeleteFunc(slices.Clone(r.account.Spent.Recent), old)
	recent = append(recent, Restarted{At: now, Node: r.account.Cost.Node, Rank: r.account.Cost.Rank})
	r.account.Spent.Recent = recent[max(0, len(recent)-maxRecent):]
}

// spentNow is the value in directives; all share it.
func (r *Round) spentNow() *Spent {
	s := r.account.Spent
	none := job.Progress{}
	if r.spent == nil && (!s.Since.IsZero() || s.Streak > 0 || s.Fruitless > 0 || s.Same > 0 || s.Best != none ||
		s.Sum > 0 || len(s.Recent) > 0 || s.Held) {
		s.Recent = s.Recent[max(0, len(s.Recent)-maxRecentTold):]
		r.spent = &s
	}
	return r.spent
}

// restoreSpent takes over the budget that an earlier daemon had sent to the node, unless another node knows a newer
// epoch.
func (r *Round) restoreSpent(now time.Time, e Join) {
	a := &r.account
	if e.Spent == nil || !r.epoch.fresh() || a.SpentIn.Newer(e.Seen) {
		return
	}
	s := *e.Spent
	s.Streak, s.Fruitless, s.Same, s.Sum = max(s.Streak, 0), max(s.Fruitless, 0), max(s.Same, 0), max(s.Sum, 0)
	s.Alike, s.Held = text.Clip(s.Alike, maxAlike), s.Held && e.Paused != nil
	s.Recent = slices.Clone(s.Recent[max(0, len(s.Recent)-maxRecentTold):])
	if s.Since.After(now) {
		s.Since = now
	}
	a.Spent, a.SpentIn, r.spent = s, e.Seen, nil
}

// failRun ends a run with a pending failure, or pauses it if that is wanted.
func (r *Round) failRun(now time.Time) {
	c, t := r.epoch.cause, r.account.Cost
	if why := r.overrun(now); why != "" && !t.Final && !t.Hold {
		c = &job.Cause{Kind: job.CauseBudget, Node: t.Node, Text: why}
	}
	b := r.params.Budget
	switch {
	case t.Hold && !t.Final:
		r.holdFailed(now, c, 0)
	case b.HoldFailed:
		r.holdFailed(now, c, b.HoldFor)
	default:
		r.finish(now, job.Failed, c)
	}
}

// holdFailed pauses a run that would fail, for d or, if that is 0, until an order.
func (r *Round) holdFailed(now time.Time, c *job.Cause, d time.Duration) {
	held := r.account.Cost.Hold && !r.account.Cost.Final // nothing but a policy has decided it
	r.failPendingAt, r.charge, r.account.Cost = time.Time{}, false, cost{}
	if r.paused != nil {
		return // it goes on when the order that paused it is taken back
	}
	s, text := &r.account.Spent, "until an order"
	s.Held = true
	if d > 0 {
		s.HeldUntil, text = now.Add(d), "for "+duration.Text(d)
	}
	r.spent = nil
	why := "the run would have failed, and is held"
	if held {
		why = "a policy holds the run"
	}
	r.note(job.EventHeld, c.Node, fmt.Sprintf("%s %s: %s", why, text, c.Text))
	r.pause(now, c)
}

// pauseBegins and pauseEnds keep pauses out of the Deadline. A run that resumes after a failure begins with a new
// budget.
func (r *Round) pauseBegins(now time.Time) { r.account.PausedAt = now }

func (r *Round) pauseEnds(now time.Time) {
	a := &r.account
	if !a.Spent.Since.IsZero() && !a.PausedAt.IsZero() {
		a.Spent.Since = a.Spent.Since.Add(now.Sub(a.PausedAt))
	}
	if a.Spent.Held {
		a.Spent = Spent{Since: a.Spent.Since, Best: a.Spent.Best}
	}
	a.PausedAt, a.BackoffAt, r.spent = time.Time{}, time.Time{}, nil
}

// timeLimit is when time alone ends the run, and why; zero when it never does.
func (r *Round) timeLimit() (at time.Time, c *job.Cause) {
	a, b := &r.account, r.params.Budget
	switch {
	case r.paused != nil:
		if a.Spent.Held {
			return a.Spent.HeldUntil, r.paused
		}
		return time.Time{}, nil
	case !a.Spent.Since.IsZero() && b.Deadline > 0:
		at = a.Spent.Since.Add(b.Deadline)
		c = &job.Cause{Kind: job.CauseDeadline,
			Text: fmt.Sprintf("the job has taken longer than %s (--deadline)", duration.Text(b.Deadline))}
	}
	waits := r.epoch.phase == running && b.StartDeadline > 0 && a.Progress.Step == 0 && r.epoch.done == 0 && !r.epoch.held
	if start := a.RanAt.Add(b.StartDeadline); waits && !a.RanAt.IsZero() && (c == nil || start.Before(at)) {
		at = start
		c = &job.Cause{Kind: job.CauseNoStep, Text: fmt.Sprintf(
			"no worker has made a step within %s of its start (--start-deadline)", duration.Text(b.StartDeadline))}
	}
	return at, c
}

// overdue ends the run when its time is over.
func (r *Round) overdue(now time.Time) bool {
	if r.epoch.phase == finished || len(r.members.nodes) == 0 {
		return false
	}
	at, c := r.timeLimit()
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
		r.progress(job.Progress{Step: 1, Stepping: true})
	}
	return nil
}

// progress books how far the workers of the newest epoch have come.
func (r *Round) progress(p job.Progress) { r.account.Progress = r.account.Progress.With(p) }

// tolerate books failures of workers that do not stop the others of the world.
func (r *Round) tolerate(now time.Time, n *node, e Failing) {
	r.note(job.EventRankFailed, n.Name, firstText(e.Failures, n))
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

// BudgetStatus is the remaining part of a run's Budget, for people.
type BudgetStatus struct {
	// Streak are the restarts in a row without progress, of Limit, or of any number if that is -1.
	Streak int `json:"streak"`
	Limit  int `json:"limit"`
	// Sum are all restarts; with SumCounts, Limit bounds them as well.
	Sum       int  `json:"sum,omitempty"`
	SumCounts bool `json:"sum_counts,omitempty"`
	// NextWait is how long a start would wait after a failure now without progress.
	NextWait time.Duration `json:"next_wait"`
	// Fruitless are the restarts in a row without a newer checkpoint or more steps.
	Fruitless int `json:"fruitless,omitempty"`
	// BackoffUntil is when the next start is, if it waits.
	BackoffUntil time.Time `json:"backoff_until,omitzero"`
	// Deadline is when the run ends at the latest.
	Deadline time.Time `json:"deadline,omitzero"`
	// Recent are the restarts that Windows count.
	Recent []Restarted `json:"recent,omitempty"`
	// HeldUntil is when a failed run that is held ends; zero: there is no such time.
	HeldUntil time.Time `json:"held_until,omitzero"`
}

// budgetStatus is nil before the first world.
func (r *Round) budgetStatus() *BudgetStatus {
	if r.epoch.fresh() {
		return nil
	}
	a, b := &r.account, r.params.Budget
	s := &BudgetStatus{
		Streak: a.Spent.Streak, Limit: b.BackoffLimit, NextWait: r.backoff(a.Spent.Streak), Fruitless: a.Spent.Fruitless,
		BackoffUntil: a.BackoffAt, Recent: a.Spent.Recent, HeldUntil: a.Spent.HeldUntil, Sum: a.Spent.Sum, SumCounts: b.Sum,
	}
	if !a.Spent.Since.IsZero() && b.Deadline > 0 {
		s.Deadline = a.Spent.Since.Add(b.Deadline)
	}
	return s
}
