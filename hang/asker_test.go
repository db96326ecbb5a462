package hang

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAnswersThatAreWanted(t *testing.T) {
	a := asker{seq: 20, ask: Ask{Seq: 15}, collect: collection{ask: Ask{Seq: 18}}}
	for name, c := range map[string]struct {
		ask  uint64
		node nodeReport
		want bool
	}{
		"no answer":               {0, nodeReport{}, false},
		"the present ask":         {15, nodeReport{}, true},
		"the same twice":          {15, nodeReport{answered: true}, false},
		"a collection":            {18, nodeReport{answered: true}, true},
		"a collection twice":      {18, nodeReport{collected: true}, false},
		"an earlier ask":          {12, nodeReport{}, true},
		"one with evidence since": {12, nodeReport{evidence: packed{text: []byte{1}}}, false},
		"one of another incident": {9, nodeReport{}, false},
		"one that never was":      {21, nodeReport{}, false},
	} {
		require.Equal(t, c.want, a.wants(c.ask, 10, &c.node), name)
	}
}

func TestPendingAsks(t *testing.T) {
	a := asker{ask: Ask{Seq: 15}, collect: collection{ask: Ask{Seq: 18}, until: dawn}}
	require.EqualValues(t, 15, a.pending(true, &nodeReport{}).Seq)
	require.EqualValues(t, 18, a.pending(true, &nodeReport{answered: true}).Seq)
	require.EqualValues(t, 18, a.pending(false, &nodeReport{}).Seq)
	require.Zero(t, a.pending(false, &nodeReport{collected: true}))
	a.collect.until = time.Time{}
	require.Zero(t, a.pending(false, &nodeReport{}), "it has ended")
}

func TestNodesAreAskedSoOften(t *testing.T) {
	b, now := bucket{left: maxAsks}, dawn
	for range maxAsks {
		require.True(t, b.take(now))
	}
	require.False(t, b.take(now))
	now = b.next(now)
	require.Equal(t, dawn.Add(askEvery), now)
	require.True(t, b.take(now))
	require.False(t, b.take(now.Add(askEvery-1)))
}
