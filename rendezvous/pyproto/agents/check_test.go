package agents

import (
	"encoding/json"
	"math"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous"
)

// checkers is a check whose nodes have the NODE_ID 100 + rank.
type checkers struct {
	c   check
	now time.Time
}

func newCheckers(lowest, highest, unit int) *checkers {
	k := &checkers{c: newCheck(), now: time.Unix(1_700_000_000, 0)}
	for rank := range highest {
		k.c.rules(rendezvous.Params{Min: lowest, Max: highest, Unit: unit, LastCall: 30 * time.Second}, 100+rank)
	}
	return k
}

func (k *checkers) join(ranks ...int) {
	for _, rank := range ranks {
		k.c.join(k.now, rank, 100+rank, 1)
	}
}

// later lets the last call pass while all ask.
func (k *checkers) later() {
	k.now = k.now.Add(31 * time.Second)
	for rank, t := range k.c.waiting {
		k.c.seen(k.now, rank, t.id)
	}
}

func (k *checkers) begin() [][]int {
	k.c.complete(k.now)
	return k.c.groups
}

func (k *checkers) report(times map[int]float64) {
	for _, rank := range sortedRanks(times) {
		k.c.report(rank, 100+rank, times[rank] < failedTime, times[rank])
	}
}

func (k *checkers) faults(t *testing.T) []int {
	t.Helper()
	ranks, reason := k.c.faults()
	require.Equal(t, len(ranks) > 0, reason == nodeFailure, reason)
	return ranks
}

func TestCheckFindsAFaultInTwoRounds(t *testing.T) {
	k := newCheckers(5, 5, 1)
	require.Zero(t, k.c.waitingNum())
	_, reason := k.c.faults()
	require.Equal(t, notBegun, reason)
	k.join(4, 2, 0, 3)
	require.Nil(t, k.begin())
	require.Equal(t, 4, k.c.waitingNum())
	k.join(1)
	require.Equal(t, [][]int{{0, 1}, {2, 3, 4}}, k.begin())
	require.Zero(t, k.c.waitingNum())
	k.report(map[int]float64{0: 1, 1: 2, 2: failedTime, 3: failedTime})
	_, reason = k.c.faults()
	require.Equal(t, waitingNode, reason)
	k.report(map[int]float64{4: failedTime})
	require.Equal(t, []int{2, 3, 4}, k.faults(t))

	k.join(0, 1, 2) // others have not asked yet for the results
	require.Equal(t, []int{2, 3, 4}, k.faults(t))
	k.join(3, 4)
	require.Equal(t, [][]int{{0, 4}, {1, 3, 2}}, k.begin())
	k.report(map[int]float64{0: 1, 4: 1, 1: 2, 3: 3, 2: failedTime})
	require.Equal(t, []int{2}, k.faults(t))
	require.Equal(t, 2, k.c.round)
}

// TestCheckHasNotTheDefectsOfDLRovers: those of its manager of rendezvous that were reproduced, by their letters.
func TestCheckHasNotTheDefectsOfDLRovers(t *testing.T) {
	t.Run("A: a straggler leaves the next check in its second round", func(t *testing.T) {
		k := newCheckers(4, 4, 1)
		k.join(0, 1, 2, 3)
		k.begin()
		k.report(map[int]float64{0: 1, 1: 1, 2: 1, 3: 9})
		require.Empty(t, k.faults(t))
		slow, _ := k.c.stragglers()
		require.Equal(t, []int{3}, slow)
		for rank := range 3 {
			k.c.over(100 + rank) // they train; node 3 is started again
		}
		k.c.rules(*k.c.params, 103)
		k.join(3)
		require.Equal(t, 1, k.c.waitingNum(), "all are called back")
		k.join(0, 1, 2)
		require.Equal(t, [][]int{{0, 1}, {2, 3}}, k.begin())
		k.report(map[int]float64{0: failedTime, 1: 1, 2: 1, 3: 1})
		require.Equal(t, []int{0}, k.faults(t), "its success was another check's")
	})
	t.Run("B: more than MAX nodes", func(t *testing.T) {
		k := newCheckers(2, 4, 1)
		k.join(0, 1, 2, 3, 4, 5)
		require.Equal(t, [][]int{{0, 1}, {2, 3}}, k.begin())
		require.Len(t, k.c.waiting, 2)
	})
	t.Run("C and E: less than MIN nodes, and none", func(t *testing.T) {
		for _, c := range [][3]int{{3, 4, 2}, {1, 4, 4}} {
			k := newCheckers(c[0], c[1], c[2])
			k.join(0, 1, 2)
			k.later()
			require.Nil(t, k.begin())
			k.join(3)
			require.Len(t, k.begin(), 2)
		}
	})
	t.Run("D: a late join and who has not asked yet", func(t *testing.T) {
		k := newCheckers(2, 3, 1)
		k.join(0, 1)
		k.later()
		require.Equal(t, [][]int{{0, 1}}, k.begin())
		k.join(2)
		members, _ := k.c.group(1)
		require.Equal(t, []int{0, 1}, members)
		k.later()
		require.Equal(t, [][]int{{0, 1}}, k.begin(), "and the round is not cut short")
	})
	t.Run("F: the new pod of a rank that waits", func(t *testing.T) {
		k := newCheckers(2, 2, 1)
		k.join(0)
		k.c.join(k.now, 0, 205, 8)
		k.c.join(k.now, 0, 100, 1) // the old one, late
		require.Equal(t, tester{205, 8, k.now}, k.c.waiting[0])
		k.c.gone(0, 100)
		k.join(1)
		require.Equal(t, [][]int{{0, 1}}, k.begin())
		k.c.report(0, 100, true, 1)
		require.Len(t, k.c.open, 2, "the report of the old one is not the new one's")
	})
	t.Run("J: a node that fails and does not come back", func(t *testing.T) {
		k := newCheckers(3, 4, 1)
		k.join(0, 1, 2, 3)
		k.begin()
		k.report(map[int]float64{0: 1, 1: 1, 2: failedTime, 3: failedTime})
		require.Equal(t, []int{2, 3}, k.faults(t))
		k.join(0, 1, 2)
		k.later()
		require.Equal(t, [][]int{{0, 2, 1}}, k.begin())
		k.report(map[int]float64{0: 1, 1: 1, 2: 1})
		require.Empty(t, k.faults(t))
	})
}

func TestCheckWithNodesThatComeAndGo(t *testing.T) {
	t.Run("a node is replaced between the rounds", func(t *testing.T) {
		k := newCheckers(4, 4, 1)
		k.join(0, 1, 2, 3)
		k.begin()
		k.report(map[int]float64{0: 1, 1: 2, 2: 3, 3: failedTime})
		require.Equal(t, []int{3}, k.faults(t))
		k.c.join(k.now, 3, 300, 1)
		k.join(0, 1, 2)
		k.begin()
		require.Equal(t, 2, k.c.round, "the second of the others")
		k.report(map[int]float64{0: 1, 1: 2, 2: 3})
		k.c.report(3, 300, true, 2)
		require.Empty(t, k.faults(t), "the fault was that of the old pod")
	})
	t.Run("a node that is started again in the middle", func(t *testing.T) {
		k := newCheckers(4, 4, 1)
		k.join(0, 1, 2, 3)
		k.begin()
		k.report(map[int]float64{0: 1, 1: 1, 2: failedTime})
		k.c.rules(*k.c.params, 103)
		k.join(3)
		require.Equal(t, []int{2}, k.faults(t), "nobody waits for what it will never report")
		require.Equal(t, 1, k.c.waitingNum())
		members, _ := k.c.group(3)
		require.Empty(t, members)
	})
	t.Run("a node that ends", func(t *testing.T) {
		k := newCheckers(2, 4, 1)
		k.join(0, 1, 2, 3)
		k.begin()
		k.report(map[int]float64{0: 1, 1: 1, 2: 1})
		k.c.goneID(103)
		require.Empty(t, k.faults(t))
		k.join(0, 1)
		k.c.goneID(101)
		require.Equal(t, 1, k.c.waitingNum())
		k.later()
		k.begin()
		require.Equal(t, []int{0, 1, 2, 3}, k.c.world, "one is too few")
	})
	t.Run("a node that is silent is not taken", func(t *testing.T) {
		k := newCheckers(2, 3, 1)
		k.join(0, 1, 2)
		k.now = k.now.Add(silence + time.Second)
		k.c.seen(k.now, 0, 100)
		k.c.seen(k.now, 2, 102)
		require.Equal(t, [][]int{{0, 2}}, k.begin())
		require.Zero(t, k.c.waitingNum())
	})
	t.Run("a round that never ends is given up", func(t *testing.T) {
		k := newCheckers(2, 4, 1)
		k.join(0, 1)
		k.later()
		k.begin()
		k.join(2, 3)
		k.later()
		require.Equal(t, [][]int{{0, 1}}, k.begin())
		k.now = k.now.Add(testTime)
		k.later()
		require.Equal(t, [][]int{{2, 3}}, k.begin())
	})
	t.Run("times that are none", func(t *testing.T) {
		k := newCheckers(3, 3, 1)
		k.join(0, 1, 2)
		k.begin()
		k.report(map[int]float64{0: 1, 1: math.NaN(), 2: -1})
		slow, _ := k.c.stragglers()
		require.Empty(t, slow)
		require.Equal(t, float64(failedTime), k.c.times[2])
		k.c.report(77, 177, true, 1)
		require.Len(t, k.c.times, 3)
	})
}

// TestCheckIsDLRovers holds check against histories of DLRover's own manager, written by testdata/check.py.
func TestCheckIsDLRovers(t *testing.T) {
	data, err := os.ReadFile("testdata/check.json")
	require.NoError(t, err)
	var histories []struct {
		Nodes  int `json:"nodes"`
		Checks []struct {
			Order  []int     `json:"order"`
			Times  []float64 `json:"times"`
			Groups [][]int   `json:"groups"`
			Round  int       `json:"round"`
			Faults []int     `json:"faults"`
			Reason string    `json:"reason"`
			Slow   []int     `json:"slow"`
		} `json:"checks"`
	}
	require.NoError(t, json.Unmarshal(data, &histories))
	require.GreaterOrEqual(t, len(histories), 100)
	for i, h := range histories {
		k := newCheckers(h.Nodes, h.Nodes, 1)
		for j, c := range h.Checks {
			k.join(c.Order...)
			require.Equal(t, c.Groups, k.begin(), "history %d, round %d", i, j)
			require.Equal(t, c.Round, k.c.round)
			times := map[int]float64{}
			for rank, s := range c.Times {
				times[rank] = s
			}
			k.report(times)
			faults, reason := k.c.faults()
			require.Equal(t, c.Faults, append([]int{}, faults...), "history %d, round %d", i, j)
			require.Equal(t, c.Reason, reason)
			slow, _ := k.c.stragglers()
			require.Equal(t, c.Slow, append([]int{}, slow...), "history %d, round %d", i, j)
		}
	}
}

// Launchers of the run check each other, and agents do not wait for them.
func TestACheckDoesNotWaitForLaunchers(t *testing.T) {
	k := newCheckers(4, 4, 1)
	k.join(0, 1)
	require.Empty(t, k.begin())
	k.later()
	require.Empty(t, k.begin())
	k.c.others = 2
	require.Equal(t, [][]int{{0, 1}}, k.begin())

	alone := newCheckers(2, 3, 1)
	alone.c.others = 5
	alone.join(1)
	require.Equal(t, [][]int{{1}}, alone.begin())
}
