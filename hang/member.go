package hang

import (
	"slices"
	"time"
)

// member is a rank as the judge sees it. It does not keep the evidence, which takes more memory.
type member struct {
	rank, pid, groupRank int

	start   uint64
	node    string
	groups  []Group
	sockets []string
	flight  *Flight
	in      []*processGroup // of groups, those that the analysis knows

	class class
	wait  wait
	// maybe: the main thread rests in the user's code. It may wait for another thread, or something asynchronous that
	// it has begun, which waits for other ranks.
	maybe bool
	eager bool // its main thread was running, or about to, in every sample: others may keep it from the CPU
	gil   bool // it does not let go of the interpreter's lock
	moved bool // it has made progress between the samples
	spin  bool // it is busy with nothing but a loop
	work  Work
	// debugged: a person looks at it, and may take their time.
	debugged bool
	use      usage
	phase    Phase
	where    Frame
	page     *Page // the newest without its rings, nil if there is none
	at       time.Duration
	error    string // the exception that has ended its main thread

	p99     time.Duration // of its steps
	longest time.Duration // a phase as the present one has lasted before
}

// halted reports whether it does nothing at all, even if its page says otherwise.
func (m *member) halted() bool {
	return m.class == classStopped || m.class == classBlocked || m.class == classEnded
}

// seemsToWait reports whether no sign contradicts a wait. A rank that computes in its own code may wait there for a
// device, as .item() does: the flight recorder knows a collective that has not ended.
func (m *member) seemsToWait() bool {
	return m.recorded() != "" || m.class == classWaiting || m.class == classIdle || m.class == classBusy && !m.spin
}

// asyncWait reports whether m has entered all collectives that others have, and rests where it might wait for them.
func (m *member) asyncWait() bool { return m.maybe && len(m.in) > 0 && !m.behind() }

// inOwnKernel reports whether it waits for its device, and no collective of it is under way there.
func (m *member) inOwnKernel() bool {
	return m.wait.op == onDevice && m.flight != nil &&
		!slices.ContainsFunc(m.flight.Entries, func(e FlightEntry) bool { return e.State != "completed" })
}

// operation is the operation of m, as far as it is comparable with others: by the flight recorder, or by name.
func (m *member) operation(g *processGroup) string {
	if e := m.entry(g.Name); e != nil {
		return e.Op
	}
	if m.wait.named || m.wait.op == "backward" {
		return m.wait.op
	}
	return ""
}

// entry is the oldest collective of a group that m has not completed, as the flight recorder has it.
func (m *member) entry(group string) *FlightEntry {
	if m.flight == nil {
		return nil
	}
	for i := range m.flight.Entries {
		if e := &m.flight.Entries[i]; e.Group == group && e.State != "completed" {
			return e
		}
	}
	return nil
}

// doingIn is the operation that m is in.
func (m *member) doingIn(g *processGroup) string {
	if g != nil {
		if e := m.entry(g.Name); e != nil {
			return e.Op
		}
	}
	if m.wait.op == "" && m.class != classStopped {
		return "a collective"
	}
	return m.wait.op
}

// doing describes in a few words the work of a rank.
func (m *member) doing() string {
	switch m.class {
	case classEnded:
		return "ended"
	case classStopped:
		return "stopped"
	case classBlocked:
		return "blocked in the kernel"
	case classWaiting:
		return "waiting in " + m.wait.op
	case classBusy:
		return m.activity() + m.lock()
	}
	return m.rest() + m.lock()
}

func (m *member) activity() string {
	switch {
	case m.use.cpu >= busyCPU || m.eager:
		return "computing"
	case m.work == workNet:
		return "sending or receiving"
	case m.work == workChild && m.use.io < busyIO:
		return "waiting for a child at work"
	}
	return "reading or writing"
}

func (m *member) rest() string {
	if m.wakes() {
		return "polling"
	}
	return "asleep"
}

func (m *member) lock() string {
	if m.gil {
		return " with the interpreter locked"
	}
	return ""
}
