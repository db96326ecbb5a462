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

// Where the kernel lets threads sleep that wait for nothing that another rank does.
var sleeps = []string{
	"nanosleep", "pause", "do_wait", "kernel_clone", "pipe_", "sigsuspend", "sigtimedwait", "n_tty_read",
}

// restsAnywhere reports a rest at any wchan: a wait for a collective without a name on the stack sleeps like a wait
// for a lock.
func (m *member) restsAnywhere(wchan string) bool {
	return m.use.switches <= 2 && !slices.ContainsFunc(sleeps, func(s string) bool { return strings.Contains(wchan, s) })
}

// isSpin reports a loop in the user's own code, with nothing that would explain it.
func (m *member) isSpin(s *Stacks) bool {
	return (m.eager || m.use.wants >= spinCPU) && m.use.cpu-m.use.mainCPU < spinOther && m.use.io < spinIO &&
		m.where.Func != "" && !s.inLibrary()
}
