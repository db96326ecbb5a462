package watch

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
)

var clock = 100 * time.Second

func lookedAt(start uint64, state byte, phase hang.Phase, groups ...hang.GroupState) hang.Sample {
	clock += time.Second
	cpu := time.Duration(0)
	if state == 'R' {
		cpu = clock * 3 / 4 // and a ninth of that ready
	}
	return hang.Sample{At: clock, Worker: hang.Worker{Rank: 3, PID: 7, Start: start},
		Proc: hang.Proc{State: state, MainCPU: cpu, MainWait: cpu / 9},
		Page: &hang.Page{Phase: phase, Groups: groups, Steps: uint64(clock / time.Second), StepTimes: steps(clock)}}
}

// steps end every second, the newest one at a time.
func steps(until time.Duration) (ends []time.Duration) {
	for i := range 20 {
		ends = append(ends, until-time.Duration(19-i)*time.Second)
	}
	return ends
}

func TestStepsThatAreUsual(t *testing.T) {
	ends := steps(100 * time.Second)
	require.True(t, usual(ends, 1))
	require.True(t, usual(ends, recent))
	require.False(t, usual(ends[:recent], 1), "too few to say so")
	ends = append(ends, 105*time.Second, 106*time.Second)
	require.True(t, usual(ends, 1))
	require.False(t, usual(ends, 2), "an evaluation")
}

func TestSumsOfLooksGoOnWhereAPageWraps(t *testing.T) {
	var y tally
	at := func(n uint64) hang.GroupState {
		return hang.GroupState{ID: 9, Seq: 4 * n, Looks: hang.Looks{Steps: n, Positions: n << 30 & (1<<32 - 1), Squares: n,
			Full: n << 14 & (1<<16 - 1)}}
	}
	require.Nil(t, y.all())
	for n := range uint64(20) {
		y.look([]hang.Sample{lookedAt(1, 'R', hang.PhaseTrain, at(n+1)), {}})
	}
	require.Equal(t, []hang.RankLooks{{Rank: 3, Steps: 19, Watched: 19000, Busy: 15827, Groups: []hang.GroupLooks{
		{ID: 9, Begun: 4 * 19, Looks: hang.Looks{Steps: 19, Positions: 19 << 30, Squares: 19, Full: 19 << 14}}}}}, y.all(),
		"since the first look")

	y.look([]hang.Sample{lookedAt(1, 'S', hang.PhaseData, at(21)), {}})
	y.look([]hang.Sample{lookedAt(1, 'S', hang.PhaseTrain, at(21)), {}})
	y.look([]hang.Sample{lookedAt(1, 'T', hang.PhaseTrain, at(21)), {}})
	require.EqualValues(t, 1000, y.all()[0].Data)
	require.EqualValues(t, 15827+1000, y.all()[0].Busy, "stopped, but not asleep")

	y.look([]hang.Sample{lookedAt(1, 'S', hang.PhaseTrain), {}})
	require.Nil(t, y.all(), "the group is gone")
	y.look([]hang.Sample{lookedAt(2, 'S', hang.PhaseTrain, at(50)), {}})
	require.Nil(t, y.all(), "another process")
	y.look([]hang.Sample{lookedAt(2, 'S', hang.PhaseTrain, at(51)), {}})
	require.EqualValues(t, 1, y.all()[0].Groups[0].Steps)
}
