package hang

import (
	"iter"
	"slices"
)

// Picture shows the present state, with the evidence if that is set. It shares memory with the Incident: a caller that
// keeps it beyond the next Step must not write to memory that it refers to.
func (c *Incident) Picture(evidence bool) Picture {
	p, all := c.Pictures()
	if evidence {
		p.Evidence = slices.Collect(all)
	} else {
		p.World.Nodes, p.RAS = nil, nil
	}
	return p
}

// Pictures returns a Picture and its evidence apart; the evidence is made on demand.
func (c *Incident) Pictures() (p Picture, evidence iter.Seq[Evidence]) {
	p = Picture{
		Spec: c.cfg.Spec.String(), State: c.state, Epoch: c.world.Epoch, Suspicions: c.suspicions(),
		Suspecting: c.suspecting, Verdicts: slices.Clone(c.told), Restarts: c.trials.count, Slow: c.slow(),
		Collection: c.collect.ask.Seq, Collected: c.collect.ask.Seq != 0 && c.collect.until.IsZero(),
	}
	if c.state == StateIdle && !c.collect.until.IsZero() {
		p.State = StateCollecting
	}
	if c.file == nil {
		return p, slices.Values([]Evidence(nil))
	}
	c.file.picture(&p)
	return p, c.file.all()
}

func (c *Incident) suspicions() (out []nodeSuspicion) {
	for i := range c.crew {
		for _, s := range c.crew[i].suspicions {
			if len(out) == maxListed {
				return out
			}
			s.Age += c.now.Sub(c.crew[i].heard)
			out = append(out, nodeSuspicion{i, c.world.Nodes[i].Name, s})
		}
	}
	return out
}

func (c *Incident) slow() (out []nodeText) {
	for i := range c.crew {
		if text := c.crew[i].slow; text != "" && len(out) < maxListed {
			out = append(out, nodeText{i, c.world.Nodes[i].Name, text})
		}
	}
	return out
}

func (f *file) picture(p *Picture) {
	p.Incident, p.Epoch, p.World, p.Began, p.Since, p.Verdict = f.id, f.world.Epoch, f.world, f.began, f.since, f.verdict
	p.Asked, p.Answered = len(f.nodes), len(f.nodes)-f.missing
	for i := range f.nodes {
		d := &f.nodes[i]
		if !d.answered && !d.collected && f.world.Nodes[i].Slots > 0 && len(p.Silent) < maxListed {
			p.Silent = append(p.Silent, i)
		}
		if d.ras != "" && len(p.RAS) < maxRAS {
			p.RAS = append(p.RAS, nodeText{i, f.world.Nodes[i].Name, d.ras})
		}
	}
	p.Store = f.waits()
}
