package hang

import (
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/testkit"
)

// Simulated jobs, step by step: what their workers do at each moment is what the detector and the judge see. Healthy
// ones must not lead to a verdict, however long they write checkpoints, evaluate, compile or wait for data; one in
// which a rank stops to go on must lead to one that names it.

// act is what a rank does for a while.
type act struct {
	does *activity
	time time.Duration
}

// activity is how something looks from outside, per second, and on the stack.
type activity struct {
	name             string
	state            byte
	main, other, cpu float64 // cores: the main thread, other threads, descendants
	io, net, childIO uint64
	switches         float64
	every            time.Duration // I/O and switches come in bursts so far apart
	wchan            string
	stack            *Stacks
	mute             bool // the shim's thread does not run
}

var (
	computing = &activity{name: "computes", state: 'R', main: 0.95, other: 0.4, switches: 60,
		stack: py(Frame{"forward", site + "nn/modules/linear.py", 114}, Frame{"train", "/job/train.py", 20})}
	offloading = &activity{name: "waits for a kernel", state: 'S', main: 0.02, switches: 3, wchan: "futex_wait_queue",
		stack: py(Frame{"train", "/job/train.py", 21})}
	waiting0 = &activity{name: "waits", state: 'S', wchan: "futex_wait_queue", stack: inBackward()}
	writing  = &activity{name: "writes a checkpoint", state: 'R', main: 0.4, io: 300 << 20, switches: 200,
		stack: inUser("save_checkpoint")}
	uploading  = &activity{name: "waits for storage", state: 'D', switches: 1, stack: inUser("save_checkpoint")}
	evaluating = &activity{name: "evaluates", state: 'R', main: 0.9, switches: 50, stack: inUser("evaluate")}
	devSet     = &activity{name: "evaluates in a function of any name", state: 'R', main: 0.9, switches: 50,
		stack: py(Frame{"_call_impl", site + "nn/modules/module.py", 1501}, Frame{"run_dev_set", "/job/train.py", 44})}
	compiling = &activity{name: "compiles", state: 'S', cpu: 3, switches: 20,
		stack: py(Frame{"_compile", site + "_dynamo/convert_frame.py", 300}, Frame{"train", "/job/train.py", 20})}
	loading = &activity{name: "waits for its data loader's workers", state: 'S', cpu: 2, switches: 5, stack: inLoader()}
	stalled = &activity{name: "waits for data", state: 'S', wchan: "do_sys_poll", stack: inLoader()}
	halted  = &activity{name: "is stopped", state: 'T', mute: true, stack: inUser("train")}
	asleep  = &activity{name: "sleeps", state: 'S', wchan: "hrtimer_nanosleep", stack: inUser("hold")}
	locked  = &activity{name: "waits for a lock", state: 'S', wchan: "futex_wait_queue", stack: inUser("lock")}
	looping = &activity{name: "loops", state: 'R', main: 1, switches: 9, stack: inUser("spin")}
	dead    = &activity{name: "is blocked in the kernel", state: 'D', stack: inUser("fork")}
)

const forever = time.Duration(math.MaxInt64 / 4)

// shape is a kind of job.
type shape struct {
	name  string
	step  time.Duration
	noise float64 // sigma of the logarithm of a rank's time in a step
	ranks int
	// extra is what a rank does besides in a step, before it computes.
	extra func(rng *rand.Rand, step, rank int) (act, bool)
	// before the first step, and without an optimizer.
	first time.Duration
	stepless,
	outside bool
}

// simJob is a shape at work.
type simJob struct {
	shape
	rng    *rand.Rand
	world  World
	number int           // of the present step
	begin  time.Duration // and when it has begun
	end    time.Duration
	plans  [][]act // of each rank; afterwards it waits
	ends   []time.Duration
	procs  []Proc // at the begin of the step
	fault  func(step, rank int) (act, bool)
}

func newJob(s shape, rng *rand.Rand) *simJob {
	j := &simJob{shape: s, rng: rng, begin: now0, plans: make([][]act, s.ranks), procs: make([]Proc, s.ranks)}
	for n := range s.ranks / 2 {
		j.world.Nodes = append(j.world.Nodes, WorldNode{Name: "n" + strconv.Itoa(n), RankBase: 2 * n, Slots: 2})
	}
	j.plan()
	return j
}

// plan makes up the next step. It ends when all have come, and have exchanged what they have.
func (j *simJob) plan() {
	longest := time.Duration(0)
	for r := range j.plans {
		j.plans[r] = j.plans[r][:0]
		if a, ok := j.extraOf(r); ok {
			j.plans[r] = append(j.plans[r], a)
		}
		work := time.Duration(float64(j.step) * 0.8 * math.Exp(j.noise*j.rng.NormFloat64()))
		if j.number == 0 {
			work += j.first
		}
		j.plans[r] = append(j.plans[r], act{computing, work})
		sum := time.Duration(0)
		for _, a := range j.plans[r] {
			sum += a.time
		}
		longest = max(longest, sum)
	}
	j.end = j.begin + longest + j.step/5
}

func (j *simJob) extraOf(r int) (act, bool) {
	if j.fault != nil {
		if a, ok := j.fault(j.number, r); ok {
			return a, true
		}
	}
	if j.extra == nil {
		return act{}, false
	}
	return j.extra(j.rng, j.number, r)
}

// advance goes on to the step in which now is.
func (j *simJob) advance(now time.Duration) {
	for j.end <= now {
		for r := range j.procs {
			j.procs[r], _ = j.at(r, j.end)
		}
		j.ends = append(j.ends, j.end)
		j.begin = j.end
		j.number++
		j.plan()
	}
}

// at is what a rank has used until now, and what it is doing.
func (j *simJob) at(r int, now time.Duration) (Proc, *activity) {
	p, t := j.procs[r], j.begin
	for _, a := range j.plans[r] {
		d := min(a.time, now-t)
		a.does.use(&p, d)
		if t += d; t >= now && d < a.time {
			return p, a.does
		}
	}
	waiting0.use(&p, now-t)
	return p, waiting0
}

func (a *activity) use(p *Proc, d time.Duration) {
	p.State, p.WChan = a.state, a.wchan
	p.CPU += time.Duration((a.main + a.other) * float64(d))
	p.MainCPU += time.Duration(a.main * float64(d))
	p.TreeCPU += time.Duration(a.cpu * float64(d))
	if a.every > 0 {
		d = d / a.every * a.every
	}
	p.IO += uint64(float64(a.io) * d.Seconds())
	p.TreeIO += uint64(float64(a.io+a.childIO) * d.Seconds())
	p.Net += uint64(float64(a.net) * d.Seconds())
	p.Switches += uint64(math.Ceil(a.switches * d.Seconds()))
}

// sample is a look at a rank; page is where its page is put.
func (j *simJob) sample(r int, now time.Duration, page *Page) (Sample, *activity) {
	proc, does := j.at(r, now)
	w := Worker{Rank: r, Local: r % 2, PID: r + 1, Start: uint64((now0 - 9*time.Second) / clockTick)}
	s := Sample{Worker: w, At: now, Proc: proc}
	if j.outside {
		return s, does
	}
	entered := uint64(len(j.ends))
	groups := append(page.Groups[:0], GroupState{ID: 1, Seq: entered, Since: j.begin})
	if does == waiting0 {
		groups[0].Seq++
		groups[0].Since = max(j.begin, now-time.Second)
	}
	*page = Page{PID: r + 1, Start: s.Start, Rank: r, Created: now0, Heartbeat: now, Phase: PhaseTrain, Groups: groups}
	if does.mute {
		page.Heartbeat = j.begin
	}
	if n := len(j.ends); n > 0 && !j.stepless {
		page.Steps, page.LastStep, page.StepTimes = uint64(n), j.ends[n-1], j.ends[max(0, n-192):]
	}
	s.Page = page
	return s, does
}

func chance(rng *rand.Rand, p float64) bool { return rng.Float64() < p }

func between(rng *rand.Rand, from, to float64) time.Duration {
	return time.Duration((from + rng.Float64()*(to-from)) * float64(time.Second))
}

// always: checkpoints, evaluations, compilations and what else comes in any job.
func always(rng *rand.Rand, step, rank int) (act, bool) {
	switch {
	case rank == 0 && step%500 == 499:
		return act{[]*activity{writing, uploading}[step/500%2], between(rng, 5, 120)}, true
	case rank == 0 && step%2000 == 1000:
		return act{[]*activity{evaluating, devSet}[step/2000%2], between(rng, 60, 180)}, true
	case step%10000 == 7777:
		return act{compiling, between(rng, 20, 90)}, true
	case chance(rng, 2e-5):
		return act{halted, between(rng, 5, 15)}, true
	case chance(rng, 1e-4):
		return act{stalled, between(rng, 1, 15)}, true
	case chance(rng, 1e-4):
		return act{loading, between(rng, 5, 200)}, true
	}
	return act{}, false
}

func shapes() []shape {
	return []shape{
		{name: "50 ms steps", step: 50 * time.Millisecond, noise: 0.2, ranks: 8, extra: always},
		{name: "1 s steps", step: time.Second, noise: 0.1, ranks: 8, extra: always, first: 60 * time.Second},
		{name: "1 s steps, without optimizer", step: time.Second, noise: 0.1, ranks: 4, extra: always, stepless: true},
		{name: "0.3 s steps, wild", step: 300 * time.Millisecond, noise: 1.2, ranks: 4, extra: always},
		{name: "10 s steps", step: 10 * time.Second, noise: 0.1, ranks: 4, extra: always, first: 10 * time.Minute},
		{name: "50 ms steps, outside", step: 50 * time.Millisecond, noise: 0.2, ranks: 8, extra: always, outside: true},
		{name: "1 s steps, outside", step: time.Second, noise: 0.1, ranks: 4, extra: always, outside: true},
		{name: "10 s steps on devices, outside", step: time.Second, noise: 0.1, ranks: 4, outside: true,
			extra: func(rng *rand.Rand, step, rank int) (act, bool) {
				if a, ok := always(rng, step, rank); ok {
					return a, ok
				}
				return act{offloading, 9 * time.Second}, true
			}},
	}
}

func TestSimulatedHealthyJobs(t *testing.T) {
	steps := 50_000
	if testing.Short() {
		steps = 1_500
	}
	seed := testkit.Seed(t, "HANG_SEED")
	t.Logf("%-32s %9s %7s %10s %6s %6s %7s", "shape", "steps", "hours", "suspicions", "asked", "told", "decided")
	for i, s := range shapes() {
		j := newJob(s, rand.New(rand.NewPCG(seed, uint64(i))))
		p := newPlay(j, ActRestart)
		p.run(func() bool { return j.number < steps && len(p.orders) == 0 })
		t.Logf("%-32s %9d %7.1f %10d %6d %6d %7d", s.name, j.number, (j.begin - now0).Hours(), p.suspicions, p.asked,
			len(p.told), p.decided())
		for _, a := range p.told {
			require.False(t, a.Decided, "%s: %s", s.name, a.Line)
		}
		require.GreaterOrEqual(t, j.number, steps)
	}
}

// A rank that does not go on is named in time, whatever it does instead.
func TestSimulatedHangs(t *testing.T) {
	faults := []*activity{asleep, locked, stalled, halted, looping, dead}
	rounds := 30
	if testing.Short() {
		rounds = 3
	}
	rng := rand.New(rand.NewPCG(testkit.Seed(t, "HANG_SEED"), 7))
	var suspected, told []time.Duration
	for _, ranks := range []int{2, 4, 8} {
		for i := range rounds * len(faults) {
			f, at, culprit := faults[i%len(faults)], 20+rng.IntN(3000), rng.IntN(ranks)
			j := newJob(shape{step: 50 * time.Millisecond, noise: 0.2, ranks: ranks}, rng)
			j.fault = func(step, rank int) (act, bool) { return act{f, forever}, step == at && rank == culprit }
			p := newPlay(j, ActReport)
			p.run(func() bool { return p.now < now0+time.Hour && len(p.told) == 0 })
			last := j.ends[len(j.ends)-1]
			require.NotEmpty(t, p.told, "%s: rank %d of %d at step %d", f.name, culprit, ranks, at)
			require.Equal(t, []int{culprit}, p.told[0].Suspects, "%s: %s", f.name, p.told[0].Line)
			suspected, told = append(suspected, p.suspected-last), append(told, p.at[0]-last)
		}
	}
	slices.Sort(suspected)
	slices.Sort(told)
	n := len(told)
	t.Logf("%d hangs: suspected after %s (median), %s at most; told after %s (median), %s at most", n,
		suspected[n/2], suspected[n-1], told[n/2], told[n-1])
	require.LessOrEqual(t, suspected[n-1], 12*time.Second)
	require.LessOrEqual(t, told[n/2], 25*time.Second)
	require.LessOrEqual(t, told[n-1], 30*time.Second)
}
