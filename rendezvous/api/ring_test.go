package api

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// A ring behaves as a slice that loses its first item when it is full.
func TestRing(t *testing.T) {
	for _, limit := range []int{1, 15, 16, 17, 64, 100} {
		rnd := rand.New(rand.NewPCG(1, uint64(limit)))
		q, model := ring[int]{limit: limit}, []int(nil)
		for i := range 2000 {
			if rnd.IntN(4) == 0 && len(model) > 0 {
				require.Equal(t, model[0], q.pop())
				model = model[1:]
			} else if rnd.IntN(5) == 0 && len(model) > 0 {
				at := rnd.IntN(len(model))
				require.Equal(t, model[at], q.remove(at))
				model = slices.Delete(model, at, at+1)
			} else if rnd.IntN(50) == 0 {
				q.trim()
				require.LessOrEqual(t, len(q.items), max(q.count, firstRing))
			} else {
				dropped, full := q.push(i)
				require.Equal(t, len(model) == limit, full)
				if full {
					require.Equal(t, model[0], dropped)
					model = model[1:]
				}
				model = append(model, i)
			}
			require.Equal(t, len(model), q.count)
			require.LessOrEqual(t, len(q.items), limit)
			from := rnd.IntN(len(model) + 2)
			require.ElementsMatch(t, model[min(from, len(model)):], q.from(from))
		}
	}
}

// What has been dropped is not kept from the garbage collector.
func TestRingForgets(t *testing.T) {
	q := ring[*int]{limit: 4}
	q.push(new(int))
	q.pop()
	for _, p := range q.items {
		require.Nil(t, p)
	}
}
