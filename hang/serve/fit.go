package serve

import (
	"time"

	"dlrover-run/hang"
	"dlrover-run/internal/text"
)

// Bounds of a report. Data beyond is cut off, not refused: the rest of it may name a culprit. Texts are in bytes.
const (
	// maxBody and maxPlain bound a report as received, and after unpacking.
	maxBody  = 1 << 20
	maxPlain = 8 << 20

	maxTable    = 2 << 20 // all stacks, and all groups, of one report
	maxWorkers  = 4096
	maxSamples  = 4
	maxThreads  = 256 // of one worker
	maxChildren = 8
	maxFrames   = 200 // of one stack
	maxGroups   = 256 // of one worker
	maxLooked   = 16  // of one worker, with looks
	maxSteps    = 256 // StepTimes and Spans of a page
	maxSockets  = 64
	maxFlight   = 256
	maxStore    = 64
	maxWaiters  = 64
	maxName     = 256 // of a function, a file, a key, a group
	maxText     = 1 << 10
	maxRanks    = 16 << 10 // the members of a group
	maxLong     = 16 << 10 // RAS, the end of a log
	maxFacts    = 2048
	maxFault    = 300
	maxEnd      = 3 << 10 // a notice has less than 4 KiB

	maxAge = 30 * 24 * time.Hour
)

// fit cuts r to the bounds, and makes its texts fit for terminals. Stacks and groups are cut when they are unpacked;
// data of a launcher in this process is not cut.
func fit(r *hang.Report) {
	r.Suspicions = cut(r.Suspicions, maxWorkers)
	for i := range r.Suspicions {
		s := &r.Suspicions[i]
		s.Age, s.Limit = min(max(s.Age, 0), maxAge), min(max(s.Limit, 0), maxAge)
		line(maxText, &s.Why)
	}
	if s := r.Summary; s != nil {
		line(maxText, &s.Slow)
		s.Looks = cut(s.Looks, maxWorkers)
		for i := range s.Looks {
			s.Looks[i].Groups = cut(s.Looks[i].Groups, maxLooked)
		}
	}
	if len(r.End) > maxEnd {
		r.End = nil
	}
	r.Facts = cut(r.Facts, maxFacts)
	for i := range r.Facts {
		f := &r.Facts[i]
		line(maxName, &f.Kind, &f.Of)
		line(maxFault, &f.Fault)
	}
	r.Store = cut(r.Store, maxStore)
	for i := range r.Store {
		line(maxName, &r.Store[i].Key)
		r.Store[i].Waiters = texts(maxName, cut(r.Store[i].Waiters, maxWaiters))
	}
	line(maxText, &r.Partial)
	lines(maxLong, &r.RAS)
	r.Evidence = cut(r.Evidence, maxWorkers)
	for i := range r.Evidence {
		fitEvidence(&r.Evidence[i])
	}
}

func fitEvidence(e *hang.Evidence) {
	e.Samples = cut(e.Samples, maxSamples)
	for i := range e.Samples {
		s := &e.Samples[i]
		line(maxName, &s.Proc.WChan)
		if p := s.Page; p != nil {
			p.Groups = cut(p.Groups, maxGroups)
			p.StepTimes, p.Spans = cut(p.StepTimes, maxSteps), cut(p.Spans, maxSteps)
		}
	}
	e.Sockets = texts(maxName, cut(e.Sockets, maxSockets))
	line(maxText, &e.Error, &e.Exception)
	line(maxName, (*string)(&e.Work))
	lines(maxLong, &e.Log)
	if f := e.Flight; f != nil {
		f.Entries = cut(f.Entries, maxFlight)
		for i := range f.Entries {
			x := &f.Entries[i]
			line(maxName, &x.Group, &x.Desc, &x.Op, &x.State, &x.Sizes, &x.DType)
		}
	}
}

func fitStacks(s *hang.Stacks) {
	line(maxName, &s.Interpreter)
	line(maxText, &s.Error)
	s.Threads, s.Children = cut(s.Threads, maxThreads), cut(s.Children, maxChildren)
	for _, list := range [][]hang.Thread{s.Threads, s.Children} {
		for i := range list {
			t := &list[i]
			line(maxName, &t.Name)
			t.Python, t.Native = fitFrames(t.Python), fitFrames(t.Native)
		}
	}
}

func fitFrames(fs []hang.Frame) []hang.Frame {
	fs = cut(fs, maxFrames)
	for i := range fs {
		line(maxText, &fs[i].Func, &fs[i].File)
	}
	return fs
}

func fitGroups(gs []hang.Group) []hang.Group {
	gs = cut(gs, maxGroups)
	for i := range gs {
		line(maxName, &gs[i].Name, &gs[i].Desc, &gs[i].Backend)
		if len(gs[i].Ranks) > maxRanks {
			gs[i].Ranks = ""
		}
	}
	return gs
}

// cut is the first elements of s, without room for more.
func cut[T any](s []T, most int) []T {
	if len(s) <= most {
		return s
	}
	return append([]T(nil), s[:most]...)
}

func texts(most int, ts []string) []string {
	for i := range ts {
		line(most, &ts[i])
	}
	return ts
}

// line makes texts one line of at most that many bytes each, which acts on no terminal.
func line(most int, ts ...*string) {
	for _, t := range ts {
		*t = text.Line(*t, most)
	}
}

// lines is line for texts that may have several lines.
func lines(most int, ts ...*string) {
	for _, t := range ts {
		*t = text.Lines(*t, most)
	}
}
