package cuda

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPatternDependsOnPlaceAndSender(t *testing.T) {
	words := make([]uint64, 1<<12)
	pattern(words, 5, seedOf("0000:10:00.0"))
	var c Corruption
	c.compare(words, 5, seedOf("0000:10:00.0"))
	require.Zero(t, c.Words)
	c.compare(words, 6, seedOf("0000:10:00.0"))
	require.EqualValues(t, len(words), c.Words, "one word further on")
	c = Corruption{}
	c.compare(words, 5, seedOf("0000:11:00.0"))
	require.EqualValues(t, len(words), c.Words, "of another device")
}

func TestSlowPathsTakeFewerCopies(t *testing.T) {
	for seconds, want := range map[float64]int{0.001: 16, 0.03: 16, 0.1: 5, 0.4: 2, 60: 2} {
		require.Equal(t, want, loops(seconds), seconds)
	}
}
