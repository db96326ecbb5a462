package slow

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/testkit"
)

// within is the time in which a slow rank must be named: 60 s or 20 steps, and that of a report.
func within(step float64) float64 { return max(60, 20*step) + 11 }

// at makes a rank slower by a factor from a step on.
func at(from int, factor float64, ranks ...int) func(int, int) float64 {
	return func(rank, n int) float64 {
		if n >= from && slices.Contains(ranks, rank) {
			return factor
		}
		return 1
	}
}

// begin runs a healthy job to a step, and returns when that is.
func (s *simJob) begin(t *testing.T, from int) float64 {
	t.Helper()
	for s.steps < from {
		s.run(s.now + s.step/2)
	}
	require.Empty(t, s.changes)
	return s.now
}

func TestSlowRanksAreNamed(t *testing.T) {
	seed, all, right := testkit.Seed(t, "SLOW_SEED"), 0, 0
	for _, k := range []kind{single, async, sync} {
		for _, step := range []float64{0.02, 0.1, 1, 5} {
			for _, factor := range []float64{1.3, 2} {
				worst := 0.0
				for i := range uint64(5 / fewer()) {
					s := newJob(seed+i, 2, 4, k, step)
					from := int(max(60, 40*step) / step)
					s.slow = at(from, factor, 5)
					began := s.begin(t, from)
					s.run(began + within(step*factor))
					all++
					if len(s.changes) == 1 && s.changes[0].Ranks == "5" && s.changes[0].Doing == "computing" {
						right++
						worst = max(worst, s.at[0]-began)
					} else {
						t.Logf("%+v", s.changes)
					}
				}
				t.Logf("kind %d, steps of %g s, %gx: within %.0f s", k, step, factor, worst)
			}
		}
	}
	t.Logf("%d of %d", right, all)
	require.GreaterOrEqual(t, right, all*95/100)
}

// fewer is by how much a short test is smaller.
func fewer() int {
	if testing.Short() {
		return 5
	}
	return 1
}

// TestHealthyJobs is 50,000 steps of each kind with all that keeps ranks waiting without one of them being slow.
func TestHealthyJobs(t *testing.T) {
	seed := testkit.Seed(t, "SLOW_SEED")
	for _, k := range []kind{single, async, sync} {
		s := newJob(seed, 2, 4, k, 0.1)
		s.uneven = 0.25
		s.extra = func(rank, n int) float64 {
			switch {
			case n%500 == 499 && rank == 0:
				return 15 // evaluation
			case n%200 == 199:
				return 3 // a checkpoint
			case n%10 == 0 && rank == 0:
				return 0.03 // its log
			case n%2000 == 1000:
				return 30 * s.rng.Float64() // a compilation
			}
			return 0
		}
		s.halves = func(rank int) bool { return rank >= 4 }
		for s.steps < 50_000/fewer() {
			s.run(s.now + 10)
		}
		require.Empty(t, s.changes, "kind %d", k)
	}
}

func TestFindingsAreTakenBack(t *testing.T) {
	s := newJob(testkit.Seed(t, "SLOW_SEED"), 2, 4, async, 0.1)
	s.slow = func(rank, n int) float64 {
		if rank == 2 && n >= 600 && n < 2000 {
			return 1.5
		}
		return 1
	}
	s.run(400)
	require.Len(t, s.changes, 2)
	require.False(t, s.changes[0].Over)
	require.True(t, s.changes[1].Over)
	require.Empty(t, s.judge.Slowed())
}

// What slow ranks cost is what the job has made fewer steps.
func TestFewerSteps(t *testing.T) {
	s := newJob(testkit.Seed(t, "SLOW_SEED"), 2, 4, async, 0.1)
	s.slow = at(600, 1.5, 2)
	_, known := s.judge.Fewer()
	require.False(t, known, "nothing was compared yet")
	took := s.begin(t, 600)
	fewer, known := s.judge.Fewer()
	require.True(t, known)
	require.Zero(t, fewer)
	healthy := 600 / took
	s.run(s.now + 60)
	require.Len(t, s.judge.Slowed(), 1)
	began, steps := s.now, s.steps
	s.run(s.now + 60)
	slow := float64(s.steps-steps) / (s.now - began)
	fewer, _ = s.judge.Fewer()
	t.Logf("%.2f steps a second, then %.2f: %.2f fewer", healthy, slow, fewer)
	require.InDelta(t, healthy-slow, fewer, (healthy-slow)*0.4)
}

// The ranks of one node are named together.
func TestSlowNodes(t *testing.T) {
	s := newJob(testkit.Seed(t, "SLOW_SEED"), 2, 4, async, 0.1)
	s.slow = at(600, 1.5, 4, 5, 6, 7)
	s.begin(t, 600)
	s.run(s.now + 60)
	require.Len(t, s.changes, 1)
	f := s.judge.Slowed()[0]
	require.Equal(t, "4-7", f.Ranks)
	require.True(t, f.All)
	require.Equal(t, 1, f.GroupRank)
	var found []hang.Slowed
	for range 5 { // a single estimate is off by more in one of a thousand
		s.run(s.now + 60)
		found = append(found, s.judge.Slowed()...)
	}
	require.Len(t, found, 5)
	slices.SortFunc(found, func(a, b hang.Slowed) int { return cmp.Compare(a.Share, b.Share) })
	require.InDelta(t, 0.5/1.6, found[2].Share, 0.08)
	require.InDelta(t, 1/(1-0.5/1.6), found[2].Factor(), 0.2)
}

func TestSlowDataLoaders(t *testing.T) {
	s := newJob(testkit.Seed(t, "SLOW_SEED"), 2, 4, async, 0.1)
	s.slow, s.asleep = at(600, 1.5, 6), func(int) bool { return true }
	s.begin(t, 600)
	s.run(s.now + 60)
	require.Len(t, s.changes, 1)
	require.Equal(t, "6", s.changes[0].Ranks)
	require.Equal(t, "loading data", s.changes[0].Doing)
}

// What fills the time for which a rank is late counts, beyond that of the others.
func TestWhatASlowRankDoes(t *testing.T) {
	share := func(busy, data uint64) *worker {
		return &worker{worst: &place{share: 0.4}, looks: hang.RankLooks{Watched: 100, Busy: busy, Data: data}}
	}
	for name, c := range map[string]struct {
		late, other *worker
		want        string
	}{
		"stopped, its work is a device's":    {share(46, 0), share(3, 0), "computing"},
		"asleep, as the others":              {share(46, 0), share(27, 0), "asleep"},
		"all ask their devices all the time": {share(98, 0), share(99, 0), "computing"},
		"its batches come late":              {share(5, 40), share(5, 10), "loading data"},
		"all load data":                      {share(5, 40), share(5, 25), "asleep"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, doing([]*worker{c.late, c.other, c.other}, c.late))
		})
	}
}

// pipeline is two replicas of a pipeline of two stages, of two ranks each that split every layer: nodes are replicas.
// Stages have only point-to-point operations in common, which nobody counts.
func pipeline(s *simJob) (p plan) {
	const layers = 8
	for r := range 8 {
		p.own = append(p.own, s.own(r))
	}
	p.begins = make([]map[uint64][]float64, 8)
	ends := [2]float64{}
	for replica := range 2 {
		worst := 0.0 // of the stages, which wait for each other
		for r := replica * 4; r < replica*4+4; r++ {
			worst = max(worst, p.own[r])
		}
		ends[replica] = worst
	}
	p.took = max(ends[0], ends[1]) + s.step/10
	for r := range 8 {
		replica, stage := r/4, r/2%2
		pair, data := uint64(10+r/2), uint64(20+2*stage+r%2)
		p.begins[r] = map[uint64][]float64{data: {ends[replica]}}
		other := p.own[r^1]
		for i := range layers {
			// A layer begins when both of a pair have done the one before; the pipeline goes at the pace of its slowest.
			pace := ends[replica] / layers
			early := (max(p.own[r], other) - p.own[r]) / layers
			p.begins[r][pair] = append(p.begins[r][pair], pace*float64(i+1)-early)
		}
	}
	return p
}

func TestPipelinesBlameTheSlowStageAlone(t *testing.T) {
	for slow := range 8 {
		s := newJob(testkit.Seed(t, "SLOW_SEED"), 2, 4, single, 0.2)
		s.other = pipeline
		s.slow = at(300, 1.4, slow)
		s.begin(t, 300)
		s.run(s.now + 90)
		require.Len(t, s.judge.Slowed(), 1)
		require.Equal(t, strconv.Itoa(slow), s.judge.Slowed()[0].Ranks, "%+v", s.changes)
	}
}

// stages is a pipeline whose stages have nothing in common but one collective at the end, to which they come one after
// the other.
func stages(s *simJob) (p plan) {
	p.begins = make([]map[uint64][]float64, len(s.ranks))
	for r := range s.ranks {
		p.own = append(p.own, s.own(r))
		drain := 0.5 * s.step * float64(len(s.ranks)-1-r) / float64(len(s.ranks))
		p.begins[r] = map[uint64][]float64{1: {p.own[r] + drain}}
		p.took = max(p.took, p.own[r]+drain+s.step/10)
	}
	return p
}

func TestStagesThatEndOneAfterTheOtherAreNotSlow(t *testing.T) {
	for _, nodes := range []int{1, 2, 4} {
		s := newJob(testkit.Seed(t, "SLOW_SEED"), nodes, 4, single, 0.2)
		s.other = stages
		s.run(3000 / float64(fewer()))
		require.Empty(t, s.changes, "%d stages", 4*nodes)
	}
}

func TestReportsThatMakeNoSense(t *testing.T) {
	var j Judge
	s := &hang.Summary{Looks: []hang.RankLooks{{Rank: 7}}}
	require.Empty(t, j.Heard(time.Unix(0, 0), 0, s), "no world")
	j.Begin(hang.World{Nodes: []hang.WorldNode{{Slots: 1}, {RankBase: 1, Slots: 1}}})
	for i := range 1000 {
		sums := hang.Looks{Steps: rand.Uint64(), Positions: rand.Uint64(), Squares: rand.Uint64(), Full: rand.Uint64()}
		looks := []hang.RankLooks{{Rank: i%4 - 1, Watched: rand.Uint64(), Busy: rand.Uint64(), Groups: []hang.GroupLooks{
			{ID: 1, Looks: sums}, {ID: 1, Looks: sums}}}, {Rank: i % 2}, {Rank: 0}}
		j.Heard(time.Unix(int64(i), 0), i%5-2, &hang.Summary{Looks: looks})
	}
	require.LessOrEqual(t, len(j.nodes[0].ranks), 1)
}
