package hang

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRanksAreClippedBetweenThem(t *testing.T) {
	for room, want := range map[int]string{8: "0-1,3,75", 7: "0-1,3", 5: "0-1,3", 4: "0-1", 3: "0-1", 2: "", 0: ""} {
		require.Equal(t, want, clipRanks("0-1,3,75", room), room)
	}
}

func TestToldVerdictsAreBounded(t *testing.T) {
	var v toldVerdicts
	require.Nil(t, v.newest())
	for i := range 2 * maxTold {
		v.add(Told{Incident: uint64(i)})
	}
	require.Len(t, v.list, maxTold)
	require.EqualValues(t, 2*maxTold-1, v.newest().Incident)
	v.retract(v.newest().Incident, "over")
	require.True(t, v.newest().Withdrawn)
	require.False(t, v.list[0].Withdrawn)
}

// A node that has no suspect may speak at any time.
func TestOnlyTheNodeOfASuspectEndsALapse(t *testing.T) {
	v := toldVerdicts{lapsed: 7}
	require.Empty(t, v.speaks(1, "n1"), "of verdicts that are forgotten")
	v.add(Told{Incident: 7, Verdict: behind(2)})
	require.Empty(t, v.speaks(0, "n0"))
	es := v.speaks(1, "n1")
	require.Len(t, es, 2)
	line := "node 1 n1 speaks again: its workers make progress"
	require.Equal(t, Ask{What: TellOver, Incident: 7, Line: line}, *es[0].Ask)
	require.Zero(t, v.lapsed)
	require.Empty(t, v.speaks(1, "n1"))
}
