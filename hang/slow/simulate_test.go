package slow

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"dlrover-run/hang"
	"dlrover-run/internal/job"
)

// kind is how a simulated step uses its collectives.
type kind int

const (
	single kind = iota // one at the end
	async              // 8 in the second half, as gradients become ready; all wait at the end
	sync               // 24, and all wait in each
)

// simJob is a job of nodes with ranks in synchronous steps, seen as the shims and the watchers see it.
type simJob struct {
	rng         *rand.Rand
	judge       Judge
	nodes, each int
	kind        kind
	step        float64                      // seconds of computing of a usual rank
	uneven      float64                      // standard deviation of that, by chance and step
	slow        func(rank, step int) float64 // factor of a rank's computing; nil: none
	extra       func(rank, step int) float64 // seconds before a rank's first collective; nil: none
	asleep      func(rank int) bool          // it is asleep, in its data, for the time beyond the usual
	spinning    bool                         // those that wait are not seen to
	halves      func(rank int) bool          // its optimizers step twice in a step
	other       func(*simJob) plan           // other steps than those of kind; nil: none

	now     float64
	steps   int
	ranks   []simRank
	nextRep []float64
	changes []Change
	at      []float64 // when
}

type simRank struct {
	looks hang.RankLooks
	due   float64 // the next look of the shim

	watched, busy, data float64
	recent              []float64
	sums                map[uint64]*hang.Looks
	begun               map[uint64]uint64
}

func newJob(seed uint64, nodes, each int, k kind, step float64) *simJob {
	s := &simJob{rng: rand.New(rand.NewPCG(seed, 7)), nodes: nodes, each: each, kind: k, step: step, uneven: 0.05}
	w := hang.World{Epoch: job.EpochID{Round: 1, Epoch: 1}}
	for n := range nodes {
		w.Nodes = append(w.Nodes, hang.WorldNode{Name: "n" + string(rune('a'+n%26)), RankBase: n * each, Slots: each})
		s.nextRep = append(s.nextRep, s.rng.Float64()*10)
	}
	s.judge.Begin(w)
	for r := range nodes * each {
		s.ranks = append(s.ranks, simRank{due: s.rng.Float64() / 10, looks: hang.RankLooks{Rank: r},
			sums: map[uint64]*hang.Looks{}, begun: map[uint64]uint64{}})
	}
	return s
}

// plan is one step: when each rank begins the collectives of its groups, how long the step takes, and for how long each
// rank is at work in it. Times are from its begin.
type plan struct {
	begins []map[uint64][]float64
	took   float64
	own    []float64
}

// own is how long a rank computes in the present step.
func (s *simJob) own(r int) float64 {
	c := s.step * max(0.2, 1+s.uneven*s.rng.NormFloat64())
	if s.slow != nil {
		c *= s.slow(r, s.steps)
	}
	if s.extra != nil {
		c += s.extra(r, s.steps)
	}
	return c
}

func (s *simJob) plan() (p plan) {
	if s.other != nil {
		return s.other(s)
	}
	for r := range s.ranks {
		p.own = append(p.own, s.own(r))
	}
	p.begins = make([]map[uint64][]float64, len(s.ranks))
	comm := s.step / 10
	if s.kind != sync {
		k := 1
		if s.kind == async {
			k = 8
		}
		for r := range p.begins {
			p.begins[r] = map[uint64][]float64{}
			for i := range k {
				p.begins[r][1] = append(p.begins[r][1], p.own[r]*(0.5+0.5*float64(i+1)/float64(k)))
			}
		}
		p.took = slices.Max(p.own) + comm
		return p
	}
	const k = 24
	for i := range k {
		last := 0.0
		for r := range p.begins {
			if i == 0 {
				p.begins[r] = map[uint64][]float64{}
			}
			b := p.took + p.own[r]/k
			p.begins[r][1] = append(p.begins[r][1], b)
			last = max(last, b)
		}
		p.took = last + comm/k
	}
	return p
}

// run makes steps until a time.
func (s *simJob) run(until float64) {
	for s.now < until {
		p := s.plan()
		for r := range s.ranks {
			x := &s.ranks[r]
			if len(x.recent) == 16 && p.took <= 1.5*slices.Max(x.recent) {
				x.watch(s, r, p.took, p.own[r])
			}
			for id, all := range p.begins[r] {
				x.begun[id] += uint64(len(all))
			}
			if s.halves != nil && s.halves(r) {
				x.step(s, p.begins[r], 0, p.took/2)
				x.step(s, p.begins[r], p.took/2, p.took)
			} else {
				x.step(s, p.begins[r], 0, p.took)
			}
		}
		s.now += p.took
		s.steps++
		for n := range s.nextRep {
			if s.now >= s.nextRep[n] {
				s.report(n)
				s.nextRep[n] = s.now + 9 + 2*s.rng.Float64()
			}
		}
	}
}

// step is what the shim makes of the time from one step of an optimizer to the next, from the begin of s.now on.
func (x *simRank) step(s *simJob, begins map[uint64][]float64, from, to float64) {
	took := to - from
	x.looks.Steps++
	var looks []float64
	for ; x.due < s.now+to; x.due += 0.05 + s.rng.Float64()/10 {
		if x.due >= s.now+from {
			looks = append(looks, x.due-s.now)
		}
	}
	usual := slices.Clone(x.recent)
	slices.Sort(usual)
	x.recent = append(x.recent, took)
	x.recent = x.recent[max(0, len(x.recent)-16):]
	if len(looks) == 0 || len(usual) < 16 || took > 1.5*usual[12] {
		return
	}
	for id, all := range begins {
		begun := func(until float64) (k float64) {
			for _, b := range all {
				if b >= from && b <= until {
					k++
				}
			}
			return k
		}
		total := begun(to)
		if total == 0 {
			continue
		}
		position, full := 0.0, 0.0
		for _, at := range looks {
			k := begun(at)
			position += (k/total - (at-from)/took) / float64(len(looks))
			if k == total {
				full += 1 / float64(len(looks))
			}
		}
		if x.sums[id] == nil {
			x.sums[id] = &hang.Looks{}
		}
		sum := x.sums[id]
		sum.Steps++
		sum.Positions += uint64(math.Round((1 + position) * (1 << 16)))
		sum.Squares += uint64(math.Round(position * position * (1 << 16)))
		sum.Full += uint64(math.Round(full * 64))
	}
}

// watch is what the watcher sees of a step.
func (x *simRank) watch(s *simJob, r int, took, own float64) {
	x.watched += took
	x.busy += own
	if s.spinning {
		x.busy += took - own
	}
	if s.asleep != nil && s.asleep(r) {
		x.busy -= max(own-s.step, 0)
		x.data += max(own-s.step, 0)
	}
	x.looks.Watched, x.looks.Busy, x.looks.Data = uint64(x.watched*1e3), uint64(x.busy*1e3), uint64(x.data*1e3)
}

func (s *simJob) report(n int) {
	sum := hang.Summary{StepTime: time.Duration(s.step * 1e9)}
	for r := n * s.each; r < (n+1)*s.each; r++ {
		l := s.ranks[r].looks
		for id, g := range s.ranks[r].sums {
			l.Groups = append(l.Groups, hang.GroupLooks{ID: id, Begun: s.ranks[r].begun[id], Looks: *g})
		}
		sum.Looks = append(sum.Looks, l)
	}
	at := time.Unix(0, 0).Add(time.Duration(s.now * 1e9))
	for _, c := range s.judge.Heard(at, n, &sum) {
		s.changes, s.at = append(s.changes, c), append(s.at, s.now)
	}
}
