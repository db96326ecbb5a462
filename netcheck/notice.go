package netcheck

import "slices"

// notice takes the findings of a node about itself since its local checks, each once.
func (c *Check) notice(n *node, found []Finding) {
	for _, f := range found {
		if len(n.Findings) >= MaxFindings || f.In(n.Findings) {
			continue
		}
		n.Findings = append(slices.Clip(n.Findings), f)
		if n.state == decided && c.results.revise(n, f) {
			c.out.verdict(n)
		}
	}
}

// In reports whether one of found is about the same thing, even with other figures.
func (f Finding) In(found []Finding) bool {
	return slices.ContainsFunc(found, func(o Finding) bool {
		return o.Kind == f.Kind && o.Entity == f.Entity && o.Metric == f.Metric
	})
}

// Against is the verdict with f added: a node's finding about itself outweighs tests with others.
func (v Verdict) Against(f Finding) Verdict {
	v.Findings = append(slices.Clip(v.Findings[:min(len(v.Findings), MaxFindings-1)]), f)
	return v.by(&f)
}

// by is the verdict that a fatal finding of the node's own leads to; nil is none.
func (v Verdict) by(f *Finding) Verdict {
	if f != nil && f.Severity == Fatal && (!v.Excluded || v.Again) {
		v.State, v.Kind, v.Confidence, v.Reason = StateFaulty, f.Kind, 1, f.Text
		v.Excluded, v.Again, v.Covered = true, false, nil
	}
	return v
}
