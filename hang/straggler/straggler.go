// Package straggler finds the rank of a node that the others wait for in most steps.
package straggler

import (
	"fmt"
	"math"
	"slices"
	"time"

	"dlrover-run/hang"
)

// Limits of a Finder.
const (
	lagLooks   = 120 // looks in a window; each gives how far every rank is behind the others
	lagSigmas  = 4   // by so many standard errors a rank must be behind
	lagLeast   = 0.1 // of a collective, on average
	lagWindows = 3   // in so many windows, one after the other

	paceWindow  = time.Minute // medians of the time of steps are taken of so long,
	paceSteps   = 10          // and of so many steps at least
	paceKeep    = 60          // windows for the normal pace
	paceWindows = 3           // in so many windows steps must be slower, or as before again
	paceSlower  = 1.05
	paceSpread  = 4 // and by so many median deviations
)

// Finder finds the rank of a node that the others wait for in most steps, and when the steps became slower. It is
// for one epoch, and one goroutine; no action follows its findings.
//
// A page has the number of collectives that a rank had begun at some moment of the last half second. From rank to
// rank these moments differ, so the progress of the others meanwhile, at their pace, is taken off; over many looks
// the remainder is the lag of the rank. Where the host is far ahead of a device that shows slow hosts only.
type Finder struct {
	lags  lags
	steps trend
	rank  int // the one that was last in the newest windows, and in how many
	times int
	share float64
}

// Finding is a rank that is behind, or steps that have become slower.
type Finding struct {
	Rank       int             `json:"rank"`  // the rank that is behind, -1: none in particular
	Share      float64         `json:"share"` // how many collectives it is behind the foremost on average, 1 at most
	Confidence hang.Confidence `json:"confidence"`
	Before     time.Duration   `json:"before"` // a step until Since, 0: they have not become slower
	Step       time.Duration   `json:"step"`   // a step now
	Since      time.Duration   `json:"since"`  // CLOCK_MONOTONIC of the node
}

// Look takes the pages of a node at one moment. It allocates nothing while nothing changes.
func (s *Finder) Look(now time.Duration, workers []hang.Sample) {
	for i := range workers {
		if p := workers[i].Page; p != nil {
			s.steps.add(now, p.StepTimes)
			break
		}
	}
	if rank, share, full := s.lags.add(workers); full {
		s.judge(rank, share)
	}
}

// judge takes the result of a window: the rank that is behind, -1 none.
func (s *Finder) judge(rank int, share float64) {
	if rank != s.rank || s.times == 0 {
		s.rank, s.times = rank, 0
	}
	s.times++
	s.share = share
}

// Found returns the slow part, and whether there is any.
func (s *Finder) Found() (Finding, bool) {
	f := Finding{Rank: -1, Step: s.steps.now, Confidence: hang.Low}
	if s.steps.since > 0 {
		f.Before, f.Since = s.steps.normal, s.steps.since
	}
	if s.times >= lagWindows && s.rank >= 0 {
		f.Rank, f.Share, f.Confidence = s.rank, s.share, hang.High
	}
	return f, f.Rank >= 0 || f.Before > 0
}

// Line is the text for people. clock writes a moment of CLOCK_MONOTONIC as time of the day.
func (f Finding) Line(clock func(time.Duration) string) string {
	step := f.Step.Round(10 * time.Millisecond).String()
	text := "steps of " + step
	if f.Before > 0 {
		text = fmt.Sprintf("steps of %s until %s, %s since", f.Before.Round(10*time.Millisecond), clock(f.Since), step)
	}
	if f.Rank < 0 {
		return text
	}
	return fmt.Sprintf("%s; rank %d lags, on average %.2f collectives behind the fastest rank", text, f.Rank,
		f.Share)
}

// lags are sums over the looks of a window, by rank.
type lags struct {
	group uint64
	ranks []int
	first progressMark // of the first rank, in the first look
	pace  float64      // collectives a second since then
	sums  []lagSums
	looks int
}

// progressMark is how many collectives a rank had begun, and when.
type progressMark struct {
	seq uint64
	at  time.Duration
}

// lagSums are of x, the collectives, and y, the seconds, that a rank's mark is behind the mean of all ranks.
type lagSums struct{ x, y, xx, xy, yy float64 }

// mean and standard error of the collectives that a rank is behind, if rate of them are begun in a second.
func (s lagSums) mean(rate, looks float64) (mean, sigma float64) {
	mean = (s.x - rate*s.y) / looks
	square := (s.xx - 2*rate*s.xy + rate*rate*s.yy) / looks
	return mean, math.Sqrt(max(square-mean*mean, 0) / looks)
}

// add takes a look. With the last one of a window it returns the rank that was behind, or -1, and by how much.
func (l *lags) add(workers []hang.Sample) (rank int, share float64, full bool) {
	g := common(workers)
	if !l.same(g, workers) {
		l.reset(g, workers)
		return 0, 0, false
	}
	l.take(workers)
	if l.looks < lagLooks {
		return 0, 0, false
	}
	rank, share = l.last()
	l.reset(g, workers)
	return rank, share, true
}

// common is a group in which all workers are, 0 if there is none: then nobody is behind.
func common(workers []hang.Sample) (group uint64) {
	if len(workers) == 0 || workers[0].Page == nil {
		return 0
	}
	for _, g := range workers[0].Page.Groups {
		if !slices.ContainsFunc(workers, func(s hang.Sample) bool {
			_, in := s.Page.Group(g.ID)
			return !in
		}) {
			return g.ID
		}
	}
	return 0
}

// same reports whether it is the group and the workers of the window.
func (l *lags) same(group uint64, workers []hang.Sample) bool {
	is := func(s hang.Sample, rank int) bool { return s.Rank == rank }
	return group == l.group && slices.EqualFunc(workers, l.ranks, is)
}

func (l *lags) reset(group uint64, workers []hang.Sample) {
	l.group, l.looks, l.ranks, l.sums = group, 0, l.ranks[:0], l.sums[:0]
	for i := range workers {
		l.ranks, l.sums = append(l.ranks, workers[i].Rank), append(l.sums, lagSums{})
	}
	if len(workers) > 0 {
		l.first = markIn(&workers[0], group)
	}
}

// markIn is the state of a group in a page: the shim reads the number when its thread runs, and after steps.
func markIn(s *hang.Sample, group uint64) (m progressMark) {
	if s.Page != nil {
		g, _ := s.Page.Group(group)
		m.seq, m.at = g.Seq, max(s.Page.Heartbeat, g.Since)
	}
	return m
}

// take adds how far each rank is behind the mean of all.
func (l *lags) take(workers []hang.Sample) {
	seq, at := 0.0, 0.0
	for i := range workers {
		x, y := l.since(&workers[i])
		seq += x / float64(len(workers))
		at += y / float64(len(workers))
	}
	for i := range workers {
		x, y := l.since(&workers[i])
		l.sums[i].add(seq-x, at-y)
	}
	l.pace = seq / max(at, 1e-3)
	l.looks++
}

// since is how many collectives a rank has begun since the first look, and in how many seconds.
func (l *lags) since(s *hang.Sample) (seq, at float64) {
	m := markIn(s, l.group)
	return float64(int64(m.seq - l.first.seq)), (m.at - l.first.at).Seconds()
}

func (s *lagSums) add(x, y float64) {
	s.x, s.y, s.xx, s.xy, s.yy = s.x+x, s.y+y, s.xx+x*x, s.xy+x*y, s.yy+y*y
}

// last is the rank that is behind all others for certain, and how far it is behind the foremost.
func (l *lags) last() (rank int, share float64) {
	if len(l.sums) < 2 {
		return -1, 0
	}
	means, looks := make([]float64, len(l.sums)), float64(l.looks)
	for i, s := range l.sums {
		means[i], _ = s.mean(l.pace, looks)
	}
	behind := slices.Index(means, slices.Max(means))
	mean, sigma := l.sums[behind].mean(l.pace, looks)
	first := slices.Min(means)
	slices.Sort(means)
	if mean-means[len(means)-2] < max(lagLeast, lagSigmas*sigma) {
		return -1, 0
	}
	return l.ranks[behind], min(mean-first, 1)
}

// trend watches the medians of step times, window by window.
type trend struct {
	seen   time.Duration // the newest step that was taken
	from   time.Duration // when the window began
	gaps   []time.Duration
	past   []time.Duration // medians that are normal, the newest last
	odd    int             // newest windows that are not as normal is now held to be
	first  time.Duration   // when the first of these began
	now    time.Duration   // the newest median
	normal time.Duration   // of past, before since
	since  time.Duration   // since when steps are slower, 0: they are not
}

// add takes the ends of the newest steps.
func (t *trend) add(now time.Duration, ends []time.Duration) {
	if t.from == 0 {
		t.from = now
	}
	for i, end := range ends {
		if i > 0 && end > t.seen && ends[i-1] < end && len(t.gaps) < 1<<16 {
			t.gaps = append(t.gaps, end-ends[i-1])
		}
	}
	if n := len(ends); n > 0 {
		t.seen = max(t.seen, ends[n-1])
	}
	if now-t.from >= paceWindow && len(t.gaps) >= paceSteps {
		t.window(median(t.gaps))
		t.from, t.gaps = now, t.gaps[:0]
	}
}

// window compares a median with the normal one.
func (t *trend) window(m time.Duration) {
	t.now = m
	if len(t.past) < paceWindows {
		t.past = append(t.past, m)
		return
	}
	normal, limit := t.bounds()
	if (m > limit) == (t.since > 0) {
		t.odd = 0
		if t.since == 0 {
			t.past = append(t.past[max(0, len(t.past)+1-paceKeep):], m)
		}
		return
	}
	if t.odd++; t.odd == 1 {
		t.first = t.from
	}
	if t.odd == paceWindows {
		t.turn(normal)
	}
}

// turn records that steps have become slower, or are again as they were.
func (t *trend) turn(normal time.Duration) {
	t.odd = 0
	if t.since > 0 {
		t.since = 0
		return
	}
	t.since, t.normal = t.first, normal
}

// bounds are the normal median, and the limit of a slow one.
func (t *trend) bounds() (normal, limit time.Duration) {
	normal = median(t.past)
	off := make([]time.Duration, len(t.past))
	for i, m := range t.past {
		off[i] = max(m-normal, normal-m)
	}
	return normal, max(time.Duration(paceSlower*float64(normal)), normal+paceSpread*median(off))
}

func median(ds []time.Duration) time.Duration {
	sorted := slices.Clone(ds)
	slices.Sort(sorted)
	return sorted[len(sorted)/2]
}
