package hang

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// class is the state of a worker during an examination.
type class uint8

const (
	classUnknown class = iota // there is no evidence
	classEnded
	classStopped // by a signal or a debugger
	classBlocked // in uninterruptible sleep, all the time
	classWaiting // for other ranks, by its stack
	classBusy    // it computes, reads or writes
	classIdle    // none of that
)

// The thresholds of a busy worker: it, its other threads or its children do at least so much.
const (
	busyCPU = 0.10    // of a core
	busyIO  = 1 << 20 // bytes a second
	// A spin is one thread that computes and does nothing else: no I/O, no help.
	spinCPU   = 0.50     // of a core, of the main thread, or as much as others leave it of that
	spinOther = 0.10     // of a core, of all else
	spinIO    = 64 << 10 // bytes a second
)

// staleHeart is for how long the shim's thread, which runs every half second, may not have run while the interpreter's
// lock is free.
const staleHeart = 3 * time.Second

// usage is the use of resources from the first sample of a process to the last, each per second.
type usage struct {
	cpu, mainCPU, io float64 // with its descendants, but for mainCPU; cores, cores, bytes
	wants            float64 // cores that the main thread had or would have had if others had not
	switches         uint64  // in all
	span             time.Duration
}

// reading is the result of reading the stacks of a process.
type reading struct {
	wait  wait
	sure  bool
	phase Phase
	where Frame
}

// readings are those of stacks that many ranks may share.
type readings map[*Stacks]reading

func (l readings) read(s *Stacks) reading {
	r, known := l[s]
	if !known {
		r.wait, r.sure = waitOf(s)
		r.phase, r.where = phaseOf(*s), whereOf(s)
		l[s] = r
	}
	return r
}

// classify returns the state of a rank.
func classify(ev *Evidence, l readings) *member {
	m := &member{
		rank: ev.Rank, pid: ev.PID, groupRank: ev.GroupRank, start: ev.Start, node: ev.Node, groups: ev.Groups,
		sockets: ev.Sockets, flight: ev.Flight, work: ev.Work, phase: PhaseUnknown,
		error: ev.Exception,
	}
	if len(ev.Samples) > 0 {
		m.look(ev.Samples)
	}
	if ev.Stacks != nil {
		m.read(l.read(ev.Stacks))
	}
	m.class = m.classOf(ev)
	// Without a page this is the only sign that a rank progresses.
	m.moved = m.moved || m.page == nil && (m.class == classWaiting || m.class == classStopped) && stirred(ev.Samples) ||
		m.page == nil && m.class == classIdle && settled(ev.Samples)
	m.gil = m.class >= classBusy && m.page != nil && m.page.Phase != PhaseEnd && m.at-m.page.Heartbeat > staleHeart
	m.spin = m.class == classBusy && m.isSpin(ev.Stacks)
	if m.page != nil {
		m.p99, m.longest = quantile99(gaps(m.page.StepTimes)), m.page.longest(m.phase)
		m.page = m.page.bare()
	}
	return m
}

// look takes the result of the samples.
func (m *member) look(samples []Sample) {
	last := samples[len(samples)-1]
	same := func(s Sample) bool { return s.Proc.Thread == last.Proc.Thread }
	m.at = last.At
	m.use = useBetween(samples[slices.IndexFunc(samples, same)], last)
	m.eager, m.debugged = allIn(samples, "R"), allIn(samples, "t")
	for i := range samples {
		if samples[i].Page != nil {
			m.page = samples[i].Page
		}
		m.moved = m.moved || i > 0 && advanced(samples[i-1].Page, samples[i].Page)
	}
	if m.page != nil {
		m.phase = m.page.Phase
	}
}

// read takes the result of the stacks. Their names are better than a shim that does not know them; code that is
// loaded for an evaluation is data.
func (m *member) read(r reading) {
	m.where = r.where
	if r.sure {
		m.wait = r.wait
	}
	m.maybe = r.wait.op != "" && !r.sure
	m.debugged = m.debugged || r.phase == PhaseDebug
	if m.phase == PhaseUnknown || m.phase == PhaseTrain || m.phase == PhaseEval || r.phase.lasting() {
		m.phase = cmp.Or(r.phase, m.phase)
	}
}

func (m *member) classOf(ev *Evidence) class {
	switch {
	case len(ev.Samples) == 0 && m.wait.op != "":
		return classWaiting
	case len(ev.Samples) == 0:
		return classUnknown
	case allIn(ev.Samples, "\x00ZX"):
		return classEnded
	case allIn(ev.Samples, "Tt"):
		return classStopped
	case allIn(ev.Samples, "D") && !m.atWork():
		return classBlocked
	case m.wait.op != "":
		return classWaiting
	case m.atWork() || m.eager:
		return classBusy
	}
	m.maybe = m.maybe || m.restsAnywhere(ev.Samples[len(ev.Samples)-1].Proc.WChan)
	return classIdle
}

// spinsOnDevice reports whether it waits for its device, and uses a CPU for that.
func (m *member) spinsOnDevice() bool { return m.wait.op == onDevice && m.use.wants >= spinCPU }

// atWork reports whether it works, by all observations.
func (m *member) atWork() bool { return m.use.busy() || m.work.busy() }

// wakes reports whether its main thread looks for something now and then, which may arrive from outside of the job.
func (m *member) wakes() bool {
	return m.class == classIdle && (m.work == workWakes || m.use.switches > 2)
}

// allIn reports whether the process was in one of these states in every sample, or in the last one, if it has ended.
func allIn(samples []Sample, states string) bool {
	in := func(s Sample) bool { return strings.IndexByte(states, s.Proc.State) >= 0 }
	if strings.IndexByte(states, 'Z') >= 0 {
		return in(samples[len(samples)-1])
	}
	return !slices.ContainsFunc(samples, func(s Sample) bool { return !in(s) })
}

// Where the kernel lets threads sleep that wait for nothing that another rank does.
var sleeps = []string{
	"nanosleep", "pause", "do_wait", "kernel_clone", "pipe_", "sigsuspend", "sigtimedwait", "n_tty_read",
}

// restsAnywhere reports a rest at any wchan: a wait for a collective without a name on the stack sleeps like a wait
// for a lock.
func (m *member) restsAnywhere(wchan string) bool {
	return m.use.switches <= 2 && !slices.ContainsFunc(sleeps, func(s string) bool { return strings.Contains(wchan, s) })
}

func useBetween(a, b Sample) usage {
	span := (b.At - a.At).Seconds()
	if span <= 0 || a.PID != b.PID || a.Start != b.Start {
		return usage{}
	}
	cpu := grown(a.Proc.CPU, b.Proc.CPU) + grown(a.Proc.TreeCPU, b.Proc.TreeCPU)
	io := grown(a.Proc.IO, b.Proc.IO) + grown(a.Proc.TreeIO, b.Proc.TreeIO)
	return usage{
		cpu: cpu.Seconds() / span, mainCPU: grown(a.Proc.MainCPU, b.Proc.MainCPU).Seconds() / span,
		wants: (grown(a.Proc.MainCPU, b.Proc.MainCPU) + grown(a.Proc.MainWait, b.Proc.MainWait)).Seconds() / span,
		io:    float64(io) / span, switches: grown(a.Proc.Switches, b.Proc.Switches), span: b.At - a.At,
	}
}

// grown is the growth of a count; the use by descendants may shrink when one of them ends.
func grown[T ~int64 | ~uint64](a, b T) T {
	if b < a {
		return 0
	}
	return b - a
}

func (u usage) busy() bool { return u.cpu >= busyCPU || u.io >= busyIO }

// isSpin reports a loop in the user's own code, with nothing that would explain it.
func (m *member) isSpin(s *Stacks) bool {
	return (m.eager || m.use.wants >= spinCPU) && m.use.cpu-m.use.mainCPU < spinOther && m.use.io < spinIO &&
		m.where.Func != "" && !s.inLibrary()
}

// inLibrary reports whether the main thread is in a function of Python's or of a library right now.
func (s *Stacks) inLibrary() bool {
	main := s.Main()
	return len(main.Python) == 0 || inLibrary(main.Python[0].File)
}

// whereOf is the innermost function of the main thread that is the user's own, else the innermost.
func whereOf(s *Stacks) Frame {
	main := s.Main()
	switch {
	case main == nil:
		return Frame{}
	case len(main.Python) == 0:
		return Innermost(main.Native)
	}
	for _, f := range main.Python {
		if !inLibrary(f.File) {
			return f
		}
	}
	return main.Python[0]
}

// advanced reports progress from one page to another: a step, or a collective.
func advanced(a, b *Page) bool {
	if a == nil || b == nil || a.PID != b.PID || a.Start != b.Start {
		return false
	}
	if b.Steps != a.Steps {
		return true
	}
	return slices.ContainsFunc(b.Groups, func(g GroupState) bool {
		before, ok := a.Group(g.ID)
		return !ok || before.Seq != g.Seq
	})
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

// rested reports whether the main thread was not at work between two looks. It may have woken up, as a poll every few
// seconds does. Of looks at different threads nothing is known.
func rested(a, b Sample) bool {
	if a.Proc.Thread != b.Proc.Thread {
		return true
	}
	span := b.At - a.At
	return grown(a.Proc.Switches, b.Proc.Switches) <= 2+uint64(span/(2*time.Second)) &&
		grown(a.Proc.MainCPU, b.Proc.MainCPU) <= clockTick+span/200
}

// stirred reports whether the main thread was at rest between two samples, and later it was not.
func stirred(samples []Sample) bool {
	at := -1
	for i := 1; i < len(samples); i++ {
		rest := rested(samples[i-1], samples[i])
		if at >= 0 && !rest {
			return true
		}
		if rest {
			at = i
		}
	}
	return false
}

// settled reports whether the main thread was at work when its stack was read, and then came to rest. Only another
// look shows where.
func settled(samples []Sample) bool {
	n := len(samples)
	return n > 2 && !rested(samples[0], samples[1]) && rested(samples[n-2], samples[n-1])
}

// Progressed reports whether a worker has made progress from the first sample to the second: a step or a collective,
// or without pages work of its main thread. Another process in its place has made progress.
func Progressed(a, b Sample) bool {
	switch {
	case a.PID != b.PID || a.Start != b.Start:
		return true
	case a.Page == nil || b.Page == nil:
		return !rested(a, b)
	}
	return advanced(a.Page, b.Page)
}
