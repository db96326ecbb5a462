package ledger

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"dlrover-run/internal/job"
)

// run plays a run on a virtual clock.
type run struct {
	t   require.TestingT
	l   *Ledger
	now time.Time
}

func newRun(t require.TestingT) *run { return &run{t: t, l: &Ledger{}, now: time.Unix(1e6, 0).UTC()} }

// in passes time in a class.
func (r *run) in(c Class, d time.Duration) {
	r.l.Pass(r.now, c)
	r.now = r.now.Add(d)
}

// starts seals a world, whose first step comes after d.
func (r *run) starts(ranks int, d time.Duration) {
	r.l.Sealed(r.now, job.EpochID{}, ranks)
	r.in(Starting, d)
	r.l.Stepped(r.now, 0)
}

// breaks stops the workers, whose nodes tell how they have come so far.
func (r *run) breaks(kind job.CauseKind, node string, stopping time.Duration, told job.Progress) {
	r.l.Broke(r.now, job.Cause{Kind: kind, Node: node, Text: "why"})
	r.in(Stopping, stopping)
	r.l.Heard(r.now, told.Aged(stopping))
}

func (r *run) row(cause string) Row {
	for _, row := range r.l.Until(r.now).Rows {
		if row.Cause == cause {
			return row
		}
	}
	require.FailNow(r.t, "no such row", cause)
	return Row{}
}

const s = time.Second

// steps is the report of workers whose newest step was so long ago.
func steps(n int64, idle time.Duration) job.Progress {
	return job.Progress{Step: n, Stepping: true, Idle: max(idle, 1)}
}

func TestPlantedFailures(t *testing.T) {
	for name, c := range map[string]struct {
		play  func(r *run)
		cause string
		bill  Times
		all   Times
	}{
		"crash": {func(r *run) {
			r.in(Training, 100*s)
			r.breaks(job.CauseFailure, "n1", 3*s, steps(100, 0))
			r.in(Waiting, 2*s)
			r.starts(8, 5*s)
			r.in(Training, 50*s)
		}, "worker-failure", Times{Stopping: 3 * s, Waiting: 2 * s, Starting: 5 * s},
			Times{Training: 150 * s, Stopping: 3 * s, Waiting: 2 * s, Starting: 15 * s}},
		"hang": {func(r *run) {
			r.in(Training, 160*s)
			r.breaks(job.CauseHang, "n1", 4*s, steps(100, 60*s))
			r.starts(8, 6*s)
		}, "hang", Times{Standing: 60 * s, Stopping: 4 * s, Starting: 6 * s},
			Times{Training: 100 * s, Standing: 60 * s, Stopping: 4 * s, Starting: 16 * s}},
		"slow steps are no hang": {func(r *run) {
			r.in(Training, 100*s)
			r.breaks(job.CauseFailure, "n1", 0, steps(5, 40*s))
			r.starts(8, 1*s)
		}, "worker-failure", Times{Starting: 1 * s}, Times{Training: 100 * s, Starting: 11 * s}},
		"a node is lost, and the others go on": {func(r *run) {
			r.in(Training, 100*s)
			r.breaks(job.CauseLoss, "n1", 1*s, steps(100, 0))
			r.starts(6, 1*s)
			r.in(Training, 40*s)
			r.breaks(job.CauseGrowth, "", 0, steps(40, 0))
			r.starts(8, 2*s)
			r.in(Training, 10*s)
		}, "node-loss", Times{Stopping: 1 * s, Starting: 1 * s, Waiting: 10 * s},
			Times{Training: 140 * s, Stopping: 1 * s, Waiting: 10 * s, Starting: 13 * s}},
		"a failed check": {func(r *run) {
			r.in(Training, 10*s)
			r.breaks(job.CauseCheck, "n1", 1*s, steps(10, 0))
			r.in(Checking, 30*s)
			r.starts(8, 2*s)
		}, "check", Times{Stopping: 1 * s, Checking: 30 * s, Starting: 2 * s},
			Times{Training: 10 * s, Stopping: 1 * s, Checking: 30 * s, Starting: 12 * s}},
		"back-off": {func(r *run) {
			r.in(Training, 10*s)
			r.breaks(job.CauseFailure, "n1", 0, steps(10, 0))
			r.in(BackingOff, 20*s)
			r.starts(8, 1*s)
			r.breaks(job.CauseFailure, "n1", 0, job.Progress{Stepping: true})
			r.in(BackingOff, 40*s)
			r.starts(8, 1*s)
		}, "worker-failure", Times{BackingOff: 60 * s, Starting: 2 * s},
			Times{Training: 10 * s, BackingOff: 60 * s, Starting: 12 * s}},
		"a pause": {func(r *run) {
			r.in(Training, 10*s)
			r.breaks(job.CauseOperator, "", 0, steps(10, 0))
			r.in(Paused, time.Hour)
			r.starts(8, 1*s)
		}, "operator", Times{Starting: 1 * s}, Times{Training: 10 * s, Paused: time.Hour, Starting: 11 * s}},
		"an older checkpoint": {func(r *run) {
			r.in(Training, 60*s)
			r.l.Heard(r.now, job.Progress{Saving: true, Checkpoint: 600, Kept: 10 * s})
			r.in(Training, 60*s)
			r.l.Heard(r.now, job.Progress{Saving: true, Checkpoint: 1100, Kept: 10 * s})
			r.in(Training, 10*s)
			r.breaks(job.CauseFailure, "n1", 2*s, steps(1300, 0))
			r.starts(8, 1*s)
			r.l.Heard(r.now, job.Progress{Resumed: true, Loaded: 600})
			r.in(Training, 30*s)
		}, "worker-failure", Times{Stopping: 2 * s, Starting: 1 * s, Lost: 80 * s},
			Times{Training: 80 * s, Lost: 80 * s, Stopping: 2 * s, Starting: 11 * s}},
		"steps between two checkpoints that are known": {func(r *run) {
			r.in(Training, 40*s)
			r.l.Heard(r.now, job.Progress{Saving: true, Checkpoint: 400})
			r.in(Training, 40*s)
			r.l.Heard(r.now, job.Progress{Saving: true, Checkpoint: 800})
			r.breaks(job.CauseFailure, "n1", 0, steps(800, 0))
			r.starts(8, 1*s)
			r.l.Heard(r.now, job.Progress{Resumed: true, Loaded: 500})
		}, "worker-failure", Times{Starting: 1 * s, Lost: 30 * s}, Times{Training: 50 * s, Lost: 30 * s, Starting: 11 * s}},
		"nothing is lost twice": {func(r *run) {
			for range 3 {
				r.in(Training, 10*s)
				r.breaks(job.CauseFailure, "n1", 0, steps(10, 0))
				r.starts(8, 1*s)
				r.l.Heard(r.now, job.Progress{Resumed: true})
				r.l.Heard(r.now, job.Progress{Resumed: true})
			}
		}, "worker-failure", Times{Starting: 3 * s, Lost: 30 * s}, Times{Lost: 30 * s, Starting: 13 * s}},
		"nothing is lost of what was saved after the last report": {func(r *run) {
			r.in(Training, 10*s)
			r.l.Heard(r.now, job.Progress{Saving: true, Checkpoint: 10})
			r.in(Training, 10*s)
			r.breaks(job.CauseLeave, "n1", 0, steps(20, 0))
			r.starts(8, 1*s)
			r.l.Heard(r.now, job.Progress{Resumed: true, Loaded: 20})
		}, "node-leave", Times{Starting: 1 * s}, Times{Training: 20 * s, Starting: 11 * s}},
		"nodes that tell of a checkpoint do not know for how long others were blocked": {func(r *run) {
			r.in(Training, 20*s)
			r.l.Heard(r.now, job.Progress{Saving: true, Checkpoint: 10, Kept: 9 * s, Blocked: 1 * s})
			r.in(Training, 60*s)
			r.breaks(job.CauseFailure, "n2", 2*s, job.Progress{Saving: true, Checkpoint: 50, Kept: 10 * s})
			r.l.Heard(r.now, job.Progress{Saving: true, Checkpoint: 50, Kept: 12 * s, Blocked: 4 * s})
			r.l.Heard(r.now, job.Progress{Saving: true, Checkpoint: 50, Kept: 12 * s, Blocked: 5 * s})
			r.starts(8, 1*s)
			r.l.Heard(r.now, job.Progress{Resumed: true, Loaded: 50})
		}, "worker-failure", Times{Stopping: 2 * s, Starting: 1 * s, Lost: 10 * s},
			Times{Training: 65 * s, Saving: 5 * s, Lost: 10 * s, Stopping: 2 * s, Starting: 11 * s}},
		"saves": {func(r *run) {
			r.in(Training, 10*s)
			r.l.Heard(r.now, job.Progress{Blocked: 2 * s})
			r.in(Training, 10*s)
			r.l.Heard(r.now, job.Progress{Blocked: 3 * s})
			r.breaks(job.CauseFailure, "n1", 0, job.Progress{Blocked: 5 * s})
			r.starts(8, 1*s)
			r.in(Training, 10*s)
			r.l.Heard(r.now, job.Progress{Blocked: 1 * s})
		}, "worker-failure", Times{Starting: 1 * s}, Times{Training: 24 * s, Saving: 6 * s, Starting: 11 * s}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRun(t)
			r.starts(8, 10*s)
			c.play(r)
			got := r.l.Until(r.now)
			require.Equal(t, c.all, got.Times)
			require.Equal(t, c.bill, r.row(c.cause).Times)
			require.Equal(t, got.At.Sub(got.Since), got.Times.Sum())
		})
	}
}

// The first world's steps are a surprise: its training up to the first one was its start.
func TestStepsBecomeKnown(t *testing.T) {
	r := newRun(t)
	r.in(Waiting, 3*s)
	r.l.Sealed(r.now, job.EpochID{}, 4)
	r.in(Starting, 1*s)
	r.in(Training, 20*s)
	require.Equal(t, "workers ran 83.3 % of 24 s (steps unknown); lost: start 16.7 %", r.l.Until(r.now).String())
	r.l.Stepped(r.now, 2*s)
	r.in(Training, 8*s)
	r.l.Stepped(r.now, 1*s) // another node tells it later
	require.Equal(t, Times{Waiting: 3 * s, Starting: 19 * s, Training: 10 * s}, r.l.Until(r.now).Times)
	require.Equal(t, Times{Waiting: 3 * s, Starting: 19 * s}, r.row(Start).Times)
}

// Workers that fail before their first step have only started, also if the launchers do not report first steps.
func TestNoStep(t *testing.T) {
	r := newRun(t)
	r.l.Sealed(r.now, job.EpochID{}, 4)
	r.in(Training, 20*s)
	r.breaks(job.CauseFailure, "n1", 0, job.Progress{Stepping: true})
	r.in(Waiting, 0)
	require.Equal(t, Times{Starting: 20 * s}, r.l.Until(r.now).Times)
}

// A first step that was reported late had been made before.
func TestLateFirstStep(t *testing.T) {
	r := newRun(t)
	r.l.Sealed(r.now, job.EpochID{}, 4)
	r.in(Starting, 5*s)
	r.l.Stepped(r.now, 2*s)
	require.Equal(t, Times{Starting: 3 * s, Training: 2 * s}, r.l.Until(r.now).Times)
}

func TestLossExplainsFailure(t *testing.T) {
	r := newRun(t)
	r.starts(8, 1*s)
	r.in(Training, 10*s)
	r.breaks(job.CauseFailure, "n1", 2*s, steps(10, 0))
	r.l.Blame(job.Cause{Kind: job.CauseLoss, Node: "n2", Text: "gone"})
	r.l.Blame(job.Cause{Kind: job.CauseLoss, Node: "n2", Text: "gone"})
	r.starts(8, 1*s)
	r.in(Training, 1*s)
	got := r.l.Until(r.now)
	require.Len(t, got.Rows, 2)
	require.Equal(t, Row{"node-loss", "n2", 1, Times{Stopping: 2 * s, Starting: 1 * s}}, got.Rows[1])
	require.True(t, r.l.Bill.Closed)
	require.Equal(t, "node-loss of n2 has cost 3.0 s: starting 1.0 s, stopping 2.0 s", r.l.Bill.String())
}

func TestEndOfTheRun(t *testing.T) {
	r := newRun(t)
	r.starts(8, 5*s)
	r.in(Training, 95*s)
	r.in("", time.Hour)
	want := "trained 95.0 % of 1 min 40 s; lost: start 5.0 %"
	require.Equal(t, want, r.l.Until(r.now).String())
	require.Equal(t, 100*s, r.l.Until(r.now).Times.Sum())
	require.Empty(t, newRun(t).l.Until(r.now).String())
}

func TestSentence(t *testing.T) {
	h := time.Hour
	r := Report{Stepping: true, Times: Times{Training: 96 * h, Saving: h, Checking: h, Waiting: h, Standing: h, Paused: h},
		Rows: []Row{{"start", "", 1, Times{Checking: h}}, {"hang", "a", 1, Times{Standing: h / 2}},
			{"node-loss", "b", 1, Times{Waiting: h / 4}}, {"hang", "b", 1, Times{Standing: h / 2}},
			{"node-loss", "c", 1, Times{Waiting: 3 * h / 4}}}}
	require.Equal(t, "trained 96.0 % of 4 d 4 h; lost: checks 1.0 %, saves 1.0 %, hangs 1.0 %, node losses 1.0 %; "+
		"paused for 1 h", r.String())
	r.Slowed, r.Missed = 12*h, 1563
	require.Contains(t, r.String(), "trained 96.0 % of 4 d 4 h (slowed 12.0 %: 3,100 steps a day fewer); lost: ")
	for want, n := range map[string]float64{"1": 0.6, "99": 98.7, "100": 99.7, "120": 124, "990": 990.1, "1,000": 999,
		"86,000,000,000": 8.64e10} {
		require.Equal(t, want, grouped(rough(n)))
	}
	for want, d := range map[string]time.Duration{
		"0.3 s": 300 * time.Millisecond, "12 s": 12 * s, "2 min": 2 * time.Minute, "1 h 1 min": 61*time.Minute + 59*s,
		"2 d": 48*h + 59*time.Minute,
	} {
		require.Equal(t, want, Span(d))
	}
}

// However many causes and checkpoints there are, a Ledger stays small.
func TestBounds(t *testing.T) {
	r := newRun(t)
	r.starts(8, 1*s)
	for i := range 200 {
		r.in(Training, 10*s)
		r.l.Heard(r.now, job.Progress{Saving: true, Checkpoint: int64(10 * (i + 1))})
		r.breaks(job.CauseLoss, fmt.Sprintf("n%d-%s", i, strings.Repeat("x", 1000)), 1*s, steps(10, 0))
		r.starts(8, 1*s)
	}
	require.Len(t, r.l.Rows, maxRows+1)
	require.Equal(t, Row{Others, "", 200 + 1 - maxRows, Times{Stopping: 169 * s, Starting: 169 * s}}, r.l.Rows[maxRows])
	require.LessOrEqual(t, len(r.l.Marks), maxMarks)
	require.Equal(t, mark{10, 10 * s}, r.l.Marks[0])
	require.Equal(t, mark{2000, 2000 * s}, r.l.Marks[len(r.l.Marks)-1])
	require.Equal(t, 1234*s, r.l.reached(1234), "in spite of those that are left out")
	data, err := json.Marshal(r.l)
	require.NoError(t, err)
	require.Less(t, len(data), 10<<10)
}

// A world of 100,000 nodes for a year.
func TestLargeWorld(t *testing.T) {
	r := newRun(t)
	r.starts(800_000, 0)
	r.starts(600_000, 0)
	r.in(Training, 365*24*time.Hour)
	require.Equal(t, 365*18*time.Hour, r.l.Until(r.now).Times[Training])
	require.Equal(t, 365*6*time.Hour, r.row(Start).Times[Waiting])
}

// Nothing that launchers may send makes the sums wrong: they are those of the time, by class and by row, and none is
// negative. A Ledger that was kept goes on as the one that has kept it, whatever the clock of the next daemon.
func TestAnyHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newRun(t)
		began, still := r.now, time.Duration(0)
		duration := rapid.Int64Range(-5, 100)
		r.l.Pass(r.now, Waiting)
		passes := func(t *rapid.T, c Class) {
			r.l.Pass(r.now, c)
			d := time.Duration(rapid.Int64Range(0, int64(100*s)).Draw(t, "time"))
			r.now = r.now.Add(d)
			if c == "" {
				still += d
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"pass":   func(t *rapid.T) { passes(t, rapid.SampledFrom(append(Classes(), "")).Draw(t, "class")) },
			"trains": func(t *rapid.T) { passes(t, Training) },
			"starts": func(t *rapid.T) { passes(t, Starting) },
			"seal":   func(t *rapid.T) { r.l.Sealed(r.now, job.EpochID{}, rapid.IntRange(0, 9).Draw(t, "ranks")) },
			"break": func(t *rapid.T) {
				c := job.Cause{Kind: job.CauseFailure, Node: fmt.Sprint(rapid.IntRange(0, 40).Draw(t, "node"))}
				if rapid.Bool().Draw(t, "loss") {
					c.Kind = job.CauseLoss
				}
				if rapid.Bool().Draw(t, "blame") {
					r.l.Blame(c)
				} else {
					r.l.Broke(r.now, c)
				}
			},
			"slow": func(t *rapid.T) { r.l.Slow(r.now, rapid.SampledFrom([]float64{-1, 0, 0.1, 5, 1e300}).Draw(t, "fewer")) },
			"step": func(t *rapid.T) { r.l.Stepped(r.now, time.Duration(duration.Draw(t, "ago"))*s) },
			"hear": func(t *rapid.T) {
				age := func(name string) time.Duration { return time.Duration(duration.Draw(t, name)) * s }
				r.l.Heard(r.now, job.Progress{
					Step: duration.Draw(t, "step"), Stepping: true, Checkpoint: duration.Draw(t, "saved"), Saving: true,
					Idle: age("idle"), Kept: age("kept"), Blocked: age("blocked"), Loaded: duration.Draw(t, "loaded"),
					Resumed: rapid.Bool().Draw(t, "resumed"),
				})
			},
			"keep": func(t *rapid.T) {
				data, err := json.Marshal(r.l)
				require.NoError(t, err)
				next := &Ledger{}
				require.NoError(t, json.Unmarshal(data, next))
				again, err := json.Marshal(next)
				require.NoError(t, err)
				require.JSONEq(t, string(data), string(again))
				next.Moved(r.now)
				r.l = next
			},
			"": func(t *rapid.T) {
				got := r.l.Until(r.now)
				require.Equal(t, r.now.Sub(began)-still, got.Times.Sum())
				require.Equal(t, got.At.Sub(got.Since), got.Times.Sum())
				var rows, stops time.Duration
				for c, d := range got.Times {
					require.Positive(t, d, "%s", c)
					if c != Training && c != Saving && c != Paused {
						stops += d
					}
				}
				for _, row := range got.Rows {
					for c, d := range row.Times {
						require.Positive(t, d, "%s of %s", c, row.Cause)
						rows += d
					}
				}
				require.Equal(t, stops, rows)
				require.GreaterOrEqual(t, r.l.trained(), time.Duration(0))
				require.LessOrEqual(t, got.Slowed, got.Times[Training]+got.Times[Lost])
				require.GreaterOrEqual(t, got.Slowed, time.Duration(0))
				require.LessOrEqual(t, got.Missed, maxFewer*got.Slowed.Seconds()*1.001)
				require.GreaterOrEqual(t, got.Missed, 0.0)
				require.LessOrEqual(t, len(got.Rows), maxRows+1)
			},
		})
	})
}
