package hang

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFindingsAboutTheSameRanks(t *testing.T) {
	for _, c := range []struct {
		first, second string
		want          bool
	}{
		{"3", "3", true}, {"3", "33", false}, {"3", "0-7", true}, {"2-3,8", "8", true}, {"2-3,8", "4-7,9", false},
	} {
		first, second := Slowed{Ranks: c.first, Node: "n (1"}, Slowed{Ranks: c.second, GroupRank: 4, All: true}
		require.Equal(t, c.want, second.Repeats(first.Line()), "%v", c)
		require.Equal(t, c.want, first.Repeats(second.Line()), "%v", c)
	}
	require.False(t, (&Slowed{Ranks: "3"}).Repeats("by hand"))
	require.False(t, (&Slowed{Ranks: "3"}).Repeats(""))
}
