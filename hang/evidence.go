package hang

import (
	"slices"
	"time"
)

// Size is about how many bytes e takes in memory, without Stacks and Groups.
func (e *Evidence) Size() int {
	const evidence, sample, page, entry = 280, 176, 200, 160
	n := evidence + len(e.Work) + len(e.Sockets)*32 + len(e.Log) + len(e.Exception) + len(e.Error)
	for _, s := range e.Samples {
		n += sample
		if p := s.Page; p != nil {
			n += page + len(p.Groups)*24 + len(p.StepTimes)*8 + len(p.Spans)*24
		}
	}
	if e.Flight != nil {
		n += len(e.Flight.Entries) * entry
	}
	return n
}

// add is for a further look at the same worker.
func (e *Evidence) add(more Evidence) {
	e.Samples = append(slices.Clip(e.Samples), more.Samples...)
	if n := len(e.Samples); n > maxSamples {
		e.Samples = slices.Delete(e.Samples, 1, 1+n-maxSamples) // the first one shows the most progress
	}
	if more.Stacks != nil {
		e.Stacks, e.Exception = more.Stacks, more.Exception // a look at pages alone knows of neither
	}
	if len(more.Groups) > 0 {
		e.Groups = more.Groups
	}
	if more.Flight != nil {
		e.Flight = more.Flight
	}
	if more.Sockets != nil {
		e.Sockets = more.Sockets
	}
	if more.Log != "" {
		e.Log = more.Log
	}
	e.Error = more.Error
}

// newest is the last look at the worker, zero without any.
func (e *Evidence) newest() Sample {
	if len(e.Samples) == 0 {
		return Sample{}
	}
	return e.Samples[len(e.Samples)-1]
}

// thin leaves the rings of the newest page only.
func (e *Evidence) thin() {
	for i := range e.Samples[:max(len(e.Samples)-1, 0)] {
		if p := e.Samples[i].Page; p != nil && (p.StepTimes != nil || p.Spans != nil) {
			e.Samples[i].Page = p.bare()
		}
	}
}

// Group is the progress of the worker in a process group; false: it is in no such group, or there is no page.
func (p *Page) Group(id uint64) (g GroupState, ok bool) {
	if p == nil {
		return g, false
	}
	i := slices.IndexFunc(p.Groups, func(g GroupState) bool { return g.ID == id })
	if i < 0 {
		return g, false
	}
	return p.Groups[i], true
}

// bare is a copy without the rings.
func (p *Page) bare() *Page {
	bare := *p
	bare.StepTimes, bare.Spans = nil, nil
	return &bare
}

// Page is the newest one, nil if there is none.
func (e *Evidence) Page() *Page {
	for _, s := range slices.Backward(e.Samples) {
		if s.Page != nil {
			return s.Page
		}
	}
	return nil
}

// onDevice reports whether it was seen to wait for its device.
func (e *Evidence) onDevice() bool {
	if e.Stacks == nil {
		return false
	}
	w, sure := waitOf(e.Stacks)
	return sure && w.op == onDevice
}

// State is that of the newest sample's process; false if none was taken.
func (e *Evidence) State() (byte, bool) {
	if len(e.Samples) == 0 {
		return 0, false
	}
	return e.Samples[len(e.Samples)-1].Proc.State, true
}

// longest is how long a phase has lasted before.
func (p *Page) longest(phase Phase) (longest time.Duration) {
	for _, s := range p.Spans {
		if s.Phase == phase {
			longest = max(longest, s.To-s.From)
		}
	}
	return longest
}

// progress is when a worker last stepped or entered a collective; 0: never.
func (p *Page) progress() time.Duration {
	last := p.LastStep
	for _, g := range p.Groups {
		last = max(last, g.Since)
	}
	return last
}
