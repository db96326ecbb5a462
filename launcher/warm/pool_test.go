package warm

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

var torch = recipe{Modules: []string{"torch"}, Env: []string{"A=1"}}

func kinds(do []action) (text string) {
	for _, a := range do {
		text += map[actionKind]string{startParent: "parent", endParent: "end", park: "park", discard: "discard"}[a.Kind]
		if a.Kind == park || a.Kind == discard {
			text += fmt.Sprint(a.Slot)
		}
		text += " "
	}
	return text
}

// ready is a pool whose parent and children are ready. Generations count from 1: the parent's.
func ready(t *testing.T) *pool {
	t.Helper()
	p := newPool(modeFork, 2)
	require.Empty(t, p.Calm(true))
	require.Equal(t, "parent ", kinds(p.Want(torch)))
	require.Equal(t, "park0 ", kinds(p.Prepared(1)))
	require.Equal(t, "park1 ", kinds(p.Parked(0, 2)))
	require.Empty(t, p.Parked(1, 3))
	return p
}

func TestNothingIsPreparedWhileWorkersStart(t *testing.T) {
	p := newPool(modeFork, 2)
	require.Empty(t, p.Want(torch))
	require.Empty(t, p.Demand())
	require.Equal(t, "parent ", kinds(p.Calm(true)))
	require.Empty(t, p.Calm(false))
	require.Empty(t, p.Prepared(1), "workers are about to make their first step")
	require.Equal(t, "park0 ", kinds(p.Calm(true)))
}

func TestARestartTakesAllAndTheyAreReplacedLater(t *testing.T) {
	p := ready(t)
	require.Empty(t, p.Demand())
	for slot := range 2 {
		generation, ok := p.Usable(slot)
		require.True(t, ok)
		require.Equal(t, 2+slot, generation)
		p.Take(slot)
	}
	require.Empty(t, p.ChildGone(0, 2, "a worker by now"))
	require.Equal(t, "park0 ", kinds(p.Calm(true)))
}

func TestASecondCrashForksAtOnce(t *testing.T) {
	p := ready(t)
	p.Demand()
	p.Take(0)
	p.Take(1)
	require.Equal(t, "park0 park1 ", kinds(p.Demand()))
	_, ok := p.Usable(0)
	require.False(t, ok)
	p.Parked(0, 4)
	generation, ok := p.Usable(0)
	require.True(t, ok)
	require.Equal(t, 4, generation)
}

func TestAParkedChildThatDiesIsReplaced(t *testing.T) {
	p := ready(t)
	last := 2
	for range 10 {
		do := p.ChildGone(0, last, "killed")
		require.Equal(t, "park0 ", kinds(do))
		last = do[0].Generation
		require.Empty(t, p.Parked(0, last))
	}
	require.Empty(t, p.Off(), "one that was ready is no sign of a fault")
}

func TestForksThatFailTurnItOff(t *testing.T) {
	p := ready(t)
	p.Take(0)
	do, last := p.Calm(true), 3
	for range maxFailed {
		require.Equal(t, "park0 ", kinds(do))
		last = do[0].Generation
		do = p.ChildGone(0, last, "ulimit -u")
	}
	require.Equal(t, "park0 ", kinds(do))
	require.Equal(t, "discard1 end ", kinds(p.ChildGone(0, do[0].Generation, "ulimit -u")))
	require.Equal(t, "ulimit -u", p.Off())
	require.Empty(t, p.Calm(true))
	require.Empty(t, p.Demand())
}

func TestAParentIsStartedAgainThreeTimes(t *testing.T) {
	p := newPool(modeFork, 1)
	p.Calm(true)
	do := p.Want(torch)
	for range maxDeaths {
		require.Equal(t, "parent ", kinds(do))
		do = p.ParentGone(do[0].Generation, "killed")
	}
	require.Equal(t, "parent ", kinds(do))
	require.Empty(t, p.ParentGone(do[0].Generation, "killed"))
	require.Equal(t, "killed", p.Off())
}

func TestChildrenOutliveTheirParent(t *testing.T) {
	p := ready(t)
	require.Equal(t, "parent ", kinds(p.ParentGone(1, "killed")))
	_, ok := p.Usable(1)
	require.True(t, ok)
}

func TestChangedFilesMeanANewParent(t *testing.T) {
	p := ready(t)
	p.Demand()
	require.Equal(t, "discard0 discard1 end ", kinds(p.Changed()), "not now: workers start")
	_, ok := p.Usable(0)
	require.False(t, ok)
	require.Equal(t, "parent ", kinds(p.Calm(true)))
	require.Empty(t, p.ParentGone(1, "as it was told"))
	require.Empty(t, p.Off())
	require.Empty(t, p.Want(torch), "it is what is wanted")
	more := recipe{Modules: []string{"torch", "numpy"}, Env: torch.Env}
	require.Equal(t, "end parent ", kinds(p.Want(more)))
}

// While an heir imports more, the parent goes on: restarts are warm.
func TestAnHeirTakesTheParentsPlace(t *testing.T) {
	p := ready(t)
	more := recipe{Modules: []string{"torch", "numpy"}, Env: torch.Env}
	require.Equal(t, "parent ", kinds(p.Want(more)))
	require.Empty(t, p.Demand())
	p.Take(0)
	p.Take(1)
	require.Empty(t, p.Prepared(4), "not now: workers start")
	require.Equal(t, "park0 park1 ", kinds(p.Demand()))
	require.Equal(t, 1, p.Parent())
	require.Equal(t, "end discard0 discard1 park0 ", kinds(p.Calm(true)))
	require.Equal(t, 4, p.Parent())
	require.Empty(t, p.Want(more))
	require.Empty(t, p.ParentGone(1, "as it was told"))
	require.Empty(t, p.Off())
}

func TestAnHeirThatCannotBeForked(t *testing.T) {
	more := recipe{Modules: []string{"torch", "numpy"}, Env: torch.Env}
	p := ready(t)
	p.Want(more)
	require.Equal(t, "end parent ", kinds(p.Unfit(4)), "another one tries with less")
	do, ok := p.Settle()
	require.Equal(t, "end ", kinds(do))
	require.True(t, ok)
	_, ok = p.Usable(1)
	require.True(t, ok)
	require.Empty(t, p.Calm(true))

	p = ready(t)
	p.Want(more)
	require.Empty(t, p.ParentGone(1, "killed"), "the heir is the parent")
	require.Equal(t, 4, p.Parent())
	_, ok = p.Settle()
	require.False(t, ok, "nothing can be forked")
	require.Equal(t, "discard0 discard1 end ", kinds(p.Forget()))
	require.Empty(t, p.Calm(true))
	require.Equal(t, "parent ", kinds(p.Want(more)))
}

func TestForksBeforeTheVerdict(t *testing.T) {
	trial := func() *pool {
		p := newPool(modeFork, 2)
		p.Calm(true)
		p.Want(torch)
		require.Empty(t, p.Imported(7), "another one's")
		do := p.Imported(1)
		require.Equal(t, "park0 park1 ", kinds(do))
		require.True(t, do[0].Urgent)
		require.Empty(t, p.Parked(0, 2))
		_, ok := p.Usable(0)
		require.False(t, ok, "it is not known yet whether it is fit")
		require.Empty(t, p.Demand())
		return p
	}
	p := trial()
	require.Empty(t, p.Prepared(1))
	_, ok := p.Usable(0)
	require.True(t, ok)

	p = trial()
	require.Empty(t, p.ChildGone(1, 3, "it could not be forked"))
	require.Zero(t, p.failed, "as its parent may be to blame")
	require.Empty(t, p.Prepared(1))
	require.Equal(t, "park1 ", kinds(p.Demand()))

	require.Equal(t, "discard0 discard1 end ", kinds(trial().Unfit(1)))
	require.Equal(t, "discard0 discard1 end ", kinds(trial().Forget()))
	require.Equal(t, "discard0 discard1 end ", kinds(trial().Stop("not safe to fork")))

	p = trial()
	require.Equal(t, "discard0 discard1 ", kinds(p.ParentGone(1, "killed")))
	require.Equal(t, "parent ", kinds(p.Calm(true)))
	require.Empty(t, p.Imported(1), "that is gone")
}

func TestStandby(t *testing.T) {
	p := newPool(modeStandby, 2)
	p.Calm(true)
	require.Equal(t, "park0 ", kinds(p.Want(torch)))
	require.Equal(t, "park1 ", kinds(p.Parked(0, 1)), "one after the other")
	require.Empty(t, p.Demand())
	_, ok := p.Usable(0)
	require.True(t, ok)
	p.Take(0)
	require.Empty(t, p.Demand(), "an import would come too late")
	require.Empty(t, p.Parked(1, 2))
	require.Equal(t, "park0 ", kinds(p.Calm(true)))
	require.Equal(t, "discard0 discard1 ", kinds(p.Stop("over")))
	require.Equal(t, "over", p.Off())
}

// TestPoolNeverLosesAProcess lets everything happen in any order: what is started is in its place until it has ended,
// is ended or is taken, and what is usable is alive.
func TestPoolNeverLosesAProcess(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		mode := []Mode{modeFork, modeStandby}[seed%2]
		p, alive, parents := newPool(mode, 3), map[int]int{}, map[int]bool{}
		carry := func(do []action) {
			for _, a := range do {
				switch a.Kind {
				case startParent:
					require.Less(t, len(parents), 2)
					parents[a.Generation] = true
				case endParent:
					require.True(t, parents[a.Generation])
					delete(parents, a.Generation)
				case park:
					require.True(t, mode == modeStandby || parents[p.Parent()], "a fork needs a parent")
					alive[a.Generation] = a.Slot
				case discard:
					require.Contains(t, alive, a.Generation)
					delete(alive, a.Generation)
				}
			}
		}
		for range 200 {
			slot, generation := r.IntN(3), r.IntN(20)
			event := r.IntN(13)
			switch event {
			case 0:
				carry(p.Want(recipe{Modules: []string{fmt.Sprint(r.IntN(3))}}))
			case 1, 2, 3:
				carry(p.Calm(r.IntN(4) > 0))
			case 4:
				carry(p.Prepared(generation))
			case 5:
				delete(parents, generation)
				carry(p.ParentGone(generation, "gone"))
			case 6:
				carry(p.Parked(slot, generation))
			case 7:
				if s, ok := alive[generation]; ok && s == slot {
					delete(alive, generation)
				}
				carry(p.ChildGone(slot, generation, "gone"))
			case 8:
				carry(p.Demand())
			case 10:
				carry(p.Unfit(generation))
			case 11:
				do, _ := p.Settle()
				carry(do)
			case 12:
				if mode == modeFork && parents[generation] {
					carry(p.Imported(generation))
				}
			case 9:
				if g, ok := p.Usable(slot); ok {
					require.Equal(t, slot, alive[g])
					p.Take(slot)
					delete(alive, g)
				}
			}
			seen := map[int]bool{}
			for g, s := range alive {
				require.False(t, seen[s], "two children for a slot")
				seen[s] = true
				require.Equal(t, g, p.slots[s].generation, "seed %d event %d slot %d generation %d", seed, event, slot, generation)
			}
		}
	}
}
