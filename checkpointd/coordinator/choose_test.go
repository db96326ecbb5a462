package coordinator

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func holding(save string, step int64, saved int64, shard, shards int) Holding {
	return Holding{Save: save, Dir: "/d", Step: step, Saved: time.Unix(saved, 0), Shard: shard, Shards: shards}
}

func copied(h Holding) Holding { h.Copy = true; return h }

func TestChoose(t *testing.T) {
	for name, c := range map[string]struct {
		held    map[int][]Holding
		want    string
		writers map[int]int
	}{
		"nothing": {nil, "", nil},
		"the newest complete one": {map[int][]Holding{0: {holding("a", 1, 10, 0, 2), holding("b", 2, 20, 0, 2)},
			1: {holding("a", 1, 10, 1, 2)}}, "a", map[int]int{0: 0, 1: 1}},
		"newest by its last holder": {map[int][]Holding{0: {holding("a", 9, 10, 0, 2), holding("b", 8, 11, 0, 2)},
			1: {holding("a", 9, 12, 1, 2), holding("b", 8, 11, 1, 2)}}, "a", map[int]int{0: 0, 1: 1}},
		"a rolled back step is newer": {map[int][]Holding{0: {holding("a", 9, 10, 0, 1), holding("b", 3, 20, 0, 1)}},
			"b", map[int]int{0: 0}},
		"then by step": {map[int][]Holding{0: {holding("a", 9, 10, 0, 1), holding("b", 3, 10, 0, 1)}},
			"a", map[int]int{0: 0}},
		"own before copy": {map[int][]Holding{0: {copied(holding("a", 1, 1, 0, 1))},
			1: {holding("a", 1, 1, 0, 1)}}, "a", map[int]int{0: 1}},
		"a copy when the owner is gone": {map[int][]Holding{0: {holding("a", 1, 1, 0, 2)},
			3: {copied(holding("a", 1, 1, 1, 2))}, 2: {copied(holding("a", 1, 1, 1, 2))}}, "a",
			map[int]int{0: 0, 1: 2}},
		"the lowest of many holders": {map[int][]Holding{2: {holding("a", 1, 1, 0, 1)},
			1: {holding("a", 1, 1, 0, 1)}}, "a", map[int]int{0: 1}},
		"holders that disagree": {map[int][]Holding{0: {holding("a", 1, 1, 0, 1)},
			1: {holding("a", 1, 1, 0, 2)}}, "", nil},
		"an impossible shard": {map[int][]Holding{0: {holding("a", 1, 1, 0, 1), holding("a", 1, 1, -1, 1)}}, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := choose(c.held)
			require.Equal(t, c.want != "", ok)
			require.Equal(t, c.want, got.Save)
			require.Equal(t, c.writers, got.Writers)
		})
	}
}

func TestChooseLooksAtNoOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		held := map[int][]Holding{}
		for range rng.IntN(30) {
			node := rng.IntN(3)
			h := holding(string('a'+rune(rng.IntN(3))), 1, int64(rng.IntN(3)), rng.IntN(2), 2)
			h.Copy = rng.IntN(2) == 0
			held[node] = append(held[node], h)
		}
		want, ok := choose(held)
		for _, hs := range held {
			rng.Shuffle(len(hs), func(i, j int) { hs[i], hs[j] = hs[j], hs[i] })
		}
		got, again := choose(held)
		require.Equal(t, ok, again)
		require.Equal(t, want, got)
	}
}
