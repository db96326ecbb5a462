package rankset_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang/rankset"
)

func TestRanks(t *testing.T) {
	for text, ranks := range map[string][]int{
		"": nil, "0": {0}, "0-3,8": {0, 1, 2, 3, 8}, "5-6": {5, 6}, "1,3,5-7,1048575": {1, 3, 5, 6, 7, rankset.Max - 1},
	} {
		got, err := rankset.Parse(text)
		require.NoError(t, err)
		require.Equal(t, rankset.Of(ranks...), got)
		require.Equal(t, text, rankset.Of(ranks...).String())
	}
	require.Equal(t, "0-3,8", rankset.Of(8, 2, 0, 3, 1, 2).String())
}

func TestRanksOfLeavesItsArgumentAlone(t *testing.T) {
	ranks := []int{2, 1, 1}
	require.Equal(t, "1-2", rankset.Of(ranks...).String())
	require.Equal(t, []int{2, 1, 1}, ranks)
}

func TestParseRanksRefuses(t *testing.T) {
	for text, want := range map[string]string{
		",":                    `ranks ",": "" is not a rank: write a number from 0 to 1048575`,
		"1,":                   `"" is not a rank`,
		"-1":                   `"" is not a rank`,
		"+1":                   `"+1" is not a rank`,
		"1_0":                  `"1_0" is not a rank`,
		"1048576":              `"1048576" is not a rank`,
		"0-99999999999999":     `"99999999999999" is not a rank`,
		"1-2-3":                `"2-3" is not a rank`,
		"3-2":                  `"3-2" does not follow what is before it: write them in order, as 0-3,8`,
		"1,1":                  `"1" does not follow`,
		"0-4,4-5":              `"4-5" does not follow`,
		"0-1048575,0-1048575,": `"0-1048575" does not follow`,
	} {
		ranks, err := rankset.Parse(text)
		require.ErrorContains(t, err, want)
		require.Nil(t, ranks)
	}
}

func FuzzParseRanks(f *testing.F) {
	f.Add("0-3,8")
	f.Add("1,2,4-4")
	f.Fuzz(func(t *testing.T, s string) {
		ranks, err := rankset.Parse(s)
		if err != nil {
			return
		}
		again, err := rankset.Parse(ranks.String())
		require.NoError(t, err)
		require.Equal(t, ranks, again)
	})
}
