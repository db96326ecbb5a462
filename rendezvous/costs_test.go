package rendezvous

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous/ledger"
)

// stepped has the workers report as dlrover-run does, and time pass.
func (s *sim) stepped(id string, p job.Progress) {
	s.t.Helper()
	s.must(Stepped{ID: id, EpochID: s.runs[id].EpochID, Progress: p})
}

// stops has the workers of nodes stop after d, and report how they have come so far.
func (s *sim) stops(d time.Duration, p job.Progress, ids ...string) {
	s.t.Helper()
	s.pass(d)
	for _, id := range ids {
		stop := s.dirs[id]
		require.Equal(s.t, job.Stop, stop.Kind)
		delete(s.runs, id)
		n := s.r.members.nodes[id].Node
		s.must(Join{Node: n, Params: s.p, Stopped: stop.EpochID, Progress: p.Aged(d)})
	}
}

func (s *sim) times() times { return rounded(LedgerOf(s.r, s.now).Times) }

// rounded leaves out the nanoseconds by which steps are older than their report.
func rounded(t times) times {
	out := times{}
	for class, d := range t {
		if d = d.Round(time.Millisecond); d > 0 {
			out[class] = d
		}
	}
	return out
}

// bill are the times of all stops of a cause.
func (s *sim) bill(cause job.CauseKind) times {
	for _, row := range LedgerOf(s.r, s.now).Rows {
		if row.Cause == string(cause) {
			return rounded(row.Times)
		}
	}
	return nil
}

type times = ledger.Times

const second = time.Second

// trains is a run of two nodes that has trained for 100 s, a step a second, after 10 s for its start, and has saved
// step 60.
func trains(t *testing.T, p Params) *sim {
	t.Helper()
	s := newSim(t, p)
	s.can = []Ability{CanGate}
	s.join("a", "b")
	s.obey()
	require.Len(t, s.runs, 2)
	s.pass(10 * second)
	s.stepped("a", job.Progress{Step: 1, Stepping: true, Ran: 1, Idle: 1})
	s.pass(60 * second)
	s.stepped("a", job.Progress{Step: 60, Stepping: true, Idle: 1, Saving: true, Checkpoint: 60})
	s.pass(40 * second)
	return s
}

// starts has the next world make its first step after d.
func (s *sim) starts(d time.Duration, p job.Progress) {
	s.t.Helper()
	s.obey()
	require.Equal(s.t, running, s.r.epoch.phase)
	s.pass(d)
	p.Step, p.Stepping, p.Ran, p.Idle = 1, true, 1, 1
	s.stepped("a", p)
}

func TestCostOfPlantedFailures(t *testing.T) {
	two := Params{Min: 2, Max: 2, MaxRestarts: 9}
	to100 := job.Progress{Step: 100, Stepping: true, Idle: 1}
	for name, c := range map[string]struct {
		p     Params
		play  func(s *sim)
		cause job.CauseKind
		bill  times
		all   times
		note  string
	}{
		"crash, from an older checkpoint": {two, func(s *sim) {
			s.fail("a", RestartCharged)
			s.stops(3*second, to100, "a", "b")
			s.starts(5*second, job.Progress{Resumed: true, Loaded: 60})
			s.pass(20 * second)
		}, job.CauseFailure, times{"stopping": 3 * second, "starting": 5 * second, "lost": 40 * second},
			times{"training": 80 * second, "stopping": 3 * second, "starting": 15 * second, "lost": 40 * second},
			"worker-failure of a has cost 48 s: starting 5.0 s, stopping 3.0 s, lost 40 s"},
		"hang": {two, func(s *sim) {
			s.pass(50 * second)
			s.must(Order{Kind: OrderRestart, Node: "b", Cause: job.CauseHang, Text: "rank 2 hangs"})
			s.stops(3*second, job.Progress{Step: 100, Stepping: true, Idle: 50 * second}, "a", "b")
			s.starts(5*second, job.Progress{})
		}, job.CauseHang, times{"standing": 50 * second, "stopping": 3 * second, "starting": 5 * second},
			times{"training": 100 * second, "standing": 50 * second, "stopping": 3 * second, "starting": 15 * second},
			"hang of b has cost 58 s: starting 5.0 s, stopping 3.0 s, standing 50 s"},
		"lost node, which comes back": {two, func(s *sim) {
			s.must(Leave{ID: "b", Killed: true})
			delete(s.dirs, "b")
			s.stops(3*second, to100, "a")
			s.pass(60 * second)
			s.join("c")
			s.starts(5*second, job.Progress{})
		}, job.CauseLoss, times{"stopping": 3 * second, "waiting": 60 * second, "starting": 5 * second},
			times{"training": 100 * second, "stopping": 3 * second, "waiting": 60 * second, "starting": 15 * second},
			"node-loss of b has cost 1 min 8 s: waiting 1 min, starting 5.0 s, stopping 3.0 s"},
		"lost node, and the other one goes on": {Params{Min: 1, Max: 2, LastCall: 1}, func(s *sim) {
			s.must(Leave{ID: "b", Killed: true})
			delete(s.dirs, "b")
			s.stops(0, to100, "a")
			s.starts(0, job.Progress{})
			s.pass(40 * second)
		}, job.CauseLoss, times{"waiting": 20 * second},
			times{"training": 120 * second, "waiting": 20 * second, "starting": 10 * second}, ""},
		"pause": {two, func(s *sim) {
			s.must(Order{Kind: OrderPause})
			s.stops(3*second, to100, "a", "b")
			s.pass(time.Hour)
			s.must(Order{Kind: OrderResume})
			s.starts(5*second, job.Progress{})
		}, job.CauseOperator, times{"starting": 5 * second},
			times{"training": 100 * second, "paused": time.Hour + 3*second, "starting": 15 * second},
			"operator has cost 5.0 s: starting 5.0 s"},
		"check": {Params{Min: 2, Max: 2, Gate: true}, func(s *sim) {
			s.must(Doubt{ID: "a"})
			s.must(Order{Kind: OrderRestart})
			s.stops(3*second, to100, "a", "b")
			require.Equal(s.t, gating, s.r.epoch.phase)
			s.pass(20 * second)
			s.starts(5*second, job.Progress{})
		}, job.CauseOperator, times{"stopping": 3 * second, "checking": 20 * second, "starting": 5 * second},
			times{"training": 100 * second, "stopping": 3 * second, "checking": 20 * second, "starting": 15 * second},
			"operator has cost 28 s: checking 20 s, starting 5.0 s, stopping 3.0 s"},
	} {
		t.Run(name, func(t *testing.T) {
			s := trains(t, c.p)
			require.Equal(t, times{"training": 100 * second, "starting": 10 * second}, s.times())
			c.play(s)
			require.Equal(t, c.bill, s.bill(c.cause))
			require.Equal(t, c.all, s.times())
			require.Equal(t, c.note, s.noted(job.EventCost))
		})
	}
}

// Where nobody counts steps, checkpoints alone tell what is lost and how long saves have taken.
func TestCostWithoutSteps(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 9})
	s.join("a", "b")
	s.obey()
	s.pass(70 * second)
	saved := job.Progress{Saving: true, Checkpoint: 60, Kept: 10 * second, Resumed: true, Blocked: 5 * second}
	s.stepped("a", saved)
	s.pass(40 * second)
	s.fail("a", RestartCharged)
	s.stops(3*second, saved.Aged(40*second), "a", "b")
	s.obey()
	s.pass(20 * second)
	s.stepped("a", job.Progress{Saving: true, Checkpoint: 70, Kept: 1, Resumed: true, Loaded: 60})
	require.Equal(t, times{"training": 75 * second, "saving": 5 * second, "lost": 50 * second, "stopping": 3 * second},
		s.times())
	require.Equal(t, times{"lost": 50 * second, "stopping": 3 * second}, s.bill(job.CauseFailure))
	require.False(t, LedgerOf(s.r, s.now).Stepping)
	require.EqualValues(t, 0, s.r.account.newest.progress.Step, "a checkpoint is no step")
}

// Starts that fail, each later than the one before: none has made a step, even if a node has reported some earlier.
func TestCostOfBackOff(t *testing.T) {
	s := trains(t, Params{Min: 2, Max: 2, MaxRestarts: 9, Budget: Budget{BackoffMin: 8 * second}})
	s.stepped("a", job.Progress{Step: 100, Stepping: true, Idle: 40 * second})
	backedOff := time.Duration(0)
	for range 4 {
		s.fail("a", RestartCharged)
		s.stops(0, job.Progress{Stepping: true}, "a", "b")
		wait := max(0, s.r.Next().Sub(s.now)) // the first one may start at once
		backedOff += wait
		s.pass(wait)
		s.obey()
		s.pass(5 * second)
	}
	require.Greater(t, backedOff, 10*second)
	want := times{"backing-off": backedOff.Round(time.Millisecond), "starting": 20 * second}
	require.Equal(t, want, s.bill(job.CauseFailure))
	require.Equal(t, 100*second, s.times()[ledger.Training])
	require.Len(t, s.notes(job.EventCost), 3, "the newest start may succeed")
}

// A run that is held from its beginning, until an order.
func TestHeldRunCostsNothing(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1, Hold: true})
	s.join("a")
	s.obey()
	s.pass(time.Hour)
	require.Equal(t, times{"paused": time.Hour}, s.times())
	s.must(Order{Kind: OrderResume})
	s.obey()
	s.pass(second)
	require.Equal(t, times{"paused": time.Hour, "training": second}, s.times())
}

// Nothing counts after the end, for a later daemon neither.
func TestTimesEndWithTheRun(t *testing.T) {
	s := trains(t, Params{Min: 2, Max: 2})
	s.succeed("a", "b")
	before := LedgerOf(s.r, s.now)
	s.pass(time.Hour)
	require.Equal(t, before.Times, LedgerOf(s.r, s.now).Times)
	require.Equal(t, before.Times, LedgerOf(s.succession().r, s.now.Add(time.Hour)).Times)
	const line = "trained 90.9 % of 1 min 50 s; lost: start 9.1 %"
	require.Equal(t, line, before.String())
	require.Equal(t, line, s.noted(job.EventSucceeded))
	s = trains(t, Params{Min: 2, Max: 2})
	s.fail("a", Permanent)
	s.pass(attributionWindow)
	require.Regexp(t, "^a failed; trained 90.7 %.*start 9.1 %, failures 0.3 %$", s.noted(job.EventFailed))
}

// While there is no daemon, the workers train on, and the kept state of them stays valid: their first step, their
// checkpoints, and their saves.
func TestTimesGoOnWithTheNextDaemon(t *testing.T) {
	s := trains(t, Params{Min: 2, Max: 2, MaxRestarts: 9})
	s.stepped("a", job.Progress{Step: 100, Stepping: true, Blocked: 4 * second})
	v := s.succession()
	v.now = s.now.Add(30 * second)
	v.comeBack("a", "b")
	require.Equal(t, running, v.r.epoch.phase)
	require.Equal(t, []ledger.Row{{Cause: ledger.Start, Count: 1, Times: times{"starting": 10*second - 1}}},
		LedgerOf(v.r, v.now).Rows, "nothing has ended")
	v.pass(20 * second)
	want := s.times()
	want[ledger.Training] += 50 * second
	require.Equal(t, want, v.times())
	v.stepped("a", job.Progress{Step: 150, Stepping: true, Blocked: 5 * second})
	v.fail("a", RestartCharged)
	v.stops(0, job.Progress{Step: 150, Stepping: true, Idle: 1}, "a", "b")
	v.starts(5*second, job.Progress{Resumed: true, Loaded: 60})
	require.Equal(t, times{"lost": 85 * second, "starting": 5 * second}, v.bill(job.CauseFailure))
	require.Equal(t, 60*second, v.times()[ledger.Training])
	require.Equal(t, 5*second, v.times()[ledger.Saving])
}

// Ranks that slow the newest world are booked, also in the time between two daemons.
func TestSlowedTimes(t *testing.T) {
	s := trains(t, Params{Min: 2, Max: 2, MaxRestarts: 9})
	old := s.r.epoch.id
	old.Epoch--
	s.must(Slowed{EpochID: old, Fewer: 1})
	s.pass(10 * second)
	require.Zero(t, LedgerOf(s.r, s.now).Slowed, "that is another world")
	s.must(Slowed{EpochID: s.r.epoch.id, Fewer: 0.5})
	s.pass(20 * second)
	v := s.succession()
	v.now = s.now.Add(30 * second)
	v.comeBack("a", "b")
	v.pass(10 * second)
	v.must(Slowed{EpochID: v.r.epoch.id})
	v.pass(10 * second)
	require.Equal(t, 60*second, LedgerOf(v.r, v.now).Slowed.Round(time.Millisecond))
	require.InDelta(t, 30, LedgerOf(v.r, v.now).Missed, 0.01)
	v.succeed("a", "b")
	require.Contains(t, v.noted(job.EventSucceeded), " (slowed 31.6 %: 43,000 steps a day fewer)")
}

// A daemon without memory begins with the world that it finds.
func TestTimesOfADaemonWithoutMemory(t *testing.T) {
	v := trains(t, Params{Min: 2, Max: 2, MaxRestarts: 9}).revive()
	v.comeBack("a", "b")
	v.pass(10 * second)
	require.Equal(t, times{"training": 10 * second}, v.times())
	v.stepped("a", job.Progress{Step: 110, Stepping: true, Ran: 110 * second})
	require.Equal(t, times{"training": 10 * second}, v.times())
}

// Nodes that come to a run without any node of before begin it anew.
func TestTimesBeginAnew(t *testing.T) {
	v := trains(t, Params{Min: 2, Max: 2}).succession()
	v.now = v.now.Add(time.Hour)
	v.join("x", "y")
	v.pass(resumeWindow)
	v.obey()
	require.Equal(t, "x y", v.order())
	v.pass(second)
	require.Equal(t, times{"training": second}, v.times())
}

// Reports about another world, or of a node outside, change nothing.
func TestStrangersReports(t *testing.T) {
	s := trains(t, Params{Min: 2, Max: 2})
	before := s.times()
	p := job.Progress{Step: 1, Stepping: true, Blocked: 9 * second, Resumed: true}
	require.ErrorIs(t, s.step(Stepped{ID: "x", EpochID: s.r.epoch.id, Progress: p}), ErrUnknownNode)
	old := s.r.epoch.id
	old.Epoch--
	s.must(Stepped{ID: "a", EpochID: old, Progress: p})
	s.must(Stepped{ID: "a", Progress: p})
	require.Equal(t, before, s.times())
}

// A new launcher that comes before the nodes of the kept world, which trains on, changes nothing.
func TestTimesWhileNodesAreAwaited(t *testing.T) {
	s := trains(t, Params{Min: 2, Max: 2, MaxRestarts: 9})
	v := s.succession()
	v.join("x")
	v.pass(5 * second)
	v.comeBack("a", "b")
	require.Equal(t, running, v.r.epoch.phase)
	v.pass(5 * second)
	want := s.times()
	want[ledger.Training] += 10 * second
	require.Equal(t, want, v.times())
}

// When all nodes have gone, the run is over; time counts again when others begin it anew.
func TestTimesEndWithTheLastNode(t *testing.T) {
	s := trains(t, Params{Min: 2, Max: 2, MaxRestarts: 9})
	for _, id := range []string{"a", "b"} {
		s.must(Leave{ID: id, Killed: true})
		s.pass(second)
	}
	s.pass(time.Hour)
	require.Empty(t, s.times())
	s.join("c")
	s.pass(second)
	require.Equal(t, times{"waiting": second}, s.times())
}

// Nodes that wait for others, though they could begin, do not back off.
func TestLastCallIsWaiting(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 2})
	s.join("a")
	s.pass(10 * second)
	require.Equal(t, times{"waiting": 10 * second}, s.times())
}

// The end of a run is no stop of a world that has to be paid.
func TestEndByAnOrderCostsNothing(t *testing.T) {
	s := trains(t, Params{Min: 2, Max: 2})
	before := LedgerOf(s.r, s.now).Rows
	s.must(Order{Kind: OrderStop})
	s.pass(second)
	require.Equal(t, before, LedgerOf(s.r, s.now).Rows)
}
