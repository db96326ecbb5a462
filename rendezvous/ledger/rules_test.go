package ledger

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

func TestALedgerChangesWithTheClassAlone(t *testing.T) {
	r := newRun(t)
	r.in(Waiting, 5*s)
	before := r.l.Clone()
	r.in(Waiting, 5*s)
	require.Equal(t, before, r.l)
	require.Equal(t, Times{Waiting: 10 * s}, r.l.Until(r.now).Times)
}

// A bill is closed when the workers go on, or the run ends.
func TestWhenABillIsClosed(t *testing.T) {
	for class, want := range map[Class]bool{Training: true, "": true, Waiting: false, Starting: false, Paused: false} {
		r := newRun(t)
		r.starts(8, 1*s)
		r.breaks(job.CauseFailure, "n1", 1*s, job.Progress{})
		require.True(t, r.l.Epoch.Broken)
		r.in(class, 1*s)
		require.Equal(t, want, r.l.Bill.Closed, class)
	}
}

// The first text of a cause stays; another kind or another node is another cause.
func TestBlame(t *testing.T) {
	for _, c := range []struct {
		blame job.Cause
		want  Bill
	}{
		{job.Cause{Kind: job.CauseFailure, Node: "n1", Text: "b"}, Bill{Cause: "worker-failure", Node: "n1", Text: "why"}},
		{job.Cause{Kind: job.CauseFailure, Node: "n2", Text: "b"}, Bill{Cause: "worker-failure", Node: "n2", Text: "b"}},
		{job.Cause{Kind: job.CauseLoss, Node: "n1", Text: "b"}, Bill{Cause: "node-loss", Node: "n1", Text: "b"}},
	} {
		r := newRun(t)
		r.starts(8, 1*s)
		r.breaks(job.CauseFailure, "n1", 0, job.Progress{})
		r.l.Blame(c.blame)
		require.Equal(t, c.want, r.l.Bill)
		require.Len(t, r.l.Rows, 2)
		require.Equal(t, 1, r.row(c.want.Cause).Count)
	}
}

// What the nodes of a world tell together, in any order, is what the class of its last time follows from.
func TestLastTimeOfAWorld(t *testing.T) {
	first := job.Progress{Step: 50, Stepping: true, Idle: 60 * s}
	for name, c := range map[string]struct {
		steps bool // the first step was reported
		told  []job.Progress
		stood time.Duration // -1: there was no step, so that all was the start
	}{
		"no launcher reports steps":        {false, []job.Progress{{}}, 0},
		"no step":                          {false, []job.Progress{{Stepping: true}}, -1},
		"one node knows of none":           {false, []job.Progress{{Stepping: true}, first}, 60 * s},
		"it is known that there was one":   {true, []job.Progress{{Stepping: true}}, 0},
		"the newest step counts":           {true, []job.Progress{first, {Step: 40, Idle: 30 * s}}, 30 * s},
		"no step, whatever its age":        {true, []job.Progress{first, {Stepping: true, Idle: 1}}, 60 * s},
		"a step of an age that is unknown": {true, []job.Progress{first, {Step: 50}}, 60 * s},
	} {
		r := newRun(t)
		r.l.Sealed(r.now, job.EpochID{}, 4)
		r.l.Pass(r.now, Training)
		if c.steps {
			r.l.Stepped(r.now, 0)
		}
		r.now = r.now.Add(100 * s)
		r.breaks(job.CauseFailure, "n1", 0, job.Progress{})
		for _, p := range c.told {
			r.l.Heard(r.now, p)
		}
		r.in(Waiting, 0)
		got := r.l.Until(r.now).Times
		require.Equal(t, max(c.stood, 0), got[Standing], name)
		require.Equal(t, c.stood < 0, got[Starting] == 100*s, name)
		require.Equal(t, 100*s, got.Sum(), name)
	}
}

// saves takes so many checkpoints, one in ten steps of a second each.
func (r *run) saves(n int) {
	for range n {
		r.in(Training, 10*s)
		r.l.Heard(r.now, job.Progress{Saving: true, Checkpoint: 10 + r.newest()})
	}
}

func (r *run) newest() (step int64) {
	for _, m := range r.l.Marks {
		step = m.Step
	}
	return step
}

func (r *run) marked() (steps []int64) {
	for _, m := range r.l.Marks {
		steps = append(steps, m.Step)
	}
	return steps
}

func TestWhichCheckpointsAreKept(t *testing.T) {
	r := newRun(t)
	r.starts(8, 0)
	r.saves(2)
	for _, step := range []int64{20, 15, 0, -1} {
		r.l.Heard(r.now, job.Progress{Saving: true, Checkpoint: step})
	}
	require.Equal(t, []int64{10, 20}, r.marked(), "those are old")
	r.saves(maxMarks - 2)
	require.Len(t, r.l.Marks, maxMarks)
	r.saves(1)
	require.Equal(t, []int64{10, 30, 50, 70, 90, 110, 130, 150, 170}, r.marked())
}

// A world begins with one checkpoint, whichever node tells that first, and later ones are not reached any more.
func TestResuming(t *testing.T) {
	resume := func(saves int, loaded ...int64) *run {
		r := newRun(t)
		r.starts(8, 0)
		r.saves(saves)
		r.in(Training, time.Duration(4-saves)*10*s)
		r.breaks(job.CauseFailure, "n1", 0, steps(40, 0))
		r.starts(8, 0)
		for _, step := range loaded {
			r.l.Heard(r.now, job.Progress{Resumed: true, Loaded: step})
		}
		return r
	}
	for _, c := range []struct {
		r    *run
		lost time.Duration
		kept []int64
	}{
		{resume(4, 20), 20 * s, []int64{10, 20}}, {resume(4, 25), 15 * s, []int64{10, 20, 25}},
		{resume(4, 40, 10), 0, []int64{10, 20, 30, 40}}, {resume(4, 5), 40 * s, []int64{5}},
		{resume(0, 25), 0, []int64{25}}, {resume(0, 0), 40 * s, []int64{0}},
	} {
		require.Equal(t, c.lost, c.r.l.Times[Lost])
		require.Equal(t, c.kept, c.r.marked())
	}

	r := newRun(t)
	r.starts(8, 0)
	r.saves(1)
	r.l.Heard(r.now, job.Progress{Resumed: true, Loaded: 10})
	require.Equal(t, Times{Training: 10 * s}, r.l.Times, "a checkpoint of this world: nothing can be lost of it")
}

// slowed is a run that trains for 100 s, and of that for 40 s with ranks that cost it half a step in a second.
func slowed(t *testing.T) *run {
	r := newRun(t)
	r.starts(8, 0)
	r.in(Training, 60*s)
	r.l.Slow(r.now, 0.5)
	r.now = r.now.Add(40 * s)
	return r
}

// The time in which ranks slow the job stays training, unless nobody has trained in it.
func TestSlowedTraining(t *testing.T) {
	for name, c := range map[string]struct {
		then   func(r *run)
		slowed time.Duration
		all    Times
	}{
		"over": {func(r *run) {
			r.l.Slow(r.now, 0)
			r.in(Training, 50*s)
		}, 40 * s, Times{Training: 150 * s}},
		"another world": {func(r *run) {
			r.breaks(job.CauseFailure, "n1", 1*s, steps(100, 0))
			r.starts(8, 1*s)
			r.in(Training, 50*s)
		}, 40 * s, Times{Training: 150 * s, Stopping: 1 * s, Starting: 1 * s}},
		"a hang": {func(r *run) {
			r.breaks(job.CauseHang, "n1", 0, steps(80, 30*s))
			r.starts(8, 0)
		}, 10 * s, Times{Training: 70 * s, Standing: 30 * s}},
		"a save": {func(r *run) {
			r.l.Heard(r.now, job.Progress{Blocked: 15 * s})
		}, 25 * s, Times{Training: 85 * s, Saving: 15 * s}},
		"steps that are lost": {func(r *run) {
			r.breaks(job.CauseFailure, "n1", 0, steps(100, 0))
			r.starts(8, 0)
			r.l.Heard(r.now, job.Progress{Resumed: true})
		}, 40 * s, Times{Lost: 100 * s}},
	} {
		t.Run(name, func(t *testing.T) {
			r := slowed(t)
			c.then(r)
			got := r.l.Until(r.now)
			require.Equal(t, c.all, got.Times)
			require.Equal(t, c.slowed, got.Slowed)
			require.InDelta(t, c.slowed.Seconds()/2, got.Missed, 1e-9)
		})
	}
}

// Half of the ranks train: what they are slowed by counts by half, as their training does.
func TestSlowedInASmallerWorld(t *testing.T) {
	r := slowed(t)
	r.l.Slow(r.now, 0)
	r.breaks(job.CauseLoss, "n1", 0, steps(100, 0))
	r.starts(4, 0)
	r.l.Slow(r.now, 0.5)
	r.in(Training, 40*s)
	require.Equal(t, 60*s, r.l.Until(r.now).Slowed)
}
