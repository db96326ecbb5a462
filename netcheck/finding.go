package netcheck

import (
	"cmp"
	"fmt"
	"strings"
)

// words describes the findings of the tests of a phase.
type words struct {
	rates *rates
	torch bool
}

// name of the check that a phase is, in findings.
func (w words) name() string {
	if w.torch {
		return "torch"
	}
	return "netcheck"
}

// blame is the verdict of a member with a blamed capability.
func (p *reporter) blame(m *member) Verdict {
	if m.record(reach).blamed {
		return p.blameReach(m)
	}
	v := Verdict{State: StateFaulty, Excluded: true}
	lossy := false
	var kinds, reasons []string
	for f := capability(1); f < p.judge.rates.capabilities(); f++ {
		if !m.slow(f) {
			continue
		}
		x := p.words.rateFinding(m, f)
		v.Confidence = max(v.Confidence, confidence(m.record(f).weight, p.judge.size))
		v.Partners = max(v.Partners, p.judge.weigh(m, f).partners)
		v.Findings = append(v.Findings, x)
		lossy = lossy || x.Kind == "net.loss"
		kinds, reasons = append(kinds, x.Kind), append(reasons, x.Text)
	}
	v.Kind, v.Reason = joint(kinds), strings.Join(reasons, "; ")
	if !lossy && !p.spec.ExcludeStraggler {
		v.State, v.Excluded = StateSlow, false
		for i := range v.Findings {
			v.Findings[i].Severity = Warn
		}
	}
	return v
}

// joint is the kind of several findings together.
func joint(kinds []string) string {
	for _, k := range kinds {
		if k == "net.loss" {
			return k
		}
	}
	for _, k := range kinds {
		if k != kinds[0] {
			return "net.both"
		}
	}
	return kinds[0]
}

// blameReach is the verdict of a member that certified nodes do not reach.
func (p *reporter) blameReach(m *member) Verdict {
	e := p.judge.weigh(m, reach)
	class, peer, words := m.failures()
	kind := "net.both"
	if class == MTU {
		kind = "net.mtu"
	}
	text := fmt.Sprintf("%d tests with %d good nodes have failed: %s%s", e.fails, e.partners, class, words)
	return Verdict{State: StateFaulty, Kind: kind, Confidence: confidence(m.record(reach).weight, p.judge.size),
		Partners: e.partners, Excluded: true, Reason: text, Findings: []Finding{{Check: p.words.name(), Kind: kind,
			Severity: Fatal, Metric: "failed tests", Value: float64(e.fails), Threshold: partnersReach, Peer: peer,
			Text: text}}}
}

// failures returns the class with which m's tests failed most often; MTU comes before all others. It also returns the
// partner in the last of these tests, and m's own words, else its partner's, after a colon.
func (m *member) failures() (class Class, peer, words string) {
	count := map[Class]int{}
	for _, t := range m.tests {
		if t.reach != fail {
			continue
		}
		c := t.worst()
		if count[c]++; class == OK || c == MTU || class != MTU && count[c] >= count[class] {
			class, peer, words = c, t.other(m).n.name(), cmp.Or(t.text[t.end(m)], t.text[1-t.end(m)])
		}
	}
	if words != "" {
		words = ": " + words
	}
	return class, peer, words
}

// worst is the class of a failed test: that of the first end that has one, MTU before all.
func (t *test) worst() Class {
	if t.class[0] == OK || t.class[1] == MTU {
		return t.class[1]
	}
	return t.class[0]
}

// rateFinding describes a rate that is too low.
func (w words) rateFinding(m *member, f capability) Finding {
	x := Finding{Check: w.name(), Kind: "net.tx", Severity: Fatal, Entity: m.nic(w.rates.lanes[f.lane()]), Metric: "rate",
		Unit: "Mbit/s", Direction: "tx"}
	verb := "sends"
	if f.receives() {
		x.Kind, x.Direction, verb = "net.rx", "rx", "receives"
	}
	best, lossy := w.bestOf(m, f, &x)
	if lossy {
		x.Kind, x.Metric, x.Unit = "net.loss", "retransmissions", "share"
		x.Value, x.Threshold, x.Median = float64(best.figures[loss]), lossFail, 0
		x.Text = fmt.Sprintf("%s %s with %.2g of the segments lost, at most %.2g is right", x.Entity, verb, x.Value, lossFail)
		return x
	}
	x.Text = fmt.Sprintf("%s %s %.0f Mbit/s, %.2f of the median of %.0f", x.Entity, verb, x.Value, x.Value/x.Median,
		x.Median)
	return x
}

// bestOf puts the best sample of f, compared with its kind, into a finding: the best sample shows the node's capacity.
func (w words) bestOf(m *member, f capability, x *Finding) (best sample, lossy bool) {
	share := float32(0)
	for _, t := range m.tests {
		y := t.of(m, f)
		if y == nil || y.result == none {
			continue
		}
		usual := w.rates.normOf(f, t.cross)
		if y.mbps <= share*usual.mbps {
			continue
		}
		share = y.mbps / usual.mbps
		best, lossy = *y, y.lossy && share >= blameShare
		x.Value, x.Median, x.Threshold = float64(y.mbps), float64(usual.mbps), float64(blameShare*usual.mbps)
		x.Peer, x.Round = t.other(m).n.name(), t.round
	}
	return best, lossy
}

// nic is the name of the interface of a lane.
func (m *member) nic(l lane) string {
	name := fmt.Sprintf("rail %d", l.rail)
	if l.rail < len(m.n.NICs) {
		nic := m.n.NICs[l.rail]
		if name = nic.Name; l.kind != "" {
			name = cmp.Or(nic.HCA, name)
		}
	}
	return name + l.by()
}

// warnings are the findings about a member that do not blame it.
func (w words) warnings(m *member) (found []Finding) {
	for f := capability(1); f < w.rates.capabilities(); f++ {
		if r := m.record(f); r.best > 0 && r.best < warnShare {
			x := w.rateFinding(m, f)
			x.Severity, x.Threshold = Warn, warnShare*x.Median
			found = append(found, x)
		}
		for _, x := range measures {
			if y := x.warn(w, m, f); y != nil {
				y.Check, y.Severity, y.Entity = w.name(), Warn, m.nic(w.rates.lanes[f.lane()])
				y.Text = y.Entity + " " + y.Text
				found = append(found, *y)
			}
		}
	}
	return found[:min(len(found), MaxFindings)]
}

// pathsOf are the paths of m that are at fault, in words.
func (p *reporter) pathsOf(m *member) (paths []string) {
	for _, t := range m.tests {
		paths = append(paths, p.pathNames(t)...)
	}
	return paths
}

// pathNames are the directions in which the path of t has failed.
func (p *reporter) pathNames(t *test) (names []string) {
	a, b := t.ends[0].n.name(), t.ends[1].n.name()
	for _, f := range p.judge.pathCapabilities(t) {
		switch {
		case f == reach:
			return []string{fmt.Sprintf("%s - %s: %s", a, b, t.worst())}
		case f.receives():
			names = append(names, p.words.pathRate(t, f, b, a))
		default:
			names = append(names, p.words.pathRate(t, f, a, b))
		}
	}
	return names
}

func (w words) pathRate(t *test, f capability, from, to string) string {
	y := t.again.of(t.ends[0], f)
	l := w.rates.lanes[f.lane()]
	if y.lossy {
		return fmt.Sprintf("%s > %s: %.2g of the segments lost", from, to, y.figures[loss])
	}
	return fmt.Sprintf("%s > %s: %.2f of the median rate%s", from, to, y.mbps/w.rates.normOf(f, t.cross).mbps, l.by())
}

func (p *reporter) pathReason(m *member, paths []string) string {
	if len(paths) > 0 {
		return "the node is fine, a path is not: " + strings.Join(paths[:min(len(paths), 4)], ", ")
	}
	class, peer, words := m.failures()
	if class == OK {
		return "one of two nodes is slow; it takes a third one to say which"
	}
	return fmt.Sprintf("it and %s do not reach each other (%s%s); it takes a third node to say whose fault that is", peer,
		class, words)
}
