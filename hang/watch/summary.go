package watch

import (
	"context"
	"math"
	"slices"
	"time"

	"dlrover-run/hang"
)

// follow remembers when each worker was last seen to make progress.
func (w *Watcher) follow(now time.Duration, samples []hang.Sample) {
	if w.newest == nil {
		w.progress = make([]time.Duration, len(samples))
	}
	for i := range samples {
		if w.newest == nil || hang.Progressed(w.newest[i], samples[i]) {
			w.progress[i] = now
		}
	}
	w.newest = samples
}

// sum sends the judge a summary: once, as often as that is wanted, or if another rank is slow.
func (w *Watcher) sum(ctx context.Context, now time.Duration) {
	s := w.summary(now)
	if now < w.due && s.Slow == w.slow {
		w.next = now + jittered(hang.SummaryEvery)
		return
	}
	w.slow, w.due = s.Slow, math.MaxInt64
	if w.cfg.Summaries > 0 {
		w.due = now + w.cfg.Summaries*9/10 // w.next comes later, by jitter
	}
	w.say(ctx, now, hang.Report{Summary: s})
}

// summary is how the workers are doing by the newest look.
func (w *Watcher) summary(now time.Duration) *hang.Summary {
	s := &hang.Summary{Age: now - slices.Min(w.progress)}
	var steps []time.Duration
	fewest, paged := uint64(0), false
	for _, sample := range w.newest {
		p := sample.Page
		if p == nil {
			continue
		}
		if !paged || p.Steps < fewest {
			fewest, paged = p.Steps, true
		}
		for i := 1; i < len(p.StepTimes); i++ {
			steps = append(steps, p.StepTimes[i]-p.StepTimes[i-1])
		}
	}
	s.Steps = fewest
	if len(steps) > 0 {
		slices.Sort(steps)
		s.StepTime = steps[len(steps)/2]
	}
	s.Looks = w.tally.all()
	if slow, any := w.straggler.Found(); any {
		s.Slow = slow.Line(func(at time.Duration) string { return time.Now().Add(at - now).Format(time.TimeOnly) })
	}
	return s
}
