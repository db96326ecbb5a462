package nodehealth

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
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
		fresh[i] = g.record(now, *f)
		g.blame(now, *f)
	}
	g.noteMass(now, found)
	for i, f := range found {
		if g.nodes[f.Node] != nil { // there was room for it
			acts = append(acts, g.judge(now, f, fresh[i])...)
		}
	}
	return acts
}

func acceptable(f Finding) bool {
	return CheckName(f.Node) == nil && checkRun(f.Run) == nil && checkKind(f.Kind) == nil && f.Kind != Operator &&
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

// record keeps a finding, and reports whether it is news.
func (g *Registry) record(now time.Time, f Finding) bool {
	r := g.node(now, f.Node)
	if r == nil {
		return false
	}
	for i, o := range r.findings {
		if !o.Cleared && o.Kind == f.Kind && o.Run == f.Run && o.Text == f.Text && f.At.Sub(o.At).Abs() < sameWithin {
			r.findings[i].At = later(o.At, f.At)
			return false
		}
	}
	r.findings = append(r.findings, f)
	g.findings++
	if i := r.surplus(); i >= 0 {
		r.findings = slices.Delete(r.findings, i, i+1)
		g.findings--
	}
	g.roomForFindings()
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

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// roomForFindings forgets the oldest 16th of all findings when there are too many.
func (g *Registry) roomForFindings() {
	if g.findings <= maxFindings {
		return
	}
	times := make([]time.Time, 0, g.findings)
	for _, r := range g.nodes {
		for _, f := range r.findings {
			times = append(times, f.At)
		}
	}
	slices.SortFunc(times, time.Time.Compare)
	g.dropFindings(times[len(times)/16])
}

// dropFindings forgets findings up to a time.
func (g *Registry) dropFindings(until time.Time) {
	for _, r := range g.nodes {
		before := len(r.findings)
		r.findings = slices.DeleteFunc(r.findings, func(f Finding) bool { return !f.At.After(until) })
		g.findings -= before - len(r.findings)
	}
}

// blame counts a finding for the mass rule.
func (g *Registry) blame(now time.Time, f Finding) {
	if f.Run == "" || g.nodes[f.Node] == nil {
		return
	}
	j := g.run(now, f.Run)
	j.expire(now.Add(-g.cfg.MassWithin))
	is := about{f.Node, f.Kind}
	if j.known[is] || len(j.blames) >= MaxNodes {
		return
	}
	j.known[is] = true
	j.blames = append(j.blames, blame{f.Node, f.Kind, now})
	if j.members[f.Node] {
		j.blamed[f.Kind]++
	}
}

// expire forgets blames up to a time.
func (j *job) expire(until time.Time) {
	n := 0
	for n < len(j.blames) && !j.blames[n].At.After(until) {
		o := j.blames[n]
		delete(j.known, about{o.Node, o.Kind})
		if j.members[o.Node] {
			j.blamed[o.Kind]--
		}
		n++
	}
	j.blames = slices.Delete(j.blames, 0, n)
}

// noteMass flags the findings of mass verdicts: those of all machines when a verdict is first seen, then later ones.
func (g *Registry) noteMass(now time.Time, found []Finding) {
	since := now.Add(-g.cfg.MassWithin)
	for _, f := range found {
		j := g.runs[f.Run]
		switch {
		case j == nil:
		case !g.mass(f):
			delete(j.massed, f.Kind)
		case j.massed[f.Kind]:
			g.setMass(since, f)
		default:
			j.massed[f.Kind] = true
			g.setAllMass(since, f.Run, f.Kind)
		}
	}
}

func (g *Registry) setAllMass(since time.Time, run string, k Kind) {
	for _, o := range g.runs[run].blames {
		if o.Kind == k {
			g.setMass(since, Finding{Node: o.Node, Run: run, Kind: k})
		}
	}
}

// setMass flags the findings after since that are like f as those of a mass verdict, if f is blamed.
func (g *Registry) setMass(since time.Time, f Finding) {
	r := g.nodes[f.Node]
	if r == nil || !g.runs[f.Run].known[about{f.Node, f.Kind}] {
		return
	}
	for i := range r.findings {
		if o := &r.findings[i]; o.Run == f.Run && o.Kind == f.Kind && o.At.After(since) {
			o.Mass = true
		}
	}
}

// judge returns the acts that follow from a recorded finding.
func (g *Registry) judge(now time.Time, f Finding, fresh bool) []Act {
	r := g.nodes[f.Node]
	if m := r.mark; m != nil && (m.By != Policy || !fresh && !g.renewable(now, m)) {
		return nil
	}
	reason := g.reason(r, f)
	if reason == "" {
		return nil
	}
	m := Mark{
		Node: f.Node, Kind: f.Kind, Aspect: f.Aspect, Reason: reason, Evidence: f.Text, Run: f.Run, Since: now,
		Until: now.Add(g.cfg.Expiry), By: Policy,
	}
	if g.mass(f) {
		return g.holdMass(now, m)
	}
	if r.mark != nil {
		return []Act{g.renew(r, m)}
	}
	if why := g.breaker(now, f.Run); why != "" {
		return g.hold(r, m, why)
	}
	g.made = append(g.made, now)
	g.set(r, m)
	return []Act{{Do: Apply, Mark: m, Run: m.Run, Text: m.line()}}
}

// renewable reports whether a mark of the policy was renewed so long ago that a repeated finding renews it. Repetitions
// are not reported each time, but the mark may not expire meanwhile.
func (g *Registry) renewable(now time.Time, m *Mark) bool {
	return now.Sub(m.Until.Add(-g.cfg.Expiry)) >= min(sameWithin, g.cfg.Expiry/2)
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
	n, mass := 0, g.mass(f)
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

// renew has a mark of the policy last longer. Its beginning and its run stay.
func (g *Registry) renew(r *record, m Mark) Act {
	m.Since, m.Run = r.mark.Since, r.mark.Run
	m.Until = later(m.Until, r.mark.Until)
	r.mark = &m
	return Act{Do: Apply, Mark: m, Run: m.Run, Text: m.line()}
}

// set marks a machine that has no mark.
func (g *Registry) set(r *record, m Mark) {
	r.mark, r.held = &m, nil
	g.marked[r.name] = r
	if m.By == Policy {
		g.marks[m.Run]++
	}
}

// unset removes the mark of a machine that has one.
func (g *Registry) unset(r *record) Mark {
	m := *r.mark
	r.mark = nil
	delete(g.marked, r.name)
	if m.By != Policy {
		return m
	}
	if g.marks[m.Run]--; g.marks[m.Run] == 0 {
		delete(g.marks, m.Run)
	}
	return m
}

// mass reports whether a finding is one of those about more than half of a run's machines.
func (g *Registry) mass(f Finding) bool {
	j := g.runs[f.Run]
	return j != nil && j.blamed[f.Kind] >= 2 && 2*j.blamed[f.Kind] > len(j.members)
}

// holdMass holds a mark back, and removes those that earlier findings of the same mass verdict have made.
func (g *Registry) holdMass(now time.Time, m Mark) (acts []Act) {
	j := g.runs[m.Run]
	why := fmt.Sprintf("%d of %d nodes of the run are blamed at once: it is not they that are broken", j.blamed[m.Kind],
		len(j.members))
	for _, r := range g.sortedMarks() {
		o := r.mark
		if o.By == Policy && o.Run == m.Run && o.Kind == m.Kind && !o.Since.Before(now.Add(-g.cfg.MassWithin)) {
			was := g.unset(r)
			r.held = &Held{Mark: was, Why: why}
			acts = append(acts, Act{Do: Remove, Mark: was, Run: was.Run, Text: why})
		}
	}
	if r := g.nodes[m.Node]; r.mark == nil {
		acts = append(acts, g.hold(r, m, why)...)
	}
	return acts
}

func (g *Registry) sortedMarks() []*record {
	return slices.SortedFunc(maps.Values(g.marked), func(a, c *record) int { return strings.Compare(a.name, c.name) })
}

// hold records that a mark was held back. It is reported once for each kind of finding.
func (g *Registry) hold(r *record, m Mark, why string) []Act {
	told := r.held != nil && r.held.Kind == m.Kind && r.held.Run == m.Run && r.held.Until.After(m.Since)
	r.held = &Held{Mark: m, Why: why}
	if told {
		return nil
	}
	return []Act{{Do: Hold, Mark: m, Run: m.Run, Text: Line(m.line() + "; not marked: " + why)}}
}

// breaker is why no other machine may be marked for a run now; "": one may.
func (g *Registry) breaker(now time.Time, run string) string {
	if j := g.runs[run]; run != "" && j != nil {
		if most := limit(g.cfg.JobShare, g.cfg.JobLeast, len(j.members)); g.marks[run] >= most {
			return fmt.Sprintf("%d nodes are marked for run %s already, the most of its %d", g.marks[run], run,
				len(j.members))
		}
	}
	g.forgetMade(now)
	if most := limit(g.cfg.ClusterShare, g.cfg.ClusterLeast, len(g.nodes)); len(g.made) >= most {
		return fmt.Sprintf("%d nodes were marked within %s already, the most of %d that are known", len(g.made),
			g.cfg.Window, len(g.nodes))
	}
	return ""
}

func limit(share float64, least, of int) int { return max(least, int(share*float64(of)+1e-9)) }

// forgetMade forgets marks that were made before the last Window.
func (g *Registry) forgetMade(now time.Time) {
	g.made = slices.DeleteFunc(g.made, func(t time.Time) bool { return now.Sub(t) >= g.cfg.Window })
}

// Failed records how an epoch of a run has ended: which machine was to blame, "" if none was. One that is to blame for
// Config.Repeats of the last Config.Of failures is suspect, which is a finding.
func (g *Registry) Failed(now time.Time, run, culprit, text string) []Act {
	now = stamp(now)
	if run == "" || checkRun(run) != nil || culprit != "" && CheckName(culprit) != nil {
		return nil
	}
	j := g.run(now, run)
	before := j.times(culprit)
	j.failures = append(j.failures, failure{culprit, now})
	j.failures = slices.Delete(j.failures, 0, max(0, len(j.failures)-g.cfg.Of))
	g.suspects = nil
	n := j.times(culprit)
	if culprit == "" || before >= g.cfg.Repeats || n < g.cfg.Repeats {
		return nil
	}
	return g.Find(now, Finding{Node: culprit, Run: run, Kind: Repeated, At: now,
		Text: fmt.Sprintf("to blame for %d of the last %d failures of the run; the last: %s", n, len(j.failures), text)})
}

// times is how often a machine was to blame.
func (j *job) times(culprit string) (n int) {
	for _, f := range j.failures {
		if f.Culprit == culprit {
			n++
		}
	}
	return n
}

// Suspect reports whether a machine is the culprit of many failures, so that a spare is preferred to it.
func (g *Registry) Suspect(node string) bool {
	if g.suspects == nil {
		g.suspects = map[string]bool{}
		for _, j := range g.runs {
			for _, f := range j.failures {
				if f.Culprit != "" && j.times(f.Culprit) >= g.cfg.Repeats {
					g.suspects[f.Culprit] = true
				}
			}
		}
	}
	return g.suspects[node]
}

// Passed records that a check of a machine has found some aspects of it sound. Findings about these are disproved, and
// a mark of the policy that has no other reason is removed. All findings stay on record.
func (g *Registry) Passed(now time.Time, node string, covered ...string) []Act {
	r := g.nodes[node]
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
	if r.mark == nil || r.mark.By != Policy || !disproved {
		return nil
	}
	if f, reason := g.rest(now, r); reason != "" {
		m := *r.mark
		if f.Text == m.Evidence && f.Kind == m.Kind && reason == m.Reason {
			return nil
		}
		m.Kind, m.Aspect, m.Reason, m.Evidence, m.Until = f.Kind, f.Aspect, reason, f.Text, f.At.Add(g.cfg.Expiry)
		r.mark = &m
		return []Act{{Do: Apply, Mark: m, Run: m.Run, Text: m.line()}}
	}
	m := g.unset(r)
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
	if by == "" || by == Policy {
		by = string(Operator)
	}
	if r.mark != nil {
		g.unset(r)
	}
	g.set(r, Mark{Node: node, Kind: Operator, Reason: Line(why), Since: now, Until: stamp(until), By: Line(by)})
	return []Act{{Do: Apply, Mark: *r.mark, Text: Line(fmt.Sprintf("marked by %s: %s", by, why))}}, nil
}

// Clear removes every mark of a machine and forgets its findings, on an operator's command. Known is false if there was
// nothing.
func (g *Registry) Clear(now time.Time, node, by, why string) (acts []Act, known bool) {
	now = stamp(now)
	for _, j := range g.runs {
		known = j.absolve(node) || known
	}
	g.suspects = nil
	r := g.nodes[node]
	if r == nil {
		return nil, known
	}
	known = known || r.mark != nil || r.held != nil || len(r.findings) > 0
	g.findings -= len(r.findings)
	r.findings, r.held, r.seen = nil, nil, now
	if r.mark != nil {
		m := g.unset(r)
		acts = []Act{{Do: Remove, Mark: m, Run: m.Run, Text: Line(fmt.Sprintf("cleared by %s: %s", by, why))}}
	}
	return acts, known
}

// absolve takes the blame from a machine; false: there was none.
func (j *job) absolve(node string) (known bool) {
	for i := range j.failures {
		if j.failures[i].Culprit == node && node != "" {
			j.failures[i].Culprit, known = "", true
		}
	}
	j.blames = slices.DeleteFunc(j.blames, func(o blame) bool { return o.Node == node })
	j.count()
	return known
}

// sweepEvery is the interval between sweeps.
const sweepEvery = time.Hour

// Tick removes marks that have expired, and forgets old records. It is due at Next.
func (g *Registry) Tick(now time.Time) (acts []Act) {
	now = stamp(now)
	for _, r := range g.sortedMarks() {
		g.bound(now, r.mark)
		if m := r.mark; !m.Until.IsZero() && !m.Until.After(now) {
			was := g.unset(r)
			acts = append(acts, Act{Do: Remove, Mark: was, Run: was.Run, Text: "the mark has expired"})
		}
	}
	if since := now.Sub(g.swept); !g.swept.IsZero() && (since >= sweepEvery || since < 0) {
		g.sweep(now)
	}
	return acts
}

// bound keeps a mark of the policy from lasting longer than it may, after a clock that was wrong.
func (g *Registry) bound(now time.Time, m *Mark) {
	if most := now.Add(g.cfg.Expiry); m.By == Policy && m.Until.After(most) {
		m.Until = most
	}
	if m.Since.After(now) {
		m.Since = now
	}
}

// sweep forgets old records. Times of a clock that was wrong become now.
func (g *Registry) sweep(now time.Time) {
	g.swept = now
	old := now.Add(-g.cfg.Keep)
	g.forgetMade(now)
	for i := range g.made {
		g.made[i] = earlier(g.made[i], now)
	}
	g.dropFindings(old)
	for name, j := range g.runs {
		j.sweep(now, old, g.cfg.MassWithin)
		if j.heard = earlier(j.heard, now); !j.heard.After(old) {
			g.dropRun(name)
		}
	}
	g.suspects = nil
	for _, r := range g.nodes {
		g.sweepNode(r, now, old)
	}
	if len(g.nodes)+len(g.runs) == 0 {
		g.swept = time.Time{}
	}
}

func (g *Registry) sweepNode(r *record, now, old time.Time) {
	for i := range r.findings {
		r.findings[i].At = earlier(r.findings[i].At, now)
	}
	if r.held != nil && !r.held.Until.After(now) {
		r.held = nil
	}
	r.seen = earlier(r.seen, now)
	if r.mark == nil && r.held == nil && len(r.findings) == 0 && r.in == 0 && !r.seen.After(old) {
		g.forget(r)
	}
}

func (j *job) sweep(now, old time.Time, mass time.Duration) {
	for i := range j.failures {
		j.failures[i].At = earlier(j.failures[i].At, now)
	}
	j.failures = slices.DeleteFunc(j.failures, func(f failure) bool { return !f.At.After(old) })
	for i := range j.blames {
		j.blames[i].At = earlier(j.blames[i].At, now)
	}
	j.expire(now.Add(-mass))
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
	for _, r := range g.marked {
		if u := r.mark.Until; !u.IsZero() && (next.IsZero() || u.Before(next)) {
			next = u
		}
	}
	return next
}
