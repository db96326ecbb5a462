package nodehealth

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"dlrover-run/internal/text"
)

// sameWithin is how long a repetition of the last finding is no news.
const sameWithin = 10 * time.Minute

// Find records the findings of one event, and judges them together. Invalid findings, such as one without a node, are
// left out.
func (g *Registry) Find(now time.Time, found ...Finding) (acts []Act) {
	now = stamp(now)
	found = slices.DeleteFunc(slices.Clone(found), func(f Finding) bool { return !acceptable(f) })
	fresh := make([]bool, len(found))
	for i := range found {
		f := &found[i]
		f.Text, f.Cleared = Line(f.Text), false
		f.Aspect = cmp.Or(f.Aspect, aspects[f.Kind])
		if f.At = stamp(f.At); f.At.IsZero() || f.At.After(now) {
			f.At = now
		}
		if r := g.node(now, f.Node); r != nil {
			fresh[i] = g.nodes.record(r, *f)
			if f.Run != "" {
				g.run(now, f.Run).blame(now, g.cfg.MassWithin, *f)
			}
		}
	}
	g.noteMass(now, found)
	for i, f := range found {
		if g.nodes.of[f.Node] != nil { // there was room for it
			acts = append(acts, g.judge(now, f, fresh[i])...)
		}
	}
	return acts
}

func acceptable(f Finding) bool {
	return CheckName(f.Node) == nil && checkRun(f.Run) == nil && checkKind(f.Kind) == nil && f.Kind != operator &&
		checkAspect(f.Aspect) == nil
}

// checkAspect reports why an aspect cannot be called so; "" is none.
func checkAspect(a string) error {
	if a == "" {
		return nil
	}
	return checkKind(Kind(a))
}

func checkKind(k Kind) error {
	if k == "" || len(k) > MaxKind || !text.Printable(string(k)) {
		return fmt.Errorf("kind %.100q: need a word, %s, at most %d bytes", k, text.PrintableRule, MaxKind)
	}
	return nil
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// noteMass flags the findings of mass verdicts: those of all machines when a verdict is first seen, then later ones.
func (g *Registry) noteMass(now time.Time, found []Finding) {
	since := now.Add(-g.cfg.MassWithin)
	for _, f := range found {
		j := g.runs.of[f.Run]
		switch {
		case j == nil:
		case !j.mass(f.Kind):
			delete(j.massed, f.Kind)
		case j.massed[f.Kind]:
			g.setMass(since, f)
		default:
			j.massed[f.Kind] = true
			for _, o := range j.blames {
				if o.Kind == f.Kind {
					g.setMass(since, Finding{Node: o.Node, Run: f.Run, Kind: f.Kind})
				}
			}
		}
	}
}

// setMass flags the findings after since that are like f as those of a mass verdict.
func (g *Registry) setMass(since time.Time, f Finding) {
	if r := g.nodes.of[f.Node]; r != nil {
		r.setMass(since, f)
	}
}

// judge returns the acts that follow from a recorded finding.
func (g *Registry) judge(now time.Time, f Finding, fresh bool) []Act {
	r := g.nodes.of[f.Node]
	if m := r.mark; m != nil && (m.By != byPolicy || !fresh && !g.cfg.renewable(now, m)) {
		return nil
	}
	reason := g.reason(r, f)
	if reason == "" {
		return nil
	}
	m := Mark{
		Node: f.Node, Kind: f.Kind, Aspect: f.Aspect, Reason: reason, Evidence: f.Text, Run: f.Run, Since: now,
		Until: now.Add(g.cfg.Expiry), By: byPolicy,
	}
	if g.runs.of[f.Run].mass(f.Kind) {
		return g.holdMass(now, m)
	}
	if r.mark != nil {
		return []Act{r.renew(m)}
	}
	if why := g.marks.breaker(now, g.cfg, f.Run, g.runs.of[f.Run], len(g.nodes.of)); why != "" {
		return r.hold(m, why)
	}
	g.marks.made = append(g.marks.made, now)
	g.marks.set(r, m)
	return []Act{{Do: Apply, Mark: m, Run: m.Run, Text: m.line()}}
}

// line is a mark for people.
func (m Mark) line() string {
	text := m.Reason
	if m.Evidence != "" {
		text += ": " + m.Evidence
	}
	return Line(text)
}

// reason is why a finding marks; "": it does not. Findings of a mass verdict only hold back marks.
func (g *Registry) reason(r *record, f Finding) string {
	if why := hard[f.Kind]; why != "" || f.Kind == LogRule {
		return why
	}
	n, mass := 0, g.runs.of[f.Run].mass(f.Kind)
	for _, o := range r.findings {
		counts := !o.Mass || mass && o.Run == f.Run && o.Kind == f.Kind
		if counts && !o.Cleared && hard[o.Kind] == "" && o.Kind != LogRule {
			n++
		}
	}
	if n < g.cfg.Repeats {
		return ""
	}
	return fmt.Sprintf("%d findings of the last days, the newest %s", n, f.Kind)
}

// holdMass holds a mark back, and removes those that earlier findings of the same mass verdict have made.
func (g *Registry) holdMass(now time.Time, m Mark) (acts []Act) {
	j := g.runs.of[m.Run]
	why := fmt.Sprintf("%d of %d nodes of the run are blamed at once: it is not they that are broken", j.blamed[m.Kind],
		len(j.members))
	for _, r := range g.marks.sorted() {
		o := r.mark
		if o.By == byPolicy && o.Run == m.Run && o.Kind == m.Kind && !o.Since.Before(now.Add(-g.cfg.MassWithin)) {
			was := g.marks.unset(r)
			r.held = &heldMark{Mark: was, Why: why}
			acts = append(acts, Act{Do: Remove, Mark: was, Run: was.Run, Text: why})
		}
	}
	if r := g.nodes.of[m.Node]; r.mark == nil {
		acts = append(acts, r.hold(m, why)...)
	}
	return acts
}

// Failed records how an epoch of a run has ended: which machine was to blame, "" if none was. One that is to blame for
// Config.Repeats of the last Config.Of failures is suspect, which is a finding.
func (g *Registry) Failed(now time.Time, run, culprit, text string) []Act {
	now = stamp(now)
	if run == "" || checkRun(run) != nil || culprit != "" && CheckName(culprit) != nil {
		return nil
	}
	j := g.run(now, run)
	before, n := j.failed(now, culprit, g.cfg.Of)
	g.runs.suspects = nil
	if culprit == "" || before >= g.cfg.Repeats || n < g.cfg.Repeats {
		return nil
	}
	return g.Find(now, Finding{Node: culprit, Run: run, Kind: Repeated, At: now,
		Text: fmt.Sprintf("to blame for %d of the last %d failures of the run; the last: %s", n, len(j.failures), text)})
}

// Suspect reports whether a machine is the culprit of many failures, so that a spare is preferred to it.
func (g *Registry) Suspect(node string) bool {
	return g.runs.suspect(node, g.cfg.Repeats)
}

// Passed records that a check of a machine has found some aspects of it sound. Findings about these are disproved, and
// a mark of the policy that has no other reason is removed. All findings stay on record.
func (g *Registry) Passed(now time.Time, node string, covered ...string) []Act {
	r := g.nodes.of[node]
	if r == nil {
		return nil
	}
	now = stamp(now)
	r.seen = now
	if r.held != nil && slices.Contains(covered, r.held.Aspect) {
		r.held = nil
	}
	disproved := r.mark != nil && slices.Contains(covered, r.mark.Aspect)
	for i := range r.findings {
		if f := &r.findings[i]; !f.Cleared && slices.Contains(covered, f.Aspect) {
			f.Cleared, disproved = true, true
		}
	}
	if r.mark == nil || r.mark.By != byPolicy || !disproved {
		return nil
	}
	if f, reason := g.rest(now, r); reason != "" {
		m := *r.mark
		if f.Text == m.Evidence && reason == m.Reason { // which names the kind
			return nil
		}
		m.Kind, m.Aspect, m.Reason, m.Evidence, m.Until = f.Kind, f.Aspect, reason, f.Text, f.At.Add(g.cfg.Expiry)
		r.mark = &m
		return []Act{{Do: Apply, Mark: m, Run: m.Run, Text: m.line()}}
	}
	m := g.marks.unset(r)
	return []Act{{Do: Remove, Mark: m, Run: m.Run, Text: "a check of the node has passed"}}
}

// rest is the newest finding that the mark of a machine still rests on, and why it marks; "" is none.
func (g *Registry) rest(now time.Time, r *record) (Finding, string) {
	for _, f := range slices.Backward(r.findings) {
		if f.Cleared || f.Mass || now.Sub(f.At) >= g.cfg.Expiry {
			continue
		}
		if reason := g.reason(r, f); reason != "" {
			return f, reason
		}
	}
	return Finding{}, ""
}

// SetMark marks a machine on an operator's command: no breaker counts it. It lasts until it is cleared, or until a time
// that is not zero. The error is about an invalid name.
func (g *Registry) SetMark(now time.Time, node, by, why string, until time.Time) ([]Act, error) {
	now = stamp(now)
	if err := CheckName(node); err != nil {
		return nil, err
	}
	if !until.IsZero() && !until.After(now) {
		return nil, fmt.Errorf("mark of node %s until %s: that has passed", node, until.Format(time.RFC3339))
	}
	r := g.node(now, node)
	if r == nil {
		return nil, fmt.Errorf("mark of node %s: all of %d nodes that can be kept are marked; clear some", node, MaxNodes)
	}
	if by == "" || by == byPolicy {
		by = string(operator)
	}
	if r.mark != nil {
		g.marks.unset(r)
	}
	g.marks.set(r, Mark{Node: node, Kind: operator, Reason: Line(why), Since: now, Until: stamp(until), By: Line(by)})
	return []Act{{Do: Apply, Mark: *r.mark, Text: Line(fmt.Sprintf("marked by %s: %s", by, why))}}, nil
}

// Clear removes every mark of a machine and forgets its findings, on an operator's command. Known is false if there was
// nothing.
func (g *Registry) Clear(now time.Time, node, by, why string) (acts []Act, known bool) {
	now = stamp(now)
	known = g.runs.absolve(node)
	r := g.nodes.of[node]
	if r == nil {
		return nil, known
	}
	known = known || !r.empty()
	g.nodes.findings -= len(r.findings)
	r.findings, r.held, r.seen = nil, nil, now
	if r.mark != nil {
		m := g.marks.unset(r)
		acts = []Act{{Do: Remove, Mark: m, Run: m.Run, Text: Line(fmt.Sprintf("cleared by %s: %s", by, why))}}
	}
	return acts, known
}

// sweepEvery is the interval between sweeps.
const sweepEvery = time.Hour

// Tick removes marks that have expired, and forgets old records. It is due at Next.
func (g *Registry) Tick(now time.Time) (acts []Act) {
	now = stamp(now)
	for _, r := range g.marks.sorted() {
		g.cfg.bound(now, r.mark)
		if m := r.mark; !m.Until.IsZero() && !m.Until.After(now) {
			was := g.marks.unset(r)
			acts = append(acts, Act{Do: Remove, Mark: was, Run: was.Run, Text: "the mark has expired"})
		}
	}
	if since := now.Sub(g.swept); !g.swept.IsZero() && (since >= sweepEvery || since < 0) {
		g.sweep(now)
	}
	return acts
}

// sweep forgets old records. Times of a clock that was wrong become now.
func (g *Registry) sweep(now time.Time) {
	g.swept = now
	old := now.Add(-g.cfg.Keep)
	g.marks.sweep(now, g.cfg.Window)
	g.nodes.drop(old)
	g.runs.sweep(now, old, g.cfg.MassWithin)
	for _, r := range g.nodes.of {
		if r.correct(now); r.empty() && g.runs.in[r.name] == 0 && !r.seen.After(old) {
			g.nodes.remove(r)
		}
	}
	if len(g.nodes.of)+len(g.runs.of) == 0 {
		g.swept = time.Time{}
	}
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// Next is when Tick is due; zero: never, unless something else happens before.
func (g *Registry) Next() (next time.Time) {
	if !g.swept.IsZero() {
		next = g.swept.Add(sweepEvery)
	}
	if first := g.marks.next(); next.IsZero() || !first.IsZero() && first.Before(next) {
		next = first
	}
	return next
}
