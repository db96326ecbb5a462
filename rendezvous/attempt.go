package rendezvous

import (
	"fmt"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

// attempt is the newest epoch in the account: how far its workers have come, and the price of its end.
type attempt struct {
	cost     cost
	progress job.Progress
	ranAt    time.Time // its workers were started
	brokeAt  time.Time // and are being stopped since then
}

// cost is the price of an epoch's end.
type cost struct {
	charge bool // it spends one of MaxRestarts
	count  bool // in Streak and all that is like it
	final  bool // the run fails, even with a budget left
	hold   bool // the run is paused
	node   string
	rank   int // of the first failure; -1: none
	alike  string
	text   string // of the first failure
}

// costOf is the cost of failures of n's workers, after the decision d about them.
func costOf(n *node, d Decision, fs []job.Failure) cost {
	q := d.consequence()
	c := cost{charge: q.charge, count: true, final: q.final, hold: q.hold, node: n.Name, rank: -1,
		alike: fingerprint(fs, n), text: text.Clip(firstText(fs, n), maxOrderText)}
	if len(fs) > 0 {
		c.rank = fs[0].Rank
	}
	return c
}

// fingerprint is the common part of failures of one kind: for those of older launchers, their text.
func fingerprint(fs []job.Failure, n *node) string {
	alike := firstText(fs, n)
	if len(fs) > 0 && fs[0].Fingerprint != "" {
		alike = fs[0].Fingerprint
	}
	return text.Clip(alike, maxAlike)
}

func firstText(fs []job.Failure, n *node) string {
	if len(fs) > 0 && fs[0].Text != "" {
		return fs[0].Text
	}
	return fmt.Sprintf("a worker of node %d (%s) failed", n.rank, n.Name)
}

// ran is for how long the workers have run.
func (t *attempt) ran(now time.Time) time.Duration {
	if t.ranAt.IsZero() {
		return 0
	}
	if !t.brokeAt.IsZero() {
		now = t.brokeAt
	}
	return now.Sub(t.ranAt)
}

// fruitful: it has a newer checkpoint or more steps than any before or, where neither is known, was long.
func (t *attempt) fruitful(now time.Time, best job.Progress) bool {
	p := t.progress
	return p.Beyond(best) || !p.Stepping && !p.Saving && t.ran(now) >= longEpoch
}

// progressed is fruitful, but gives the benefit of the doubt: to a long epoch and, without checkpoints that the
// launchers know, to each step.
func (t *attempt) progressed(now time.Time, best job.Progress) bool {
	return t.fruitful(now, best) || t.ran(now) >= longEpoch || !t.progress.Saving && t.progress.Step > 0
}

// early reports whether it ended before its first step. Where steps are unknown, a short epoch without progress counts
// as early.
func (t *attempt) early(now time.Time, best job.Progress) bool {
	p := t.progress
	return p.Step == 0 && !t.progressed(now, best) && (p.Stepping || t.ran(now) < earlyEpoch)
}

// streaks are Streak and Fruitless of s, without the resets that the attempt's progress causes.
func (t *attempt) streaks(now time.Time, s Spent) (streak, fruitless int) {
	if !t.progressed(now, s.Best) {
		streak = s.Streak
	}
	if !t.fruitful(now, s.Best) {
		fruitless = s.Fruitless
	}
	return streak, fruitless
}

// same is how often in a row workers have failed like this before their first step.
func (t *attempt) same(now time.Time, s Spent) int {
	switch {
	case t.cost.alike == "" || !t.early(now, s.Best):
		return 0
	case t.cost.alike == s.Alike:
		return s.Same + 1
	}
	return 1
}

// reached is the best progress of a run whose newest epoch has reached o, which is further than p.
func reached(p, o job.Progress) job.Progress {
	if o.Saving && (!p.Saving || o.Checkpoint > p.Checkpoint) {
		return o // steps count from there
	}
	return p.With(o)
}
