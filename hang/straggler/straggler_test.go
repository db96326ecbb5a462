package straggler

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
)

const now0 = 1000 * time.Second

// crew are ranks of one node in steps of one collective each. Each rank's shim looks every half second, at its own
// time.
type crew struct {
	s       Finder
	rng     *rand.Rand
	now     time.Duration
	step    time.Duration
	late    []time.Duration // by how much each rank comes later to the collective than a quarter of a step
	ticks   []time.Duration
	samples []hang.Sample
	count   uint64
	begin   time.Duration
	ends    []time.Duration
}

func newCrew(seed uint64, step time.Duration, late ...time.Duration) *crew {
	c := &crew{rng: rand.New(rand.NewPCG(seed, 1)), now: now0, begin: now0, step: step, late: late}
	for r := range late {
		c.ticks = append(c.ticks, now0+time.Duration(c.rng.Int64N(int64(time.Second/2))))
		page := &hang.Page{Groups: []hang.GroupState{{ID: 1}}}
		c.samples = append(c.samples, hang.Sample{Worker: hang.Worker{Rank: 10 + r}, Page: page})
	}
	return c
}

// length of a step: everybody waits for the last one.
func (c *crew) length() time.Duration {
	worst := time.Duration(0)
	for _, l := range c.late {
		worst = max(worst, l)
	}
	return c.step + worst
}

func (c *crew) run(d time.Duration) {
	for end := c.now + d; c.now < end; {
		c.now += time.Second
		for r := range c.ticks {
			for c.ticks[r]+505*time.Millisecond <= c.now {
				c.ticks[r] += time.Second/2 + time.Duration(c.rng.Int64N(int64(5*time.Millisecond)))
			}
		}
		c.publish()
		c.s.Look(c.now, c.samples)
	}
}

func (c *crew) publish() {
	done := map[int]uint64{}
	for c.begin <= c.now {
		for r, tick := range c.ticks {
			if _, ok := done[r]; !ok && tick < c.begin+c.length() {
				seq := c.count
				if tick >= c.begin+c.step/4+c.late[r] {
					seq++
				}
				done[r] = seq
			}
		}
		if c.begin+c.length() > c.now {
			break
		}
		c.begin += c.length()
		c.count++
		c.ends = append(c.ends, c.begin)
	}
	for r := range c.samples {
		p := c.samples[r].Page
		if seq, ok := done[r]; ok && seq >= p.Groups[0].Seq {
			p.Groups[0].Seq = seq
		}
		p.Heartbeat, p.Steps, p.StepTimes = c.ticks[r], c.count, c.ends[max(0, len(c.ends)-192):]
	}
}

func TestStragglerIsFound(t *testing.T) {
	seed := seedOf(t)
	for _, step := range []time.Duration{9 * time.Millisecond, 100 * time.Millisecond, time.Second, 13 * time.Second} {
		c := newCrew(seed, step, 0, 0, step/2, 0)
		c.run(10 * time.Minute)
		f, found := c.s.Found()
		require.True(t, found, "steps of %s", step)
		require.Equal(t, 12, f.Rank, "steps of %s", step)
		require.Equal(t, hang.High, f.Confidence)
		require.InDelta(t, 1./3, f.Share, 0.2)
		require.Zero(t, f.Before, "they have always been so slow")
	}
}

func TestNobodyIsAStraggler(t *testing.T) {
	seed := seedOf(t)
	for i, step := range []time.Duration{9 * time.Millisecond, 100 * time.Millisecond, time.Second, 13 * time.Second} {
		c := newCrew(seed+uint64(i), step, 0, 0, 0, 0, 0, 0, 0, 0)
		c.run(20 * time.Minute)
		f, found := c.s.Found()
		require.False(t, found, "steps of %s: %+v", step, f)
	}
}

// Two that are equally late are no straggler, and neither is the only rank of a node.
func TestNobodyInParticular(t *testing.T) {
	seed := seedOf(t)
	c := newCrew(seed, time.Second, 0, time.Second/2, time.Second/2, 0)
	c.run(20 * time.Minute)
	_, found := c.s.Found()
	require.False(t, found)
	c = newCrew(seed, time.Second, time.Second/2)
	c.run(20 * time.Minute)
	_, found = c.s.Found()
	require.False(t, found)
}

func TestSlowerStepsHaveABegin(t *testing.T) {
	seed, named := seedOf(t), 0
	const jobs = 40
	for i := range uint64(jobs) {
		c := newCrew(seed+i, time.Second, 0, 0, 0, 0)
		c.run(20 * time.Minute)
		since := c.now
		c.late[1] = 340 * time.Millisecond
		c.run(10 * time.Minute)
		f, found := c.s.Found()
		require.True(t, found)
		require.InDelta(t, 1, f.Before.Seconds(), 0.01)
		require.InDelta(t, 1.34, f.Step.Seconds(), 0.01)
		require.InDelta(t, since.Seconds(), f.Since.Seconds(), 61)
		if f.Rank >= 0 { // looks may be in step with the workers, and see too little of who is late
			named++
			require.Equal(t, 11, f.Rank)
			line := f.Line(func(time.Duration) string { return "12:03" })
			require.Regexp(t, `^steps of 1s until 12:03, 1\.34s since; `+
				`rank 11 lags, on average 0\.\d\d collectives behind the fastest rank$`, line)
		}

		c.late[1] = 0
		c.run(20 * time.Minute)
		_, found = c.s.Found()
		require.False(t, found, "it is over")
	}
	require.Greater(t, named, jobs*3/4)
}

// Steps are slow for two windows, as in an evaluation, and again; or there is nothing yet to compare them with.
func TestStepsAreSlowForAWhile(t *testing.T) {
	c := newCrew(seedOf(t), time.Second, 0, 0)
	for range 3 {
		c.run(20 * time.Minute)
		c.late[1] = 340 * time.Millisecond
		c.run(2 * time.Minute)
		c.late[1] = 0
		c.run(time.Minute)
		_, found := c.s.Found()
		require.False(t, found)
	}
	c = newCrew(seedOf(t), time.Second, 0, 0)
	c.run(time.Minute)
	c.late[1] = 340 * time.Millisecond
	c.run(20 * time.Minute)
	f, _ := c.s.Found()
	require.Zero(t, f.Before)
}

// A rank that is far behind twice in a window, by its number or for its time, is not behind in most steps.
func TestRareLagsAreNoStraggler(t *testing.T) {
	type lag struct {
		collectives uint64
		time        time.Duration
	}
	for _, rare := range []lag{{10, 0}, {0, 10 * time.Second}} {
		var s Finder
		for look := range 1200 {
			workers := make([]hang.Sample, 3)
			for r := range workers {
				at, seq := time.Duration(look)*time.Second, uint64(100+look)
				if r == 1 && look%60 == 30 {
					at, seq = at+rare.time, seq-rare.collectives
				}
				workers[r] = hang.Sample{Worker: hang.Worker{Rank: r},
					Page: &hang.Page{Heartbeat: at, Groups: []hang.GroupState{{ID: 1, Seq: seq}}}}
			}
			s.Look(time.Duration(look)*time.Second, workers)
		}
		_, found := s.Found()
		require.False(t, found)
	}
}

// The numbers of one group are not compared with those of another.
func TestGroupsThatAreMadeAnew(t *testing.T) {
	c := newCrew(seedOf(t), 100*time.Millisecond, 0, 0, 0, 0)
	for id := range uint64(20) {
		c.count += 1e6
		for _, s := range c.samples {
			s.Page.Groups[0] = hang.GroupState{ID: 1 + id, Seq: c.count}
		}
		c.run(100 * time.Second)
		_, found := c.s.Found()
		require.False(t, found)
	}
}

func TestStragglerWhoseGroupIsGone(t *testing.T) {
	c := newCrew(seedOf(t), time.Second, 0, 0, time.Second/2)
	c.run(10 * time.Minute)
	_, found := c.s.Found()
	require.True(t, found)
	for i := range c.samples {
		c.samples[i].Page = &hang.Page{}
	}
	for i := range 300 {
		c.s.Look(c.now+time.Duration(i)*time.Second, c.samples)
	}
	f, found := c.s.Found()
	require.False(t, found, "%+v", f)
}

func TestStragglerWithoutPages(t *testing.T) {
	var s Finder
	for i := range 300 {
		s.Look(time.Duration(i)*time.Second, []hang.Sample{{Worker: hang.Worker{Rank: 1}}, {Worker: hang.Worker{Rank: 2}}})
	}
	for i := range 300 {
		s.Look(time.Duration(300+i)*time.Second, []hang.Sample{{Page: &hang.Page{}}})
	}
	_, found := s.Found()
	require.False(t, found)
}

// seedOf is that of HANG_SEED, or a new one. It is printed.
func seedOf(t *testing.T) uint64 {
	t.Helper()
	seed := rand.Uint64()
	if s, err := strconv.ParseUint(os.Getenv("HANG_SEED"), 10, 64); err == nil {
		seed = s
	}
	t.Logf("HANG_SEED=%d", seed)
	return seed
}
