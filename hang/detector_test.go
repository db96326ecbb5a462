package hang

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// lookout looks at one worker for some time, and says when it was suspected first.
type lookout struct {
	d       *Detector
	now     time.Duration
	period  time.Duration
	s       Sample
	started time.Duration
}

func newLookout(cfg DetectorConfig) *lookout {
	l := &lookout{d: NewDetector(cfg), now: now0, period: lookPeriod, started: now0}
	if cfg.Outside {
		l.period = outsidePeriod
	}
	l.s = Sample{Worker: Worker{Rank: 3, PID: 7, Start: 1}, Proc: Proc{State: 'S'}}
	if !cfg.Outside {
		l.s.Page = &Page{PID: 7, Start: 1, Created: now0, Groups: []GroupState{{ID: 1}}}
	}
	return l
}

// look is one look, after the worker has done something.
func (l *lookout) look(do func()) []Suspicion {
	l.now += l.period
	if do != nil {
		do()
	}
	s := l.s
	s.At = l.now
	if s.Page != nil {
		page := *s.Page
		s.Page = &page
	}
	return l.d.Look(l.now, []Sample{s}, nil)
}

// train does steps of some length for some time.
func (l *lookout) train(t *testing.T, step, time time.Duration) {
	t.Helper()
	for end := l.now + time; l.now < end; {
		found := l.look(func() { l.steps(step) })
		if step < firstRest || l.s.Page.Steps >= firstSteps {
			require.Empty(t, found, "at %s", l.now-l.started)
		}
	}
}

func (l *lookout) steps(step time.Duration) {
	p := l.s.Page
	for p.LastStep = max(p.LastStep, l.started); p.LastStep+step <= l.now; {
		p.LastStep += step
		p.Steps++
		p.Groups = []GroupState{{ID: 1, Seq: p.Steps, Since: p.LastStep}}
		p.StepTimes = append(p.StepTimes, p.LastStep)
	}
	p.StepTimes = p.StepTimes[max(0, len(p.StepTimes)-192):]
}

// untilSuspected is how long the worker can do that without being suspected.
func (l *lookout) untilSuspected(limit time.Duration, do func()) (time.Duration, Suspicion) {
	for begin := l.now; l.now-begin < limit; {
		if s := l.look(do); len(s) > 0 {
			return l.now - begin, s[0]
		}
	}
	return limit, Suspicion{}
}

func TestSuspicionFollowsThePace(t *testing.T) {
	for _, c := range []struct{ step, want time.Duration }{
		{50 * time.Millisecond, 10 * time.Second},
		{time.Second, 10 * time.Second},
		{5 * time.Second, 20 * time.Second},
		{30 * time.Second, 120 * time.Second},
		{100 * time.Second, 300 * time.Second},
	} {
		l := newLookout(DetectorConfig{})
		l.train(t, c.step, max(20*c.step, 60*time.Second))
		after, s := l.untilSuspected(time.Hour, nil)
		require.InDelta(t, c.want.Seconds(), after.Seconds(), c.step.Seconds()+1, "%s", s)
		require.Equal(t, c.want, s.Limit)
		require.Equal(t, 3, s.Rank)
		require.Empty(t, l.look(func() { l.steps(c.step) }), "it goes on")
	}
}

// One slow step in a hundred is normal; the limit is not what it takes.
func TestRareSlowStepsDoNotRaiseTheLimit(t *testing.T) {
	l := newLookout(DetectorConfig{})
	l.train(t, 100*time.Millisecond, time.Minute)
	l.started = l.now
	l.s.Page.LastStep = l.now + 9*time.Second // no steps for so long
	for range 9 {
		require.Empty(t, l.look(nil))
	}
	l.train(t, 100*time.Millisecond, time.Minute)
	_, s := l.untilSuspected(time.Minute, nil)
	require.Equal(t, 10*time.Second, s.Limit)
}

func TestTheUsersLimitWins(t *testing.T) {
	for _, outside := range []bool{false, true} {
		l := newLookout(DetectorConfig{Limit: 45 * time.Second, Outside: outside})
		after, s := l.untilSuspected(time.Hour, nil)
		require.Equal(t, 45*time.Second, s.Limit)
		require.InDelta(t, 45, after.Seconds(), 5)
	}
	l := newLookout(DetectorConfig{Limit: 3 * time.Second})
	after, _ := l.untilSuspected(time.Hour, nil)
	require.InDelta(t, 3, after.Seconds(), 1)
	l = newLookout(DetectorConfig{Limit: 45 * time.Second})
	after, _ = l.untilSuspected(time.Hour, func() { l.s.Proc.TreeCPU += time.Second })
	require.InDelta(t, 45, after.Seconds(), 1, "a compiler runs before the first steps")
}

// Before the first steps a worker may rest for a minute, and longer while it is at work.
func TestFirstSteps(t *testing.T) {
	l := newLookout(DetectorConfig{})
	after, _ := l.untilSuspected(time.Hour, nil)
	require.InDelta(t, 60, after.Seconds(), 2)

	l = newLookout(DetectorConfig{})
	after, _ = l.untilSuspected(time.Hour, func() {
		if l.now < now0+20*time.Minute {
			l.s.Proc.TreeCPU += time.Second // a compiler runs
		}
	})
	require.InDelta(t, 1260, after.Seconds(), 4)
}

// Without an optimizer the collectives tell the pace.
func TestNoOptimizer(t *testing.T) {
	l := newLookout(DetectorConfig{})
	for range 120 {
		require.Empty(t, l.look(func() {
			l.s.Page.Groups = []GroupState{{ID: 1, Seq: l.s.Page.Groups[0].Seq + 20,
				Since: l.now}}
		}))
	}
	after, _ := l.untilSuspected(time.Hour, nil)
	require.InDelta(t, 10, after.Seconds(), 2)
}

// A new phase is no standstill.
func TestPhasesAreProgress(t *testing.T) {
	l := newLookout(DetectorConfig{})
	l.train(t, 50*time.Millisecond, 10*time.Second)
	for i := range 60 {
		require.Empty(t, l.look(func() {
			if i%8 == 0 {
				l.s.Page.PhaseSince = l.now
			}
		}))
	}
}

// Time in which the observer did not run itself proves nothing.
func TestStarvedObserverDoubtsItself(t *testing.T) {
	l := newLookout(DetectorConfig{})
	l.train(t, 50*time.Millisecond, 10*time.Second)
	l.now += time.Minute
	require.Empty(t, l.look(nil))
	after, s := l.untilSuspected(time.Hour, nil)
	require.InDelta(t, 9, after.Seconds(), 2)
	require.InDelta(t, 59, s.Starved.Seconds(), 1)
	require.Greater(t, s.Age, time.Minute)
}

// A pause is the worker's own, with time in which the observer did not run or without.
func TestPausesOfTheObserverAreNoPauses(t *testing.T) {
	step := 50 * time.Millisecond
	l := newLookout(DetectorConfig{})
	l.train(t, step, 10*time.Second)
	l.now += time.Hour
	require.Empty(t, l.look(func() { l.steps(step) }))
	require.LessOrEqual(t, l.d.Paused(), 2*l.period, "it trained on meanwhile")

	for range 30 {
		l.look(nil)
	}
	l.now += time.Hour
	l.look(nil)
	l.s.Page.LastStep = l.now
	l.look(func() { l.steps(step) })
	require.InDelta(t, 33, l.d.Paused().Seconds(), 2)
}

// From outside the rest of the main thread is all that there is.
func TestOutsideSuspectsRest(t *testing.T) {
	l := newLookout(DetectorConfig{Outside: true})
	work := func() {
		l.s.Proc.Switches += 900
		l.s.Proc.MainCPU += time.Second
		l.s.Proc.CPU += time.Second
	}
	for range 20 {
		require.Empty(t, l.look(work))
	}
	after, s := l.untilSuspected(time.Hour, func() { l.s.Proc.Switches++ })
	require.InDelta(t, 10, after.Seconds(), 5)
	require.Contains(t, s.String(), "at rest")
	require.Empty(t, l.look(work), "it goes on")

	helped := func() { l.s.Proc.TreeCPU += time.Second }
	after, _ = l.untilSuspected(time.Hour, helped)
	require.Equal(t, time.Hour, after, "others work for it")
}

// A worker that often rests for long is not suspected when it does.
func TestOutsideLearnsRests(t *testing.T) {
	l := newLookout(DetectorConfig{Outside: true})
	suspicions := 0
	for i := range 2000 {
		suspicions += len(l.look(func() {
			if i%6 == 0 { // it rests for 25 s
				l.s.Proc.Switches += 900
			}
		}))
	}
	require.Less(t, suspicions, 20)
}

// A shim that is to be there but is not: nothing is known of steps, and rest is suspected later.
func TestNoPageAlthoughThereIsAShim(t *testing.T) {
	l := newLookout(DetectorConfig{})
	l.s.Page = nil
	after, _ := l.untilSuspected(time.Hour, nil)
	require.InDelta(t, 60, after.Seconds(), 2)
}

// A page that appears shows that the worker has come to PyTorch.
func TestAPageThatAppearsIsProgress(t *testing.T) {
	l := newLookout(DetectorConfig{})
	page := l.s.Page
	l.s.Page = nil
	for range 50 {
		require.Empty(t, l.look(nil))
	}
	l.s.Page = page
	after, _ := l.untilSuspected(time.Hour, nil)
	require.InDelta(t, 60, after.Seconds(), 2)
}

func TestStoreWaitsSuspectWhoIsMissing(t *testing.T) {
	d := NewDetector(DetectorConfig{})
	wait := func(key string, age time.Duration) []StoreWait { return []StoreWait{{Key: key, Age: age}} }
	workers := []Sample{{Worker: Worker{Rank: 4, PID: 1}, Proc: Proc{State: 'S'}}}
	require.Empty(t, d.Look(1, workers, wait("default_pg/0/0/rank_2", 9*time.Second)))
	found := d.Look(2, workers, wait("default_pg/0/0/rank_2", 10*time.Second))
	require.Len(t, found, 1)
	require.Equal(t, 2, found[0].Rank)
	require.Equal(t, 10*time.Second, found[0].Age)
	require.Equal(t, 4, d.Look(3, workers, wait("mine\x1b", time.Minute))[0].Rank)
	require.Empty(t, d.Look(4, nil, wait("mine", time.Minute)))
	patient := NewDetector(DetectorConfig{Limit: time.Minute})
	require.Empty(t, patient.Look(1, workers, wait("default_pg/0/0/rank_2", 59*time.Second)))
	for look := range time.Duration(80) {
		found = patient.Look(look*time.Second, workers, wait("default_pg/0/0/rank_4", time.Hour))
		require.Len(t, found, 1, "it is suspected once")
	}
	require.Equal(t, "its main thread is at rest", found[0].Why)
}

// A process that has got the pid of another one, or its rank, begins anew; one that has ended is not suspected.
func TestAnotherProcessBeginsAnew(t *testing.T) {
	l := newLookout(DetectorConfig{})
	l.train(t, 50*time.Millisecond, 10*time.Second)
	_, s := l.untilSuspected(time.Hour, nil)
	require.NotZero(t, s.Age)
	l.s.Start = 99
	require.Empty(t, l.look(nil))
	l.s.Proc.State = 0
	after, _ := l.untilSuspected(time.Hour, nil)
	require.Equal(t, time.Hour, after)
	require.Empty(t, l.d.Look(l.now+time.Second, nil, nil))
	require.Empty(t, l.d.workers)
}

// Only before its first steps, and only with a page, is a worker excused by being at work.
func TestWorkIsNoProgress(t *testing.T) {
	for name, c := range map[string]struct {
		cfg    DetectorConfig
		before func(*lookout)
		want   float64
	}{
		"it trains": {DetectorConfig{}, func(l *lookout) { l.train(t, time.Second, time.Minute) }, 10},
		"without an optimizer": {DetectorConfig{}, func(l *lookout) {
			for range 120 {
				l.look(func() { l.s.Page.Groups = []GroupState{{ID: 1, Seq: l.s.Page.Groups[0].Seq + 20, Since: l.now}} })
			}
		}, 10},
		"outside":        {DetectorConfig{Outside: true}, func(*lookout) {}, 10},
		"without a page": {DetectorConfig{}, func(l *lookout) { l.s.Page = nil }, 60},
	} {
		l := newLookout(c.cfg)
		c.before(l)
		after, _ := l.untilSuspected(time.Hour, func() { l.s.Proc.State = 'R' })
		require.InDelta(t, c.want, after.Seconds(), 5, name)
	}
}

func TestWhyAWorkerIsSuspected(t *testing.T) {
	for state, want := range map[byte]string{
		'T': "it is stopped", 't': "it is stopped", 'S': "no step and no collective",
	} {
		l := newLookout(DetectorConfig{})
		_, s := l.untilSuspected(time.Hour, func() { l.s.Proc.State = state })
		require.Equal(t, want, s.Why)
	}
}

// Each step counts once for the pace, however many pages show it.
func TestPaceOfAWorker(t *testing.T) {
	var w watched
	w.remember(&Page{StepTimes: []time.Duration{1, 2, 3}})
	w.remember(&Page{StepTimes: []time.Duration{2, 3, 7}})
	require.Equal(t, 3, w.steps.n)
	require.Equal(t, []time.Duration{1, 1, 4}, w.steps.ring[:3])
}

// A page whose times are nonsense neither hides a hang nor makes one.
func TestNonsenseInPages(t *testing.T) {
	l := newLookout(DetectorConfig{})
	l.train(t, 50*time.Millisecond, 10*time.Second)
	l.s.Page.LastStep, l.s.Page.StepTimes = 1<<62, []time.Duration{5, 1 << 62, -1 << 62, 3}
	after, s := l.untilSuspected(2*time.Hour, nil)
	require.LessOrEqual(t, after, 5*time.Minute+2*time.Second)
	require.Positive(t, s.Limit)
}

func TestLooksAreCheap(t *testing.T) {
	d := NewDetector(DetectorConfig{})
	workers := make([]Sample, 8)
	for i := range workers {
		workers[i] = Sample{Worker: Worker{Rank: i, PID: i + 1}, Proc: Proc{State: 'S'}}
		workers[i].Page = &Page{Steps: 9, Groups: make([]GroupState, 8), StepTimes: make([]time.Duration, 190)}
	}
	now := time.Second
	look := func() {
		now += time.Second
		for i := range workers {
			workers[i].Page.Steps++
		}
		d.Look(now, workers, nil)
	}
	look()
	require.Zero(t, testing.AllocsPerRun(100, look))
}
