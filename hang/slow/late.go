package slow

import (
	"cmp"
	"math"
	"slices"

	"dlrover-run/hang"
	"dlrover-run/internal/stable"
)

// A rank is late by its mean position in two windows together, and in each of them.
const (
	sigmas     = 4.5  // by so many standard errors among 8 ranks, and more among many,
	sigmasEach = 1.5  // and in each window by so many
	leastLate  = 0.05 // of a step that it is late beyond 3 standard errors
	leastShare = 0.12 // of a step for which the others wait for it
	stillShare = 0.08 // likewise, of one that was found to be slow
	moreBusy   = 0.12 // of its time a rank is at work than one that waits for it
	maxLate    = 256  // late ranks that are compared with each other, those of the largest shares
	apart      = 4    // times as far behind the median as the first ones are ahead of it,
	apartFirst = 7    // and in the first two comparisons so many times
	otherRole  = 0.25 // by which the collectives of a step may differ between ranks that are compared
)

// place is a rank's position in the steps of one process group.
type place struct {
	w     *worker
	both  stat // of the last two windows
	each  [2]stat
	k     float64 // collectives in a step
	late  float64 // by how much it is behind the median of its group
	sigma float64 // the standard error of that
	share float64 // of a step for which the others wait for it, if it is late
	is    bool    // late
}

// worker is a rank in the last two windows.
type worker struct {
	rank, groupRank int
	looks           hang.RankLooks // of both windows
	places          map[uint64]*place
	worst           *place // where it is late, and the others wait the longest for it
	excused         bool
}

// stat are means over steps.
type stat struct {
	n, mean, sigma, full float64
}

func statOf(l hang.Looks) (s stat) {
	s.n = float64(l.Steps)
	if s.n == 0 {
		return s
	}
	s.mean = float64(l.Positions)/s.n/(1<<16) - 1
	square := float64(l.Squares) / s.n / (1 << 16)
	s.full = float64(l.Full) / s.n / (1 << 6)
	s.sigma = math.Sqrt(max(square-s.mean*s.mean, 1e-6/s.n) / s.n)
	return s
}

// workers are the ranks with two windows, and the places of each group.
func (j *Judge) workers() (all []*worker, groups map[uint64][]*place) {
	groups = map[uint64][]*place{}
	for i := range j.nodes {
		for k := range j.nodes[i].ranks {
			r := &j.nodes[i].ranks[k]
			w := &worker{rank: r.rank, groupRank: i, places: map[uint64]*place{}}
			a, b := &r.last[0], &r.last[1]
			w.looks = hang.RankLooks{Steps: a.Steps + b.Steps, Watched: a.Watched + b.Watched, Busy: a.Busy + b.Busy,
				Data: a.Data + b.Data}
			for _, g := range r.last[0].Groups {
				was := groupOf(&r.last[1], g.ID)
				if was == nil || g.Steps < leastSteps || was.Steps < leastSteps || w.looks.Steps == 0 {
					continue
				}
				p := &place{w: w, both: statOf(g.Looks.Plus(was.Looks)),
					each: [2]stat{statOf(g.Looks), statOf(was.Looks)},
					k:    float64(g.Begun+was.Begun) / float64(w.looks.Steps)}
				w.places[g.ID] = p
				groups[g.ID] = append(groups[g.ID], p)
			}
			all = append(all, w)
		}
	}
	return all, groups
}

// compare finds the late ranks of one group. The others are its median: as many ranks may be late as not.
//
// Where the first ones are far ahead of the median, ranks come one after the other, as stages of a pipeline do, and the
// last one is not slow. That order is a mean over comparisons.
func compare(ps []*place, least func(*worker) float64, o order) order {
	k := median(ps, func(p *place) float64 { return p.k })
	ps = slices.DeleteFunc(slices.Clone(ps), func(p *place) bool {
		other := math.Abs(p.k-k) > otherRole*k
		if other {
			delete(p.w.places, idOf(p))
		}
		return other
	})
	if len(ps) < 2 {
		return order{}
	}
	mean, ahead := front(ps)
	o.add(ahead)
	each := [2]float64{median(ps, func(p *place) float64 { return p.each[0].mean }),
		median(ps, func(p *place) float64 { return p.each[1].mean })}
	full := median(ps, func(p *place) float64 { return p.both.full })
	busy := median(ps, func(p *place) float64 { return p.w.busy() })
	err := median(ps, func(p *place) float64 { return p.both.sigma }) / math.Sqrt(float64(len(ps))/2)
	need := math.Sqrt(sigmas*sigmas + 2*math.Log(max(float64(len(ps))/8, 1)))
	for _, p := range ps {
		p.late, p.sigma = mean-p.both.mean, math.Hypot(p.both.sigma, err)
		agrees := p.late >= max(need*p.sigma, o.apart())
		for i := range each {
			agrees = agrees && each[i]-p.each[i].mean >= max(sigmasEach*p.each[i].sigma, p.late/4)
		}
		p.share = max(p.late, full-p.both.full)
		p.is = agrees && p.share >= least(p.w) && p.late >= leastLate+3*p.sigma
		// Where ranks wait in each of many collectives, they are never far from each other: then the waits are seen.
		if hidden := min(p.w.busy()-busy, p.late*k); agrees && hidden > p.share && hidden >= least(p.w) {
			p.share, p.is = hidden, true
		}
	}
	return o
}

// order is by how much the first ones of a group are ahead of its median.
type order struct {
	mean float64
	n    int // comparisons
}

func (o *order) add(ahead float64) {
	o.n++
	o.mean += (ahead - o.mean) / float64(min(o.n, 4))
}

// apart is how far behind the median a rank must be.
func (o *order) apart() float64 {
	if o.n <= 2 {
		return apartFirst * o.mean
	}
	return apart * o.mean
}

func idOf(p *place) uint64 {
	for id, q := range p.w.places {
		if q == p {
			return id
		}
	}
	return 0
}

// front is the median position, and by how much the first ones are ahead of it.
func front(ps []*place) (mean, order float64) {
	all := sorted(ps, func(p *place) float64 { return p.both.mean })
	mean = all[len(all)/2]
	return mean, all[len(all)*9/10] - mean
}

// median of an even number is the higher one.
func median[T any](list []T, of func(T) float64) float64 { return sorted(list, of)[len(list)/2] }

func sorted[T any](list []T, of func(T) float64) []float64 {
	all := make([]float64, len(list))
	for i, p := range list {
		all[i] = of(p)
	}
	slices.Sort(all)
	return all
}

// busy is the share of its time in which it was at work, or at its data.
func (w *worker) busy() float64 {
	return float64(w.looks.Busy+w.looks.Data) / max(float64(w.looks.Watched), 1)
}

func (w *worker) data() float64 { return float64(w.looks.Data) / max(float64(w.looks.Watched), 1) }

// culprits are the late ranks that wait for no other late one.
func culprits(all []*worker) (found []*worker) {
	for _, w := range all {
		for _, p := range w.places {
			if p.is && (w.worst == nil || p.share > w.worst.share) {
				w.worst = p
			}
		}
		if w.worst != nil && !w.onTime() {
			found = append(found, w)
		}
	}
	stable.Sort(found, func(a, b *worker) int { return -cmp.Compare(a.worst.share, b.worst.share) })
	found = found[:min(len(found), maxLate)]
	for _, w := range found {
		w.excused = slices.ContainsFunc(found, func(o *worker) bool { return o != w && w.waitsFor(o) })
	}
	return slices.DeleteFunc(found, func(w *worker) bool { return w.excused })
}

// onTime reports whether the rank is certainly not late in another group than that where it is: there it has another
// part than the others, as stages of a pipeline have that end one after the other.
func (w *worker) onTime() bool {
	for _, p := range w.places {
		if p.sigma > 0 && p.late < 3*p.sigma && 6*p.sigma*p.k < w.worst.share {
			return true
		}
	}
	return false
}

// waitsFor reports whether a late rank is late because of another one: it is ahead of that in a group of both. Ranks of
// a pipeline may have no such group; then the one that rests more waits for the other.
func (w *worker) waitsFor(o *worker) bool {
	common := false
	for id, p := range w.places {
		q := o.places[id]
		if q == nil {
			continue
		}
		common = true
		if ahead := p.both.mean - q.both.mean; ahead > 3.5*math.Hypot(p.both.sigma, q.both.sigma) &&
			ahead*p.k > leastShare/2 {
			return true
		}
	}
	return !common && o.busy()-w.busy() > moreBusy
}
