package hang

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// pause is what one rank of a healthy job does for a while, again and again, and then goes on.
type pause struct {
	name  string
	does  activity
	lasts []time.Duration
	all   bool                     // ranks do it
	away  func(time.Duration) bool // launchers and the judge do not run so long after the pause has begun
	first bool                     // before the first step
}

func minutes(ns ...float64) (ds []time.Duration) {
	for _, n := range ns {
		ds = append(ds, time.Duration(n*float64(time.Minute)))
	}
	return ds
}

// pauses are innocent: none may end in a restart, or in a line of level ERROR. What does nothing at all lasts less than
// three minutes, what shows that it is at work less than ten.
func pauses() []pause {
	pdb := py(Frame{"cmdloop", "/usr/lib/python3.11/cmd.py", 126}, Frame{"interaction", "/usr/lib/python3.11/pdb.py", 358},
		Frame{"step", "/job/train.py", 30})
	sleeps := func(fn string) activity {
		return activity{state: 'S', wchan: "hrtimer_nanosleep", stack: inUser(fn)}
	}
	with := func(a activity, f func(a *activity)) activity { f(&a); return a }
	return []pause{
		{name: "an evaluation service is polled twice a second", lasts: minutes(9),
			does: with(sleeps("evaluate_by_service"), func(a *activity) { a.switches = 8 })},
		{name: "an evaluation service is polled every 5 s", lasts: minutes(9),
			does: with(sleeps("score"), func(a *activity) { a.switches, a.every = 1.2, 5*time.Second })},
		{name: "storage is asked again every 10 s", lasts: minutes(9),
			does: with(sleeps("retry"), func(a *activity) { a.switches, a.every = 0.6, 10*time.Second })},
		{name: "threads upload", lasts: minutes(9), does: activity{state: 'S', net: 50 << 10, wchan: "futex_wait_queue",
			stack: inUser("push")}},
		{name: "the main thread downloads", lasts: minutes(9), does: activity{state: 'S', net: 2 << 20, main: 0.02,
			switches: 300, wchan: "wait_woken", stack: inUser("fetch")}},
		{name: "a thread downloads slowly", lasts: minutes(9), does: activity{state: 'S', net: 20 << 10,
			wchan: "futex_wait_queue", stack: inUser("fetch")}},
		{name: "a child copies 300 kB/s", lasts: minutes(9), does: activity{state: 'S', childIO: 600_000, wchan: "do_wait",
			stack: inUser("sync_results")}},
		{name: "a child downloads", lasts: minutes(9), does: activity{state: 'S', net: 100 << 10, wchan: "do_wait",
			stack: inUser("sync_results")}},
		{name: "a child compiles", lasts: minutes(9), does: activity{state: 'S', cpu: 1, wchan: "do_wait",
			stack: inUser("make_kernels")}},
		{name: "a child checks slowly", lasts: minutes(9), does: activity{state: 'S', cpu: 0.07, wchan: "pipe_read",
			stack: inUser("verify")}},
		{name: "torch compiles", does: *compiling, lasts: minutes(9)},
		{name: "writes to slow storage", lasts: minutes(9), does: activity{state: 'D', io: 3 << 20, every: 3 * time.Second,
			stack: inUser("dump_results")}},
		{name: "a checkpoint to storage that blocks", does: *uploading, lasts: minutes(9)},
		{name: "tokenises", lasts: minutes(4.5), does: activity{state: 'R', main: 0.95, switches: 20,
			stack: inUser("encode_corpus")}},
		{name: "tokenises with threads", lasts: minutes(9), does: activity{state: 'S', other: 3, wchan: "futex_wait_queue",
			stack: inUser("encode_corpus")}},
		{name: "pdb", lasts: minutes(30), does: activity{state: 'S', wchan: "n_tty_read", stack: pdb}},
		{name: "gdb", lasts: minutes(30), does: activity{state: 't', stack: inUser("step")}},
		{name: "a licence server", lasts: minutes(2.5), does: activity{state: 'S', wchan: "wait_woken",
			stack: inUser("check_out")}},
		{name: "storage does not answer", lasts: minutes(2.8), does: *dead},
		{name: "garbage collection", lasts: minutes(1), does: activity{state: 'R', main: 1, stack: inUser("step")}},
		{name: "swaps", lasts: minutes(2), does: activity{state: 'D', main: 0.03, switches: 200, stack: inUser("step")}},
		{name: "stopped for 15 s", does: *halted, lasts: minutes(0.25)},
		{name: "stopped for a minute", does: *halted, lasts: minutes(1)},
		{name: "the host sleeps for an hour", does: *halted, lasts: minutes(60), all: true,
			away: func(d time.Duration) bool { return d < time.Hour }},
		{name: "the host sleeps during a pause", does: *asleep, lasts: minutes(60.5),
			away: func(d time.Duration) bool { return d > 15*time.Second && d < time.Hour }},
		{name: "launchers do not run", does: *computing, lasts: minutes(0.1), all: true,
			away: func(d time.Duration) bool { return d < 5*time.Minute }},
		{name: "the clock jumps", does: *stalled, lasts: minutes(4.5),
			away: func(d time.Duration) bool { return d > 11*time.Second && d < 4*time.Minute }},
		{name: "data comes after 30 s", does: *stalled, lasts: minutes(0.5)},
		{name: "data comes after two minutes", does: *stalled, lasts: minutes(2)},
		{name: "data is late again and again", does: *stalled, lasts: minutes(0.8, 0.8, 0.8, 0.8, 0.8, 0.8)},
		{name: "pauses become longer", does: *locked, lasts: minutes(2, 5, 14)},
		{name: "data loaders compute", does: *loading, lasts: minutes(9)},
		{name: "an evaluation of any name", does: *devSet, lasts: minutes(9)},
		{name: "a lock of another host", does: *locked, lasts: minutes(2.6)},
		{name: "a rate limit", does: *asleep, lasts: minutes(2.5)},
		{name: "a long poll", lasts: minutes(2.8),
			does: with(sleeps("wait_for_results"), func(a *activity) { a.switches, a.every = 0.1, 30*time.Second })},
		{name: "a slow network", does: *waiting0, all: true, lasts: minutes(1.6)},
		{name: "data is prepared before the first step", does: *computing, lasts: minutes(9), first: true},
		{name: "data is loaded before the first step", does: *loading, lasts: minutes(9), first: true},
	}
}

func (c *pause) play(outside bool, seed uint64) *play {
	rng := rand.New(rand.NewPCG(seed, 5))
	j := newJob(shape{step: 500 * time.Millisecond, noise: 0.1, ranks: 4, outside: outside}, rng)
	begun, next, at := time.Duration(0), 0, 300
	if c.first {
		at = 1
	}
	j.fault = func(step, rank int) (act, bool) {
		n := (step - at) / 300
		if step < at || (step-at)%300 != 0 || n >= len(c.lasts) || rank != 2 && !c.all {
			return act{}, false
		}
		begun, next = j.begin, at+300*n
		return act{&c.does, c.lasts[n]}, true
	}
	p := newPlay(j, ActRestart)
	if c.away != nil {
		p.deaf = func(now time.Duration) bool { return begun > 0 && j.number >= next && c.away(now-begun) }
	}
	p.run(func() bool { return j.number < at+300*len(c.lasts) && len(p.orders) == 0 })
	return p
}

// Whoever may go on is not restarted, whatever its functions are called.
func TestInnocentWaits(t *testing.T) {
	require.GreaterOrEqual(t, len(pauses()), 30)
	for _, c := range pauses() {
		for _, outside := range []bool{false, true} {
			name := map[bool]string{false: "auto", true: "outside"}[outside]
			t.Run(c.name+", "+name, func(t *testing.T) {
				p := c.play(outside, 1)
				for i, a := range p.told {
					t.Logf("%s %s: %s", p.at[i]-now0, a.Confidence, a.Line)
				}
				require.Empty(t, p.orders)
				require.Zero(t, p.decided(), "lines of level ERROR")
			})
		}
	}
}

// What does hang is told early and acted upon late: the later, the more of it is seen.
func TestHangsAreToldEarlyAndActedUponLate(t *testing.T) {
	polls := activity{state: 'S', wchan: "hrtimer_nanosleep", switches: 20, stack: inUser("poll")}
	copies := activity{state: 'S', childIO: 600_000, wchan: "do_wait", stack: inUser("sync_results")}
	for _, c := range []struct {
		name  string
		does  activity
		lasts []time.Duration // before
		acted time.Duration
	}{
		{"asleep", *asleep, nil, actLate},
		{"stopped", *halted, nil, actLate},
		{"in the kernel", *dead, nil, actLate},
		{"in a loop", *looping, nil, spinMax},
		{"polls", polls, nil, phaseMin},
		{"its child copies", copies, nil, phaseMin},
		{"asleep, after two minutes of that", *asleep, minutes(2), 6 * time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := (&pause{does: c.does, lasts: append(c.lasts, forever)}).play(false, 2)
			require.Len(t, p.orders, 1)
			last := p.job.begin
			require.InDelta(t, (c.acted + 2*time.Second).Seconds(), (p.acted - last).Seconds(), 6)
			decided := p.told[len(p.told)-1]
			require.True(t, decided.Decided)
			require.Equal(t, []int{2}, decided.Suspects)
			require.Equal(t, 1, p.decided())
		})
	}
}

// A finding that stays the same is told within two minutes, whatever the suspect does, with pages and without.
func TestSteadyFindingsAreTold(t *testing.T) {
	inC := inUser("solve")
	inC.Threads[0].Native = []Frame{{Func: "dgemm_kernel", File: "libblas.so.3"}}
	library := py(Frame{"match", "/usr/lib/python3.11/re/__init__.py", 166}, Frame{"clean", "/job/data.py", 3})
	for _, c := range []struct {
		name  string
		does  activity
		first bool
	}{
		{"an endless loop", *looping, false},
		{"C code spins", activity{state: 'R', main: 1, switches: 9, stack: inC}, false},
		{"a library call holds the interpreter", activity{state: 'R', main: 1, mute: true, stack: library}, false},
		{"a call sleeps with the interpreter locked", activity{state: 'S', mute: true, stack: inC}, false},
		{"threads compute", activity{state: 'S', other: 2, stack: inUser("wait_for_them")}, false},
		{"polls every 0.1 s", activity{state: 'S', main: 0.01, switches: 10, wchan: "hrtimer_nanosleep",
			stack: inUser("poll")}, false},
		{"a child copies for ever", activity{state: 'S', childIO: 1 << 20, wchan: "do_wait", stack: inUser("copy")}, false},
		{"asleep before the first steps", *asleep, true},
		{"a loop before the first steps", *looping, true},
		{"computes before the first steps", *computing, true},
		{"asleep", *asleep, false},
		{"stopped", *halted, false},
	} {
		for _, outside := range []bool{false, true} {
			p := (&pause{does: c.does, lasts: []time.Duration{forever}, first: c.first}).play(outside, 3)
			about := fmt.Sprintf("%s, outside %v: %v", c.name, outside, p.told)
			require.NotEmpty(t, p.told, about)
			require.Equal(t, []int{2}, p.told[0].Suspects, about)
			took := p.at[0] - p.job.begin
			t.Logf("%5.1f s: %s", took.Seconds(), p.told[0].Line)
			require.LessOrEqual(t, took, 2*time.Minute, about)
			if c.first && !outside {
				require.Equal(t, Low, p.told[0].Confidence, about)
			}
		}
	}
}
