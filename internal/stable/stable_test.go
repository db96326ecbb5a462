package stable

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

type pair struct {
	key, place int
}

func byKey(a, b pair) int { return a.key - b.key }

func TestSort(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s []pair
		for i, k := range rapid.SliceOf(rapid.IntRange(0, 9)).Draw(t, "keys") {
			s = append(s, pair{k, i})
		}
		want := slices.Clone(s)
		slices.SortStableFunc(want, byKey)
		Sort(s, byKey)
		require.Equal(t, want, s)
	})
}

func TestSorted(t *testing.T) {
	require.Nil(t, Sorted(slices.Values([]pair(nil)), byKey))
	require.Equal(t, []pair{{1, 2}, {1, 3}, {2, 0}}, Sorted(slices.Values([]pair{{2, 0}, {1, 2}, {1, 3}}), byKey))
	require.Equal(t, []string{"a", "b"}, Sorted(maps.Keys(map[string]bool{"b": true, "a": true}), strings.Compare))
}
