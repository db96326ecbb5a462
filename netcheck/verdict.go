package netcheck

import (
	"fmt"
	"math"
)

// Limits over all nodes, beyond which a verdict about one node is doubtful.
const (
	fabricShare = 0.02 // of the pairs that failed twice between good nodes
	slowShare   = 0.08 // of the directions of pairs that were slow twice; any disturbance makes a test slow
	fabricFrom  = 3    // such pairs
	badShare    = 0.08 // of the tests of good nodes that failed at all, tested again or not
	badFrom     = 6    // such tests
	massShare   = 0.05 // of the nodes blamed at once
	massFrom    = 3    // such nodes
	goodShare   = 1. / 3
	goodFrom    = 2 // certified nodes without which nobody is named
)

// decision holds for all nodes of a phase.
type decision struct {
	nameless string // why nobody can be named, or ""
	slow     string // the same of nodes that are only slow
	mass     string // why nobody is left out although named, or ""
}

// reporter words the verdicts of the members of a phase.
type reporter struct {
	judge    *judge
	words    words
	spec     Spec
	aborted  bool // the time of the phase was over
	helped   bool // helpers have taken part
	decision decision
}

// rule ends a phase: it blames members that were close to it, and then looks at all members together.
func (p *reporter) rule() {
	for _, m := range p.judge.members {
		p.judge.blameAtLast(m)
	}
	certified := 0
	for _, m := range p.judge.members {
		if m.certified(reach) || m.ofIsland() {
			certified++
		}
	}
	p.decision.nameless = p.nameless(certified)
	p.decision.mass = p.massive()
}

// nameless is the reason why no node can be named, or "".
func (p *reporter) nameless(certified int) string {
	j, h := p.judge, &p.judge.history
	paths, slow := j.countPaths()
	if j.slowFabric(slow) {
		p.decision.slow = fmt.Sprintf("fabric: %d of %d directions between good nodes were slow twice", slow, 2*h.pairs)
	}
	failed, all := j.amongGood()
	switch {
	case h.passed == 0 && len(h.ended) == 0, h.passed > 0 && j.size == 2:
		return ""
	case h.passed == 0:
		return fmt.Sprintf("not one of %d pairs has passed%s: %s", h.pairs, j.over(), h.commonest())
	case j.scarce(certified):
		return fmt.Sprintf("only %d of %d nodes have passed with another one%s: %s", certified, j.size, j.over(),
			h.commonest())
	case paths >= fabricFrom && float64(paths) > fabricShare*float64(h.pairs):
		return fmt.Sprintf("fabric: %d of %d pairs of good nodes have failed twice", paths, h.pairs)
	case failed >= badFrom && float64(failed) > badShare*float64(all):
		return fmt.Sprintf("fabric: %d of %d tests of good nodes have failed", failed, all)
	}
	return ""
}

// massive returns "", or the reason if so many nodes are blamed at once that they are hardly the cause.
func (p *reporter) massive() string {
	n := 0
	for _, m := range p.judge.members {
		if m.n.present() && p.judged(m).Excluded {
			n++
		}
	}
	if n < massFrom || float64(n) <= massShare*float64(p.judge.size) {
		return ""
	}
	return fmt.Sprintf("%d of %d nodes are blamed at once", n, p.judge.size)
}

// verdict of a member at the end of the phase. If others reach each other, a member that reaches nobody gets no
// workers. The supposed cause decides only whether the failure is held against the node.
func (p *reporter) verdict(m *member) Verdict {
	v := p.judged(m)
	v.Paired = p.paired(m)
	switch {
	case v.Excluded && p.decision.mass != "":
		v.Excluded = m.exposed(reach) || m.silents >= 2 || m.owns >= 2
		v.Again = v.Excluded
		v.Reason += "; it is not held against the node, as " + p.decision.mass
	case !v.Excluded && p.apart(m) && p.othersWork(m):
		v.Excluded, v.Again = true, true
		if v.State == StatePath {
			v.State = StateUndecided // of two, the other one has passed before
		}
	}
	return v
}

// apart reports whether a world with m cannot work: it reaches no others, or only its like. A helper has reached
// others in an earlier check, and stands until the opposite is proved.
func (p *reporter) apart(m *member) bool {
	return !m.record(reach).passed && !m.n.helper || p.judge.leaves.dead[m.leaf] || m.ofIsland()
}

// othersWork reports whether nodes reach each other without m. A newcomer is tested with nodes that have trained
// together; the rates of this run prove that tests between nodes can pass at all.
func (p *reporter) othersWork(m *member) bool {
	if !m.n.helper && p.helped && len(p.judge.rates.norms) > 0 {
		return true
	}
	good := 0
	for _, o := range p.judge.members {
		if o != m && o.certified(reach) && !p.judge.leaves.dead[o.leaf] {
			good++
		}
	}
	return good >= goodFrom
}

// paired reports whether m was really tested. It was not if all its partners failed. Failed tests alone do not renew
// the pass of a helper.
func (p *reporter) paired(m *member) bool {
	return m.certified(reach) || m.blamed() || p.judge.fails(m) > 0 && !m.n.helper
}

// judged is the verdict of a member without regard to how many others have the same.
func (p *reporter) judged(m *member) Verdict {
	switch {
	case m.silents >= 2:
		return p.convict(m, "net.silent", fmt.Sprintf("it did not report %d tests", m.silents))
	case m.owns >= 2:
		return p.convict(m, "host.nic", fmt.Sprintf("it could not do its own part in %d tests", m.owns))
	case p.judge.leaves.dead[m.leaf]:
		return Verdict{State: StateLeaf, Kind: "net.both", Confidence: 1,
			Reason: fmt.Sprintf("leaf %s is cut off from the others; its nodes reach each other", m.leaf)}
	case m.ofIsland():
		return Verdict{State: StateIsland, Kind: "net.both", Confidence: 1, Partners: m.mutual,
			Reason: "it reaches only some others: the network is partitioned"}
	case p.decision.nameless != "" && p.judge.size > 2 && (m.blamed() || !m.certified(reach) && p.judge.fails(m) > 0):
		return Verdict{State: StateUnattributable, Reason: p.decision.nameless}
	case p.decision.slow != "" && m.blamed() && !m.record(reach).blamed:
		return Verdict{State: StateUnattributable, Reason: p.decision.slow}
	case m.blamed():
		return p.blame(m)
	}
	return p.unblamed(m)
}

// unblamed is the verdict of a member that nothing is proved against.
func (p *reporter) unblamed(m *member) Verdict {
	paths, fails := p.pathsOf(m), p.judge.fails(m)
	switch {
	case len(paths) > 0 || p.judge.size == 2 && fails > 0:
		return Verdict{State: StatePath, Kind: "net.both", Confidence: 0.9, Partners: m.passes(),
			Findings: p.words.warnings(m), Reason: p.pathReason(m, paths)}
	case fails > 0 && (!m.certified(reach) || m.standing == open || m.standing == capped):
		return Verdict{State: StateUndecided, Kind: "net.both", Findings: p.words.warnings(m),
			Reason: fmt.Sprintf("%d of its %d tests have failed, which proves nothing%s", fails, len(m.tests), p.late())}
	}
	return p.fine(m)
}

// late is a note that the tests were cut short, or "".
func (p *reporter) late() string {
	if p.aborted {
		return fmt.Sprintf("; the time of the check, %s, was over", p.spec.Timeout)
	}
	return ""
}

// fine is the verdict of a member that has passed, or was not tested for another reason than its own fault.
func (p *reporter) fine(m *member) Verdict {
	v := Verdict{State: StateOK, Partners: m.passes(), Findings: p.words.warnings(m), Confidence: 1}
	if !m.certified(reach) {
		v.State, v.Confidence, v.Reason = StateNotTested, 0, unpaired+p.late()
	}
	return v
}

const unpaired = "it was not tested against others"

// blamed reports whether any capability of m is, and has not been seen to work since.
func (m *member) blamed() bool {
	for i := range m.records {
		if m.slow(capability(i)) {
			return true
		}
	}
	return m.record(reach).blamed
}

// slow reports whether a rate of m is blamed, and was good in no test, not even in a later one.
func (m *member) slow(f capability) bool {
	return f != reach && m.record(f).blamed && !m.record(f).passed
}

// confidence is the probability of a fault when one node of n is at fault beforehand.
func confidence(weight float32, n int) float64 {
	return 1 / (1 + math.Exp(math.Log(float64(max(n, 2)))-float64(weight)))
}

func (p *reporter) convict(m *member, kind, reason string) Verdict {
	return Verdict{State: StateFaulty, Kind: kind, Confidence: 1, Partners: len(m.tests), Excluded: true, Reason: reason,
		Findings: []Finding{{Check: p.words.name(), Kind: kind, Severity: Fatal, Text: reason}}}
}

// and adds to the verdict of an earlier phase that of a later one.
func (v Verdict) and(later Verdict) Verdict {
	later.Findings = append(append([]Finding(nil), v.Findings...), later.Findings...)
	later.Paired = later.Paired || v.Paired
	if later.State == StateOK && v.State == StatePath || later.State == StateNotTested && v.State != "" {
		later.State, later.Kind, later.Reason, later.Confidence = v.State, v.Kind, v.Reason, v.Confidence
		later.Excluded, later.Again = v.Excluded, v.Again
		later.Partners = max(later.Partners, v.Partners)
	}
	return later
}
