package serve

import (
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"dlrover-run/hang"
)

// Bounds of a report. What is beyond is cut off, not refused: the rest of it may name a culprit. Texts are in bytes.
const (
	// MaxBody and MaxPlain bound a report as it comes, and when it is unpacked.
	MaxBody  = 1 << 20
	MaxPlain = 8 << 20

	maxTable    = 2 << 20 // all stacks, and all groups, of one report
	maxWorkers  = 4096
	maxSamples  = 4
	maxThreads  = 256 // of one worker
	maxChildren = 8
	maxFrames   = 200 // of one stack
	maxGroups   = 256 // of one worker
	maxSteps    = 256 // StepTimes and Spans of a page
	maxSockets  = 64
	maxFlight   = 256
	maxStore    = 64
	maxWaiters  = 64
	maxName     = 256 // of a function, a file, a key, a group
	maxText     = 1 << 10
	maxRanks    = 16 << 10 // the members of a group
	maxLong     = 16 << 10 // RAS, the end of a log

	maxAge = 30 * 24 * time.Hour
)

// fit cuts r to the bounds, and makes its texts fit for terminals. Stacks and groups are cut when they are unpacked;
// those of a launcher in this process are taken as they are.
func fit(r *Report) {
	r.Suspicions = cut(r.Suspicions, maxWorkers)
	for i := range r.Suspicions {
		s := &r.Suspicions[i]
		s.Age, s.Limit = min(max(s.Age, 0), maxAge), min(max(s.Limit, 0), maxAge)
		text(maxText, &s.Why)
	}
	if r.Summary != nil {
		text(maxText, &r.Summary.Slow)
	}
	r.Store = cut(r.Store, maxStore)
	for i := range r.Store {
		text(maxName, &r.Store[i].Key)
		r.Store[i].Waiters = texts(maxName, cut(r.Store[i].Waiters, maxWaiters))
	}
	text(maxText, &r.Partial)
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
		text(maxName, &s.Proc.WChan)
		if p := s.Page; p != nil {
			p.Groups = cut(p.Groups, maxGroups)
			p.StepTimes, p.Spans = cut(p.StepTimes, maxSteps), cut(p.Spans, maxSteps)
		}
	}
	e.Sockets = texts(maxName, cut(e.Sockets, maxSockets))
	text(maxText, &e.Error, &e.Exception)
	text(maxName, (*string)(&e.Work))
	lines(maxLong, &e.Log)
	if f := e.Flight; f != nil {
		f.Entries = cut(f.Entries, maxFlight)
		for i := range f.Entries {
			x := &f.Entries[i]
			text(maxName, &x.Group, &x.Desc, &x.Op, &x.State, &x.Sizes, &x.DType)
		}
	}
}

func fitStacks(s *hang.Stacks) {
	text(maxName, &s.Interpreter)
	text(maxText, &s.Error)
	s.Threads, s.Children = cut(s.Threads, maxThreads), cut(s.Children, maxChildren)
	for _, list := range [][]hang.Thread{s.Threads, s.Children} {
		for i := range list {
			t := &list[i]
			text(maxName, &t.Name)
			t.Python, t.Native = fitFrames(t.Python), fitFrames(t.Native)
		}
	}
}

func fitFrames(fs []hang.Frame) []hang.Frame {
	fs = cut(fs, maxFrames)
	for i := range fs {
		text(maxText, &fs[i].Func, &fs[i].File)
	}
	return fs
}

func fitGroups(gs []hang.Group) []hang.Group {
	gs = cut(gs, maxGroups)
	for i := range gs {
		text(maxName, &gs[i].Name, &gs[i].Desc, &gs[i].Backend)
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
		text(most, &ts[i])
	}
	return ts
}

// text makes texts one line of at most that many bytes each, which acts on no terminal.
func text(most int, ts ...*string) { clean(most, ts, false) }

// lines is text for what may have several lines.
func lines(most int, ts ...*string) { clean(most, ts, true) }

func clean(most int, ts []*string, lines bool) {
	for _, t := range ts {
		if !printable(*t, lines) {
			*t = strings.Map(func(r rune) rune {
				if acts(r) && !(lines && (r == '\n' || r == '\t')) {
					return ' '
				}
				return r
			}, strings.ToValidUTF8(*t, "?"))
		}
		if len(*t) > most {
			*t = strings.ToValidUTF8((*t)[:most-len("…")], "") + "…"
		}
	}
}

// printable is asked of every text, nearly all of which are.
func printable(s string, lines bool) bool {
	for i := range len(s) {
		if c := s[i]; (c < ' ' || c > '~') && !(lines && (c == '\n' || c == '\t')) {
			return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool {
				return acts(r) && !(lines && (r == '\n' || r == '\t'))
			})
		}
	}
	return true
}

func acts(r rune) bool {
	return unicode.In(r, unicode.Cc, unicode.Zl, unicode.Zp, unicode.Bidi_Control)
}
