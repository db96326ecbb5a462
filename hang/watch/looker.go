package watch

import (
	"context"
	"slices"
	"time"

	"dlrover-run/hang"
)

// stuckAfter is for how long one process may be read, twice in a row: a launcher that was stopped, or starved, goes on
// reading within the second time.
const stuckAfter = 2 * time.Second

// looker takes samples in goroutines that may get stuck. It is for one goroutine.
type looker struct {
	sampler *sampler
	state   []tracked
	patient time.Duration // stuckAfter
	blocked func(pid int) // gets the process of a blocked read
}

// look returns nil if ctx ends before it has looked.
func (l *looker) look(ctx context.Context, deep bool) []hang.Sample {
	for {
		after, stuck := l.try(ctx, deep)
		if after != nil {
			l.state = after
			return samples(after)
		}
		if stuck == 0 {
			return nil
		}
		l.leave(stuck)
	}
}

// try returns the pid that it got stuck with, 0 if ctx has ended.
func (l *looker) try(ctx context.Context, deep bool) (after []tracked, stuck int) {
	s, before, done := l.sampler, l.state, make(chan []tracked, 1)
	go func() { done <- s.look(before, deep) }()
	late := time.NewTicker(l.patient)
	defer late.Stop()
	for seen := int64(0); ; {
		select {
		case after := <-done:
			return after, 0
		case <-ctx.Done():
			return nil, 0
		case <-late.C:
			pid := s.reading.Load()
			if pid != 0 && pid == seen {
				return nil, int(pid)
			}
			seen = pid
		}
	}
}

// leave continues without a process. The goroutine that is stuck with it keeps its sampler.
func (l *looker) leave(pid int) {
	l.sampler = l.sampler.another()
	l.state = slices.Clone(l.state)
	for i := range l.state {
		if t := &l.state[i]; t.pid == pid || t.trainer == pid {
			t.blocked = true
		}
	}
	l.blocked(pid)
}

func (l *looker) clone() *looker {
	c := *l
	c.sampler, c.state = l.sampler.another(), slices.Clone(l.state)
	return &c
}

func (s *sampler) another() *sampler {
	return &sampler{
		fs: newProcfs(s.fs.root), now: s.now, pages: s.pages, parse: s.parse, traffic: s.traffic, leads: s.leads,
	}
}

func samples(ts []tracked) []hang.Sample {
	list := make([]hang.Sample, len(ts))
	for i := range ts {
		list[i] = ts[i].last
	}
	return list
}
