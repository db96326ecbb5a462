package hang

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang/rankset"
	"dlrover-run/internal/testkit"
)

// scramble makes evidence of which nothing can be expected.
func scramble(rng *rand.Rand) *scene {
	s := newScene(1 + rng.IntN(3))
	if rng.IntN(2) == 0 {
		s = grid()
	}
	stacks := []*Stacks{nil, {}, {Threads: []Thread{{Main: true}}}, inAllReduce(), inBackward(), inAllGather(), inRecv(),
		inInit(), inLoader(), inUser("evaluate"), inUser("spin"), py(Frame{}),
		py(Frame{"wait", site + "distributed/x.py", 3}), py(Frame{"\x00", "\xff", -1})}
	s.all(func(r int) {
		s.ev[r].Stacks = stacks[rng.IntN(len(stacks))]
		state := "RSDTtZXI\x00SSS"[rng.IntN(12)]
		s.edit(r, func(i int, x *Sample) {
			if rng.IntN(4) == 0 {
				x.Page.Groups[rng.IntN(len(x.Page.Groups))].Seq -= uint64(rng.IntN(3))
			}
			if rng.IntN(20) == 0 {
				x.Page.Groups = x.Page.Groups[:rng.IntN(len(x.Page.Groups)+1)]
			}
			if rng.IntN(15) == 0 {
				x.Page = nil
			}
			x.Proc.State = state
			x.Proc.CPU += 1 << rng.IntN(40)
		})
		if rng.IntN(10) == 0 {
			s.ev[r].Samples = s.ev[r].Samples[:rng.IntN(4)]
		}
		if rng.IntN(10) == 0 {
			s.ev[r].Groups = []Group{{ID: 1, Ranks: "x"}, {ID: 1, Ranks: "0-9999"}, {ID: 77, Ranks: "3,1"}}
		}
		if rng.IntN(10) == 0 {
			s.ev[r].Flight = &Flight{Entries: []FlightEntry{{Group: "0", Op: "all_reduce"}, {Group: "1", IsP2P: true}}}
		}
	})
	if rng.IntN(5) == 0 {
		s.store = []StoreWait{{Key: "default_pg/0/0/rank_1"}, {Key: "k", Waiters: []string{""}}}
	}
	if rng.IntN(5) == 0 {
		s.world.Nodes = s.world.Nodes[:rng.IntN(len(s.world.Nodes))]
	}
	return s
}

// Whatever the nodes say, the verdict is sound in itself, and the order in which they say it does not matter.
func TestJudgeOfAnything(t *testing.T) {
	rounds := 20_000
	if testing.Short() {
		rounds = 2_000
	}
	testAnything(t, testkit.Seed(t, "HANG_SEED"), rounds)
}

// Its last case has two ranks that wait for something unknown, and the higher one is met first.
func TestSuspectsOfSomethingUnknownAreInOrder(t *testing.T) {
	testkit.Long(t, "the order of suspects that wait for something unknown takes many rounds")
	testAnything(t, 11775323288291349347, 5_226)
}

func testAnything(t *testing.T, seed uint64, rounds int) {
	rng := rand.New(rand.NewPCG(seed, 9))
	kinds := map[Kind]int{}
	for i := range rounds {
		s := scramble(rng)
		if rng.IntN(2) == 0 {
			for _, e := range s.ev { // an even field: nobody moves
				for k := range e.Samples {
					e.Samples[k].Page = e.Samples[0].Page
				}
			}
		}
		v := s.judge()
		kinds[v.Kind]++
		about := fmt.Sprintf("%d: %+v", i, v)
		require.LessOrEqual(t, v.Tell, v.Deadline, about)
		require.Equal(t, v.Kind == KindNone, v.Line == "", about)
		require.Equal(t, v.Kind != KindNone && v.Kind != KindComm, len(v.Suspects) > 0, about)
		require.Equal(t, v.Confidence == Low, v.Doubt != "", about)
		require.Equal(t, v.Line, strings.ToValidUTF8(v.Line, ""), about)
		if v.Kind != KindNone {
			require.Positive(t, v.Tell, about)
		}
		waiting := rankset.Named(v.Waiting)
		for k, x := range v.Suspects {
			require.False(t, waiting.Has(x.Rank), about)
			require.True(t, k == 0 || v.Suspects[k-1].Rank < x.Rank, about)
		}
		rng.Shuffle(len(s.ev), func(a, b int) { s.ev[a], s.ev[b] = s.ev[b], s.ev[a] })
		first, err := json.Marshal(v)
		require.NoError(t, err)
		again, err := json.Marshal(s.judge())
		require.NoError(t, err)
		require.Equal(t, string(first), string(again))
	}
	t.Log(kinds)
}
