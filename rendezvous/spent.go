package rendezvous

import (
	"fmt"
	"slices"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

// Spent is the part of its Budget that a run has used. Directives carry it, and nodes return it to a restarted daemon.
// Its times are those of the first daemon's clock.
type Spent struct {
	// Since is when workers were first started, later by the time in pauses. Zero without a Deadline.
	Since time.Time `json:"since,omitzero"`
	// PausedAt is when the present pause began; zero: there is none.
	PausedAt time.Time `json:"paused_at,omitzero"`
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
	Recent []restarted `json:"recent,omitempty"`
	// Held: the run would have failed, and was paused instead, until then; zero is until an order.
	Held      bool      `json:"held,omitempty"`
	HeldUntil time.Time `json:"held_until,omitzero"`
}

// restarted is one restart, and the failure that has led to it.
type restarted struct {
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

// zero reports whether nothing has been spent.
func (s Spent) zero() bool {
	return s.Since.IsZero() && s.Streak <= 0 && s.Fruitless <= 0 && s.Same <= 0 && s.Best == job.Progress{} &&
		s.Sum <= 0 && len(s.Recent) == 0 && !s.Held
}

// brought is s as a node has brought it, without values that no daemon has ever sent.
func (s Spent) brought(now time.Time, paused bool) Spent {
	s.Streak, s.Fruitless, s.Same, s.Sum = max(s.Streak, 0), max(s.Fruitless, 0), max(s.Same, 0), max(s.Sum, 0)
	s.Alike, s.Held = text.Clip(s.Alike, maxAlike), s.Held && paused
	if !paused {
		s.PausedAt = time.Time{}
	}
	s.Recent = s.Recent[max(0, len(s.Recent)-maxRecentTold):]
	s.steady(now)
	return s
}

// steady expresses the times of s by now, whose clock is monotonic. Times of the future are those of a clock that has
// been set back, or was ahead: then all of them move into the past.
func (s *Spent) steady(now time.Time) {
	newest := s.PausedAt
	for _, e := range append([]restarted{{At: s.Since}}, s.Recent...) {
		if e.At.After(newest) {
			newest = e.At
		}
	}
	ahead := max(0, newest.Sub(now))
	moved := func(at time.Time) time.Time {
		if at.IsZero() {
			return at
		}
		return now.Add(at.Sub(now) - ahead)
	}
	s.Since, s.PausedAt, s.HeldUntil = moved(s.Since), moved(s.PausedAt), moved(s.HeldUntil)
	s.Recent = slices.Clone(s.Recent)
	for i := range s.Recent {
		s.Recent[i].At = moved(s.Recent[i].At)
	}
}

// larger is s, or o where that is more.
func (s Spent) larger(o Spent) Spent {
	s.Streak, s.Fruitless, s.Sum = max(s.Streak, o.Streak), max(s.Fruitless, o.Fruitless), max(s.Sum, o.Sum)
	if o.Same > s.Same {
		s.Same, s.Alike = o.Same, o.Alike
	}
	if len(o.Recent) > len(s.Recent) {
		s.Recent = o.Recent
	}
	if s.Since.IsZero() || !o.Since.IsZero() && o.Since.Before(s.Since) {
		s.Since = o.Since
	}
	if s.PausedAt.IsZero() || !o.PausedAt.IsZero() && o.PausedAt.Before(s.PausedAt) {
		s.PausedAt = o.PausedAt
	}
	if o.Held && !s.Held {
		s.Held, s.HeldUntil = true, o.HeldUntil
	}
	s.Best = reached(o.Best, s.Best)
	return s
}

// within is how many restarts w counts that were like the one that is due at the cost c.
func (s Spent) within(now time.Time, w Window, c cost) (n int) {
	for _, e := range s.Recent {
		like := w.Scope == windowJob || w.Scope == windowNode && e.Node == c.node && c.node != "" ||
			w.Scope == windowRank && e.Rank == c.rank && c.rank >= 0
		if like && now.Sub(e.At) < w.Per {
			n++
		}
	}
	return n
}

// remember adds a restart at the cost c, as far back as the windows look.
func (s *Spent) remember(now time.Time, windows [MaxWindows]Window, c cost) {
	if windows == ([MaxWindows]Window{}) {
		return
	}
	var longest time.Duration
	for _, w := range windows {
		longest = max(longest, w.Per)
	}
	old := func(e restarted) bool { return now.Sub(e.At) >= longest }
	recent := append(slices.DeleteFunc(slices.Clone(s.Recent), old), restarted{At: now, Node: c.node, Rank: c.rank})
	s.Recent = recent[max(0, len(recent)-maxRecent):]
}

// subject is the node, rank or job whose restarts w counts after a failure.
func (w Window) subject(c cost) string {
	switch w.Scope {
	case windowRank:
		return fmt.Sprintf("rank %d", c.rank)
	case windowNode:
		return "node " + c.node
	}
	return "the job"
}

// backoff is how long a start waits after so many restarts without progress. It differs a little from epoch to epoch.
func (b Budget) backoff(streak int, id job.EpochID) time.Duration {
	if streak <= 0 || b.BackoffMax <= 0 {
		return 0
	}
	d := b.BackoffMin
	for i := 1; i < streak && d < b.BackoffMax; i++ {
		d *= 2
	}
	d = min(d, b.BackoffMax)
	return d - time.Duration(mixed(id)%uint64(d/4+1))
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
	Recent []restarted `json:"recent,omitempty"`
	// HeldUntil is when a failed run that is held ends; zero: there is no such time.
	HeldUntil time.Time `json:"held_until,omitzero"`
}
