package rankset

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// set is a Set as simple as it could be.
type set map[int]bool

func (s set) runs() (out Set) {
	for r := range 40 {
		switch n := len(out); {
		case !s[r]:
		case n > 0 && out[n-1].Last == r-1:
			out[n-1].Last = r
		default:
			out = append(out, Run{r, r})
		}
	}
	return out
}

func random(rnd *rand.Rand) (Set, set) {
	var runs Set
	plain := set{}
	for range rnd.IntN(40) {
		r := rnd.IntN(40)
		runs.Add(r)
		plain[r] = true
	}
	return runs, plain
}

func TestRankSetsAreSets(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		a, as := random(rnd)
		b, bs := random(rnd)
		require.Equal(t, as.runs(), a)
		require.Equal(t, len(as), a.Len())
		left, meets := set{}, false
		for r := range 40 {
			require.Equal(t, as[r], a.Has(r))
			left[r] = as[r] && !bs[r]
			meets = meets || as[r] && bs[r]
		}
		require.Equal(t, left.runs(), a.Without(b))
		few := left.runs()
		require.Equal(t, few[:min(len(few), 2)], a.FirstWithout(b, 2))
		require.Equal(t, meets, a.Meets(b))
	}
}

func TestRanksAreWrittenAsRanges(t *testing.T) {
	s := Of(8, 0, 1, 3, 2, 5, 6)
	require.Equal(t, "0-3,5-6,8", s.String())
	require.Equal(t, "0-3/5-6/8", string(s.Append(nil, '/')))
	require.Equal(t, "0-3 and 3 more", s.Brief(1))
	require.Equal(t, "0-3,5-6,8", s.Brief(3))
	require.Empty(t, Set(nil).String())
	require.True(t, slices.Equal(Of(0, 2), Of(0, 1, 2).Filter(func(r int) bool { return r != 1 })))
}
