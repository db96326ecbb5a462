package remote

import "time"

// Muster counts the remaining hosts of a job, and decides what an end leads to.
type Muster struct {
	least  int // without which the job cannot go on
	hosts  []Ending
	left   int
	failed int // the first host that failed; -1: none did
	last   int // the last one; -1: none was
	good   int // hosts that have ended with status 0
	ending bool
}

// NewMuster is a job of that many hosts.
func NewMuster(hosts, least int) *Muster {
	return &Muster{least: least, hosts: make([]Ending, hosts), left: hosts, failed: -1, last: -1}
}

// Verdict is the consequence of a host's end.
type Verdict int

// The verdicts.
const (
	// GoOn: the other hosts go on, or learn of the end from each other.
	GoOn Verdict = iota
	// EndSoon: the other hosts learn of the end, but the host is not replaced, so they are to be ended when they have had
	// [Patience] for their own end.
	EndSoon
	// EndNow: the others do not hear of it, and would wait for the host.
	EndNow
)

// Patience is the time between EndSoon and the end of the others.
const Patience = 10 * time.Second

// Ended notes how a host has ended.
func (m *Muster) Ended(host int, e Ending) Verdict {
	m.hosts[host] = e
	m.left--
	if e.Failure == nil && e.Status == 0 {
		m.good++
		return GoOn
	}
	if m.ending {
		return GoOn
	}
	if m.failed < 0 {
		m.failed = host
	}
	m.last = host
	switch {
	case m.left == 0 || m.left >= m.least:
		return GoOn
	case e.Joined || e.Failure != nil && e.Started:
		return EndSoon
	}
	return EndNow
}

// End notes that all hosts are being ended: their ends have no more consequences.
func (m *Muster) End() { m.ending = true }

// Left is how many hosts have not ended.
func (m *Muster) Left() int { return m.left }

// Culprit is the host that decides the end of the job, and how it ended; -1: the job has succeeded. A job that may go
// on with fewer hosts succeeds with the last of them.
func (m *Muster) Culprit() (int, Ending) {
	switch {
	case m.failed < 0, m.least < len(m.hosts) && m.good > 0:
		return -1, Ending{}
	case m.least < len(m.hosts):
		return m.last, m.hosts[m.last]
	}
	return m.failed, m.hosts[m.failed]
}

// Succeeded is how many hosts have ended with status 0.
func (m *Muster) Succeeded() int { return m.good }
