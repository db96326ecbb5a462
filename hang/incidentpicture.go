package hang

import (
	"iter"
	"slices"
)

// Picture shows the present state, with the evidence if that is set. It shares memory with the Incident: a caller that
// keeps it beyond the next Step must not write to memory that it refers to.
func (in *Incident) Picture(evidence bool) Picture {
	p, all := in.Pictures()
	if evidence {
		p.Evidence = slices.Collect(all)
	} else {
		p.World.Nodes, p.RAS = nil, nil
	}
	return p
}

// Pictures returns a Picture and its evidence apart; the evidence is made on demand.
func (in *Incident) Pictures() (p Picture, evidence iter.Seq[Evidence]) {
	p = Picture{
		Spec: in.cfg.Spec.String(), State: in.state, Epoch: in.world.Epoch, Suspicions: in.suspicions.list(in.now, in.world),
		Suspecting: in.suspicions.count, Verdicts: slices.Clone(in.told.list), Restarts: in.progress.count,
		Slow: in.suspicions.slow(in.world), Pace: in.pace,
		Collection: in.asker.collect.ask.Seq, Collected: in.asker.collect.ask.Seq != 0 && in.asker.collect.until.IsZero(),
	}
	if in.state == StateIdle && !in.asker.collect.until.IsZero() {
		p.State = StateCollecting
	}
	if in.file == nil {
		return p, slices.Values([]Evidence(nil))
	}
	in.file.picture(&p)
	return p, in.file.all()
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
	p.Store, p.Arrivals = f.waits(), f.arrivals
}
