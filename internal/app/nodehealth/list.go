package nodehealth

import (
	"maps"
	"slices"
	"time"
)

// Node is the record of one machine, for people.
type Node struct {
	Name string    `json:"name"`
	Mark *Mark     `json:"mark,omitempty"`
	Held *heldMark `json:"held,omitempty"` // the breaker has held a mark back
	// Suspect: it is the culprit of many failures of a run.
	Suspect  bool          `json:"suspect,omitempty"`
	Findings []agedFinding `json:"findings,omitempty"` // the newest first
	// Runs is how many runs it takes part in, and Seen when it was last heard of.
	Runs int       `json:"runs,omitempty"`
	Seen time.Time `json:"seen,omitzero"`
}

// agedFinding is a finding and its age in seconds.
type agedFinding struct {
	Finding
	Age float64 `json:"age"`
}

// List are the machines with a record besides their presence, by name.
func (g *Registry) List(now time.Time) []Node {
	now = stamp(now)
	out := []Node{}
	for _, name := range slices.Sorted(maps.Keys(g.nodes.of)) {
		if n := g.describe(now, g.nodes.of[name]); n.Mark != nil || n.Held != nil || n.Suspect || len(n.Findings) > 0 {
			out = append(out, n)
		}
	}
	return out
}

func (g *Registry) describe(now time.Time, r *record) Node {
	n := Node{Name: r.name, Suspect: g.Suspect(r.name), Runs: g.runs.in[r.name], Seen: r.seen}
	if r.mark.counts(now) {
		m := *r.mark
		n.Mark = &m
	}
	if r.held != nil && r.held.Until.After(now) {
		h := *r.held
		n.Held = &h
	}
	for _, f := range slices.Backward(r.findings) {
		if age := now.Sub(f.At); age < g.cfg.Keep {
			n.Findings = append(n.Findings, agedFinding{f, max(age, 0).Seconds()})
		}
	}
	return n
}

func (m *Mark) counts(now time.Time) bool {
	return m != nil && (m.Until.IsZero() || m.Until.After(now))
}

// Avoid are the names of machines that are marked, by name: no replacement should be placed there.
func (g *Registry) Avoid(now time.Time) []string {
	names := []string{}
	for name, r := range g.marks.of {
		if r.mark.counts(now) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Marks are the marks that are there, by the names of their machines.
func (g *Registry) Marks() []Mark {
	marks := make([]Mark, 0, len(g.marks.of))
	for _, r := range g.marks.sorted() {
		marks = append(marks, *r.mark)
	}
	return marks
}

// Runs are the names of all runs that the Registry knows, by name.
func (g *Registry) Runs() []string { return g.runs.names() }

// RunsOf are the runs in which a machine takes part now, by name.
func (g *Registry) RunsOf(node string) (runs []string) {
	for _, name := range g.Runs() {
		if g.runs.of[name].members[node] {
			runs = append(runs, name)
		}
	}
	return runs
}

// Noted reports whether a check that passes of a machine would change anything.
func (g *Registry) Noted(node string) bool {
	r := g.nodes.of[node]
	return r != nil && !r.empty()
}

// Marked reports whether a machine has a mark.
func (g *Registry) Marked(now time.Time, node string) bool {
	r := g.marks.of[node]
	return r != nil && r.mark.counts(now)
}

// Held is the number of machines with a mark that the breaker has held back.
func (g *Registry) Held(now time.Time) (n int) {
	for _, r := range g.nodes.of {
		if r.held != nil && r.held.Until.After(now) {
			n++
		}
	}
	return n
}
