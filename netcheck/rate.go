package netcheck

import "slices"

// Rates are compared with the median of their own kind: absolute limits cause false alarms.
const (
	blameShare  = 0.75  // of the median: below it a rate is a fault
	warnShare   = 0.85  // a node's best share below it is a warning
	lossFail    = 0.005 // share of segments sent again: the rate alone does not show 1 % of loss
	lossFactor  = 4     // a network in which all lose as much has another problem than this node
	enoughRates = 6     // samples that make a median; with fewer the one of the run's last check is kept
)

// class of pairs within which rates are compared: a lane, in the leaf or across leaves.
type rateClass struct {
	lane  lane
	cross bool
}

// norm is the usual rate of a class.
type norm struct {
	mbps    float32 // medians; 0 is unknown
	figures figures
}

// norms of a phase, by class.
type norms map[rateClass]norm

// rates knows the usual rates of the lanes of a phase.
type rates struct {
	lanes []lane
	norms norms
}

// capabilities is the number of them that a member has.
func (r *rates) capabilities() capability { return capability(1 + 2*len(r.lanes)) }

// normOf is the norm of the samples of f.
func (r *rates) normOf(f capability, cross bool) norm {
	return r.norms[rateClass{r.lanes[f.lane()], cross}]
}

// main is the norm of the first rail, in the leaf where there are such pairs.
func (x norms) main() norm {
	if in := x[rateClass{}]; in.mbps > 0 {
		return in
	}
	return x[rateClass{cross: true}]
}

// measure takes the medians of the tests. allMet: every pair of members was tested.
func (r *rates) measure(tests []*test, members []*member, allMet bool) {
	by := map[rateClass][]*sample{}
	for _, t := range tests {
		for d := range t.lanes {
			for i := range t.lanes[d] {
				c := rateClass{r.lanes[i], t.cross}
				by[c] = append(by[c], &t.lanes[d][i])
			}
		}
	}
	for c, samples := range by {
		if _, known := r.norms[c]; known && len(samples) < enoughRates {
			continue
		}
		x := usual(samples)
		if best := median(r.bests(members, c)); best > 0 && (allMet || r.ofNodes(tests, c, best)) {
			x.mbps = best
		}
		r.norms[c] = x
	}
}

// ofNodes reports whether slow nodes explain which pairs are slow: it is not so where leaves that are not known have
// slow uplinks. Then many pairs are slow of nodes that are both fast with others.
func (r *rates) ofNodes(tests []*test, c rateClass, best float32) bool {
	lane, low, all := slices.Index(r.lanes, c.lane), 0, 0
	for _, t := range tests {
		for _, f := range []capability{sends(lane), receives(lane)} {
			a, b := t.ends[0], t.ends[1]
			x := t.of(a, f)
			if x == nil || t.cross != c.cross || min(a.best(f, c), b.best(f.counterpart(), c)) < blameShare*best {
				continue
			}
			if all++; x.mbps < blameShare*best {
				low++
			}
		}
	}
	return low*4 <= all
}

// bests are the rates that every member has reached at best, in both directions. Most pairs of a few slow nodes are
// slow, so that the median of the pairs would be theirs.
func (r *rates) bests(members []*member, c rateClass) (rates []float32) {
	lane := slices.Index(r.lanes, c.lane)
	for _, m := range members {
		rates = appendPositive(appendPositive(rates, m.best(sends(lane), c)), m.best(receives(lane), c))
	}
	return rates
}

func (m *member) best(f capability, c rateClass) (best float32) {
	for _, t := range m.tests {
		if x := t.of(m, f); x != nil && t.cross == c.cross && !x.cpu {
			best = max(best, x.mbps)
		}
	}
	return best
}

// usual is the norm of samples. Rates that a CPU has limited count only as long as there are no others.
func usual(samples []*sample) norm {
	var free, all []float32
	var others [len(figures{})][]float32
	for _, x := range samples {
		if x.mbps > 0 && !x.cpu {
			free = append(free, x.mbps)
		}
		all = appendPositive(all, x.mbps)
		for i, v := range x.figures {
			if v > 0 || measures[i].zero {
				others[i] = append(others[i], v)
			}
		}
	}
	if len(free) == 0 {
		free = all
	}
	n := norm{mbps: median(free)}
	for i := range others {
		n.figures[i] = median(others[i])
	}
	return n
}

func appendPositive(xs []float32, x float32) []float32 {
	if x > 0 {
		return append(xs, x)
	}
	return xs
}

// median sorts xs; of none it is 0, of an even number the mean of the middle two.
func median[T float32 | float64](xs []T) T {
	if len(xs) == 0 {
		return 0
	}
	slices.Sort(xs)
	n := len(xs)
	return (xs[(n-1)/2] + xs[n/2]) / 2
}

// judge compares the samples of a test with the usual rates.
func (r *rates) judge(t *test) {
	if t.reach != pass {
		return
	}
	for d := range t.lanes {
		for i := range t.lanes[d] {
			t.lanes[d][i].rate(r.norms[rateClass{r.lanes[i], t.cross}])
			r.note(t, d, i)
		}
	}
}

// rate decides about one sample. A CPU that was the limit is no evidence against a network.
func (x *sample) rate(usual norm) {
	x.lossy = x.figures[loss] > max(lossFail, lossFactor*usual.figures[loss])
	switch {
	case usual.mbps == 0 || x.mbps == 0:
		x.result = none
	case x.lossy, x.mbps < blameShare*usual.mbps && !x.cpu:
		x.result = fail
	case x.mbps < blameShare*usual.mbps:
		x.result = none
	default:
		x.result = pass
	}
}

// note enters a judged sample with both ends.
func (r *rates) note(t *test, d, i int) {
	x := &t.lanes[d][i]
	if x.result == none {
		return
	}
	share := x.mbps / r.norms[rateClass{r.lanes[i], t.cross}].mbps
	for _, y := range []*record{t.ends[d].recordOf(sends(i)), t.ends[1-d].recordOf(receives(i))} {
		y.best = max(y.best, share)
		y.passed = y.passed || x.result == pass && share >= warnShare // a rate near the limit certifies nobody
	}
}

// lane is the index of l, which is made if it is new.
func (r *rates) lane(l lane) int {
	if i := slices.Index(r.lanes, l); i >= 0 {
		return i
	}
	r.lanes = append(r.lanes, l)
	return len(r.lanes) - 1
}
