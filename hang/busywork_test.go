package hang

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What a worker does while it rests is seen by looks; what comes once, or seldom, is none of it.
func TestWorkOfAWorkerThatRests(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(i int, p *Proc)
		want Work
	}{
		{"nothing", func(int, *Proc) {}, workNone},
		{"reads slowly", func(_ int, p *Proc) { p.IO += leastBytes; p.TreeIO += leastBytes }, workIO},
		{"hardly reads", func(_ int, p *Proc) { p.IO += leastBytes - 1; p.TreeIO += leastBytes - 1 }, workNone},
		{"writes a dump that was asked for", func(i int, p *Proc) {
			if i == 13 || i == 14 {
				p.IO, p.TreeIO = p.IO+1<<20, p.TreeIO+1<<20
			}
		}, workNone},
		{"writes every four seconds", func(i int, p *Proc) {
			if i%4 == 0 {
				p.IO, p.TreeIO = p.IO+1<<20, p.TreeIO+1<<20
			}
		}, workIO},
		{"receives", func(_ int, p *Proc) { p.Net += leastBytes }, workNet},
		{"keepalives", func(_ int, p *Proc) { p.Net += 200 }, workNone},
		{"a child reads", func(_ int, p *Proc) { p.TreeIO += leastBytes }, workChild},
		{"a child computes", func(_ int, p *Proc) { p.TreeCPU += 50 * time.Millisecond }, workChild},
		{"a child looks after something", func(_ int, p *Proc) { p.TreeCPU += 10 * time.Millisecond }, workNone},
		{"the worker below a wrapper computes", func(_ int, p *Proc) {
			p.CPU, p.TreeCPU = p.CPU+50*time.Millisecond, p.TreeCPU+50*time.Millisecond
		}, workNone},
		{"wakes up", func(_ int, p *Proc) { p.Switches += leastWakes }, workWakes},
		{"wakes up every 16 s", func(i int, p *Proc) {
			if i%wakeOften == 0 {
				p.Switches += leastWakes
			}
		}, workWakes},
		{"looks at a queue every 5 s", func(i int, p *Proc) {
			if i%5 == 0 {
				p.Switches += leastWakes - 1
			}
		}, workNone},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLookout(DetectorConfig{})
			l.train(t, 50*time.Millisecond, 10*time.Second)
			for i := range 40 {
				l.look(func() { c.do(i, &l.s.Proc) })
			}
			require.Equal(t, c.want, l.d.Work(3))
			l.look(func() { l.steps(time.Second) })
			require.Equal(t, workNone, l.d.Work(3), "it goes on")
			require.Equal(t, workNone, l.d.Work(99))
		})
	}
}

// What was done long before says nothing of now.
func TestWorkIsForgotten(t *testing.T) {
	l := newLookout(DetectorConfig{})
	l.train(t, 50*time.Millisecond, 10*time.Second)
	for range 60 {
		l.look(func() { l.s.Proc.Net += 1 << 20 })
	}
	for range 2 * busyLooks {
		l.look(nil)
	}
	require.Equal(t, workNone, l.d.Work(3))
}

// A run learns how long it may pause. What comes before the first steps, or while nobody looks, is no pause.
func TestPausesAreLearned(t *testing.T) {
	l := newLookout(DetectorConfig{})
	rest := func(seconds int) {
		for range seconds {
			l.look(nil)
		}
		l.look(func() { l.started = l.now; l.s.Page.LastStep = 0; l.steps(time.Second); l.s.Page.Steps++ })
	}
	rest(50)
	require.Zero(t, l.d.Paused())
	for range firstSteps {
		rest(0)
	}
	rest(70)
	require.InDelta(t, 71, l.d.Paused().Seconds(), 1)
	rest(20)
	require.InDelta(t, 71, l.d.Paused().Seconds(), 1)
	l.look(nil)
	l.now += time.Hour
	rest(30)
	require.InDelta(t, 71, l.d.Paused().Seconds(), 1)
}

// Without an optimizer collectives tell what is no preparation any more; with one the first steps do.
func TestPausesWithoutAnOptimizer(t *testing.T) {
	for steps, want := range map[uint64]float64{0: 31, 1: 1} {
		l := newLookout(DetectorConfig{})
		l.s.Page.Steps = steps
		collective := func() { l.s.Page.Groups = []GroupState{{ID: 1, Seq: l.s.Page.Groups[0].Seq + 1}} }
		for range 120 {
			l.look(collective)
		}
		for range 30 {
			l.look(nil)
		}
		l.look(collective)
		require.InDelta(t, want, l.d.Paused().Seconds(), 1, "%d steps", steps)
	}
}
