package netcheck

// Picture shows the present state.
func (c *Check) Picture() Picture {
	p := Picture{Spec: c.cfg.Spec.String(), Phase: c.phase.String(), Round: c.round, Began: c.began, Ended: c.ended,
		Summary: c.results.summary(c.roster.open, c.began, c.ended), Nodes: []NodePicture{}, Pairs: []Pair{},
		Paths: c.results.paths}
	if c.results.cause != "" {
		p.Paths = append([]string{c.results.cause}, p.Paths...)
	}
	place := map[*node]int{}
	for _, n := range c.roster.nodes {
		if n.state == departed || n.state == expected && n.helper {
			continue
		}
		place[n] = len(p.Nodes)
		p.Nodes = append(p.Nodes, n.picture())
	}
	for _, s := range c.pairPhases {
		p.addPhase(s, place)
	}
	return p
}

func (n *node) picture() NodePicture {
	p := NodePicture{Node: n.Node, Open: n.state != decided, Verdict: n.verdict}
	if p.Open {
		p.Verdict.State = StateUndecided
		p.Verdict.Reason = "not decided yet"
	}
	return p
}

// addPhase adds the newest tests of every pair of a phase.
func (p *Picture) addPhase(s *pairPhase, place map[*node]int) {
	if p.Median == 0 {
		p.Median = float64(s.judge.rates.norms.main().mbps)
		p.Line = blameShare * p.Median
	}
	newest := map[[3]int]int{} // from, to, rail: index in p.Pairs
	for _, t := range s.judge.history.ended {
		for d := range t.ends {
			from, known := place[t.ends[d].n]
			to, knownToo := place[t.ends[1-d].n]
			if !known || !knownToo {
				continue
			}
			for _, x := range s.judge.rates.pairsOf(t, d, from, to) {
				key := [3]int{x.From, x.To, x.Rail}
				if i, again := newest[key]; again {
					p.Pairs[i] = x
					continue
				}
				newest[key] = len(p.Pairs)
				p.Pairs = append(p.Pairs, x)
			}
		}
	}
}

// pairsOf is one direction of a test, by rail.
func (r *rates) pairsOf(t *test, d, from, to int) []Pair {
	blank := Pair{From: from, To: to, Round: t.round, Torch: t.torch}
	if t.reach == fail {
		blank.Class = t.worst()
	}
	var pairs []Pair
	for i, y := range t.lanes[d] {
		if y.mbps == 0 || r.lanes[i].kind != "" {
			continue
		}
		x := blank
		x.Rail, x.Mbps = r.lanes[i].rail, float64(y.mbps)
		y.figures.show(&x)
		if x.Class == OK && y.result == fail {
			x.Class = Slow
			if y.lossy {
				x.Class = Lossy
			}
		}
		pairs = append(pairs, x)
	}
	if len(pairs) == 0 {
		pairs = append(pairs, blank)
	}
	return pairs
}
