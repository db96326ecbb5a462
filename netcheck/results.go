package netcheck

import (
	"fmt"
	"strings"
	"time"
)

// tallies counts the verdicts of a check.
type tallies struct{ ok, excluded, others int }

func (t *tallies) count(v Verdict, by int) {
	switch {
	case v.Excluded:
		t.excluded += by
	case v.State == StateOK:
		t.ok += by
	default:
		t.others += by
	}
}

// results are the verdicts and causes of a check.
type results struct {
	spec     Spec
	verdicts tallies
	paths    []string
	cause    string // why nobody is named, in words
}

// maxTold bounds the nodes of a check in the timeline; the picture has all.
const maxTold = 64

// settle makes v the verdict of n, with the results of its local checks, under the Spec. It reports whether the
// timeline gets it.
func (x *results) settle(n *node, v Verdict) bool {
	v = v.by(fatal(n.Findings))
	v.Findings = append(append([]Finding(nil), n.Findings...), v.Findings...)
	v.Findings = v.Findings[:min(len(v.Findings), MaxFindings)]
	v.Excluded = v.Excluded && !x.spec.ReportOnly
	v.Again = v.Again && v.Excluded
	v.Covered = n.cover(v)
	n.verdict = v
	if n.helper && v.State == StateNotTested {
		return false // it was not needed
	}
	x.verdicts.count(v, +1)
	return x.verdicts.excluded+x.verdicts.others <= maxTold && v.State != StateOK
}

// revise adds a later finding to a verdict, and reports whether its state is another one.
func (x *results) revise(n *node, f Finding) bool {
	was := n.verdict.State
	if !n.helper || was != StateNotTested {
		x.verdicts.count(n.verdict, -1)
	}
	n.verdict = n.verdict.Against(f)
	n.verdict.Excluded = n.verdict.Excluded && !x.spec.ReportOnly
	x.verdicts.count(n.verdict, +1)
	return n.verdict.State != was
}

// hear keeps the findings that no node is to blame for, for Picture.
func (x *results) hear(p *reporter) {
	switch {
	case p.decision.nameless != "":
		x.cause = p.decision.nameless
	case p.decision.slow != "":
		x.cause = p.decision.slow
	case p.decision.mass != "":
		x.cause = p.decision.mass
	}
	for _, t := range p.judge.history.ended {
		if len(x.paths) < MaxFindings {
			x.paths = append(x.paths, p.pathNames(t)...)
		}
	}
}

// summary is the state of a check in one line. open is the number of nodes that are not decided.
func (x *results) summary(open int, began, ended time.Time) string {
	if began.IsZero() {
		return "no check yet"
	}
	parts := []string{fmt.Sprintf("%d ok", x.verdicts.ok)}
	if x.verdicts.excluded > 0 {
		parts = append(parts, fmt.Sprintf("%d left out", x.verdicts.excluded))
	}
	if x.verdicts.others > 0 {
		parts = append(parts, fmt.Sprintf("%d not ok, but kept", x.verdicts.others))
	}
	if open > 0 {
		parts = append(parts, fmt.Sprintf("%d open", open))
	}
	if x.cause != "" {
		parts = append(parts, x.cause)
	}
	if !ended.IsZero() {
		parts = append(parts, fmt.Sprintf("in %.1f s", ended.Sub(began).Seconds()))
	}
	return strings.Join(parts, ", ")
}
