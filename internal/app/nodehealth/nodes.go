package nodehealth

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// record is one machine.
type record struct {
	name     string
	seen     time.Time
	mark     *Mark
	held     *heldMark
	findings []Finding // the oldest first
}

// repeats reports whether f is o once more. How slow a node is for one job may be the job's own doing, so that it is
// one finding, however often it is made.
func (o *Finding) repeats(f Finding) bool {
	if o.Cleared || o.Kind != f.Kind || o.Run != f.Run {
		return false
	}
	return f.Kind == Slow || o.Text == f.Text && f.At.Sub(o.At).Abs() < sameWithin
}

// record keeps a finding, and reports whether it is news.
func (r *record) record(f Finding) bool {
	for i := range r.findings {
		if o := &r.findings[i]; o.repeats(f) {
			o.At, o.Text = later(o.At, f.At), f.Text
			return false
		}
	}
	r.findings = append(r.findings, f)
	if i := r.surplus(); i >= 0 {
		r.findings = slices.Delete(r.findings, i, i+1)
	}
	return true
}

// surplus is the finding that has to go now that another one has come, -1 if there is room.
func (r *record) surplus() int {
	rules, oldest := 0, -1
	for i, f := range slices.Backward(r.findings) {
		if f.Kind == LogRule {
			rules, oldest = rules+1, i
		}
	}
	switch {
	case rules > maxLogRules:
		return oldest
	case len(r.findings) > MaxPerNode:
		return 0
	}
	return -1
}

// hold records that a mark was held back. It is reported once for each kind of finding.
func (r *record) hold(m Mark, why string) []Act {
	told := r.held != nil && r.held.Kind == m.Kind && r.held.Run == m.Run && r.held.Until.After(m.Since)
	r.held = &heldMark{Mark: m, Why: why}
	if told {
		return nil
	}
	return []Act{{Do: Hold, Mark: m, Run: m.Run, Text: Line(m.line() + "; not marked: " + why)}}
}

// renew has a mark of the policy last longer. Its beginning and its run stay.
func (r *record) renew(m Mark) Act {
	m.Since, m.Run = r.mark.Since, r.mark.Run
	m.Until = later(m.Until, r.mark.Until)
	r.mark = &m
	return Act{Do: Apply, Mark: m, Run: m.Run, Text: m.line()}
}

// setMass flags the findings after since that are like f as those of a mass verdict.
func (r *record) setMass(since time.Time, f Finding) {
	for i := range r.findings {
		if o := &r.findings[i]; o.Run == f.Run && o.Kind == f.Kind && o.At.After(since) {
			o.Mass = true
		}
	}
}

// correct bounds times of a clock that was wrong, and ends a mark that was held back.
func (r *record) correct(now time.Time) {
	for i := range r.findings {
		r.findings[i].At = earlier(r.findings[i].At, now)
	}
	if r.held != nil && !r.held.Until.After(now) {
		r.held = nil
	}
	r.seen = earlier(r.seen, now)
}

// empty reports whether a record says only that its machine was seen.
func (r *record) empty() bool { return r.mark == nil && r.held == nil && len(r.findings) == 0 }

// nodeTable holds the records of machines, within its bounds.
type nodeTable struct {
	of       map[string]*record // by name
	findings int                // of all
}

func newNodeTable() nodeTable { return nodeTable{of: map[string]*record{}} }

// touch returns the record of a machine that was heard of now; nil: the name cannot be one, or there is no room. It
// returns as well the machines that it has forgotten to make room.
func (t *nodeTable) touch(now time.Time, name string) (r *record, gone []string) {
	if r = t.of[name]; r == nil {
		if CheckName(name) != nil {
			return nil, nil
		}
		if gone = t.makeRoom(); len(t.of) >= MaxNodes {
			return nil, gone
		}
		r = &record{name: name}
		t.of[name] = r
	}
	r.seen = now
	return r, gone
}

// sooner orders machines as they are forgotten: first those without findings, then those not seen for longest.
func sooner(a, b *record) int {
	return cmp.Or(cmp.Compare(min(len(a.findings), 1), min(len(b.findings), 1)), a.seen.Compare(b.seen),
		strings.Compare(a.name, b.name))
}

// makeRoom forgets, if need be, the machines that come first by sooner.
func (t *nodeTable) makeRoom() (gone []string) {
	if len(t.of) < MaxNodes {
		return nil
	}
	var old []*record
	for _, r := range t.of {
		if r.mark == nil {
			old = append(old, r)
		}
	}
	slices.SortFunc(old, sooner)
	for _, r := range old[:min(len(old), MaxNodes/64)] {
		t.remove(r)
		gone = append(gone, r.name)
	}
	return gone
}

func (t *nodeTable) remove(r *record) {
	t.findings -= len(r.findings)
	delete(t.of, r.name)
}

// record keeps a finding about a machine, and reports whether it is news.
func (t *nodeTable) record(r *record, f Finding) bool {
	before := len(r.findings)
	fresh := r.record(f)
	t.findings += len(r.findings) - before
	if t.findings > maxFindings {
		t.dropOldest()
	}
	return fresh
}

// dropOldest forgets the oldest 16th of all findings.
func (t *nodeTable) dropOldest() {
	times := make([]time.Time, 0, t.findings)
	for _, r := range t.of {
		for _, f := range r.findings {
			times = append(times, f.At)
		}
	}
	slices.SortFunc(times, time.Time.Compare)
	t.drop(times[len(times)/16])
}

// drop forgets findings up to a time.
func (t *nodeTable) drop(until time.Time) {
	for _, r := range t.of {
		before := len(r.findings)
		r.findings = slices.DeleteFunc(r.findings, func(f Finding) bool { return !f.At.After(until) })
		t.findings -= before - len(r.findings)
	}
}
