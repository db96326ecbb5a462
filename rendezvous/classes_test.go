package rendezvous

import (
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous/ledger"
)

// A report without a step is none of the first step, unless it is empty: then it is for nothing else.
func TestReportsOfFirstSteps(t *testing.T) {
	for name, c := range map[string]struct {
		p   job.Progress
		ran bool
	}{
		"no step": {job.Progress{Stepping: true, Blocked: 1}, false}, "a step": {job.Progress{Stepping: true, Step: 1}, true},
		"empty": {job.Progress{}, true},
	} {
		s := newSim(t, Params{Min: 1, Max: 1})
		s.join("a")
		s.obey()
		s.stepped("a", c.p)
		require.Equal(t, c.ran, s.r.costs.book.Epoch.Ran, name)
	}
}

// Before a node has come back to a daemon without memory there is no time to book.
func TestNoTimeWithoutNodes(t *testing.T) {
	v := trains(t, Params{Min: 2, Max: 2, MaxRestarts: 9}).revive()
	v.pass(second)
	require.Empty(t, v.times())
	v.comeBack("a")
	v.pass(second)
	require.Equal(t, times{"training": second}, v.times(), "its workers train, while the other is awaited")
	v.comeBack("b")
	v.pass(10 * second)
	require.Equal(t, times{"training": 11 * second}, v.times())
}

// A start that is delayed waits for nodes all the same, if there are too few.
func TestBackOffWithTooFewNodes(t *testing.T) {
	s := trains(t, Params{Min: 2, Max: 2, MaxRestarts: 9, Budget: Budget{BackoffMin: 8 * second}})
	for range 2 {
		s.fail("a", RestartCharged)
		s.stops(0, job.Progress{Stepping: true}, "a", "b")
		if s.r.Next().Sub(s.now) <= 0 {
			s.pass(0)
		}
		s.obey()
	}
	require.True(t, s.r.account.backoffAt.After(s.now))
	s.pass(second)
	require.Equal(t, second, s.times()[ledger.BackingOff])
	s.must(Leave{ID: "b", Killed: true})
	s.pass(second)
	require.Equal(t, times{"waiting": second, "backing-off": second}, times{
		"waiting": s.times()[ledger.Waiting], "backing-off": s.times()[ledger.BackingOff]})
}

// Enough nodes are there, and a start without further ones is not delayed, but may wait for more.
func TestTheLastCallIsAWait(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 4})
	s.join("a", "b")
	s.pass(second)
	require.Equal(t, times{"waiting": second}, s.times())
}

// A node that is lost explains the failure of another one's workers, also in what the stop costs.
func TestCostOfAFailureThatIsExplained(t *testing.T) {
	s := trains(t, Params{Min: 2, Max: 2, MaxRestarts: 9})
	s.fail("a", RestartCharged)
	s.must(Leave{ID: "b", Killed: true})
	s.stops(second, job.Progress{Step: 100, Stepping: true, Idle: 1}, "a")
	require.Equal(t, job.CauseLoss, s.r.epoch.cause.Kind)
	require.Equal(t, times{"stopping": second}, s.bill(job.CauseLoss))
}
