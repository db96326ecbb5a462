package job

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNewer(t *testing.T) {
	old := EpochID{Term: 2, Round: 3, Epoch: 4}
	for _, newer := range []EpochID{{2, 3, 5}, {2, 4, 0}, {2, 4, 4}, {3, 0, 0}, {3, 3, 4}} {
		require.True(t, newer.Newer(old), "%v", newer)
		require.False(t, old.Newer(newer), "%v", newer)
	}
	require.False(t, old.Newer(old))
}

func TestProgressIsTheFurther(t *testing.T) {
	a := Progress{Step: 7, Stepping: true, Checkpoint: -1}
	b := Progress{Step: 3, Checkpoint: 40, Saving: true}
	both := Progress{Step: 7, Stepping: true, Checkpoint: 40, Saving: true}
	require.Equal(t, both, a.With(b))
	require.Equal(t, both, b.With(a))
	require.Equal(t, Progress{}, Progress{Step: -1, Checkpoint: -2}.With(Progress{}))
}

// Of the ages of two nodes, those count that say the most about the whole world.
func TestProgressOfSeveralNodes(t *testing.T) {
	a := Progress{Step: 7, Ran: 9, Idle: 3, Saving: true, Checkpoint: 5, Kept: 4, Blocked: 1}
	b := Progress{Step: 7, Ran: 8, Idle: 2, Saving: true, Checkpoint: 6, Kept: 1, Resumed: true, Loaded: 2}
	both := Progress{Step: 7, Ran: 9, Idle: 2, Saving: true, Checkpoint: 6, Kept: 1, Resumed: true, Loaded: 2, Blocked: 1}
	require.Equal(t, both, a.With(b))
	require.Equal(t, both, b.With(a))
	require.Equal(t, a, a.With(Progress{}))
	require.Equal(t, Progress{Ran: 11, Kept: 6}, Progress{Ran: 9, Kept: 4}.Aged(2), "what is unknown stays so")
	require.Equal(t, Progress{Step: 7, Saving: true, Checkpoint: 5}, a.Reached())
}

func TestBeyond(t *testing.T) {
	saved := func(n, step int64) Progress { return Progress{Step: step, Stepping: true, Checkpoint: n, Saving: true} }
	steps := func(n int64) Progress { return Progress{Step: n, Stepping: true} }
	for _, c := range []struct {
		p, best Progress
		beyond  bool
	}{
		{Progress{}, Progress{}, false},
		{steps(1), Progress{}, true},
		{steps(1), steps(1), false},
		{steps(2), steps(1), true},
		{steps(1), steps(2), false},
		{Progress{Step: 9}, steps(1), false}, // nobody knows its steps
		{saved(0, 0), Progress{}, true},
		{saved(0, 0), steps(5), true},
		{saved(10, 0), saved(9, 5), true},
		{saved(10, 5), saved(10, 5), false},
		{saved(10, 6), saved(10, 5), true},
		{saved(9, 5), saved(10, 5), false},
		{Progress{Checkpoint: 9}, Progress{}, false},
		{Progress{Checkpoint: 11, Saving: true}, saved(10, 5), true},
		{Progress{Checkpoint: 10, Saving: true}, saved(10, 5), false},
	} {
		require.Equal(t, c.beyond, c.p.Beyond(c.best), "%+v beyond %+v", c.p, c.best)
	}
}

func TestCommand(t *testing.T) {
	require.NoError(t, (*Command)(nil).Validate())
	words := func(n int) []string { return strings.Split(strings.Repeat("x ", n-1)+"x", " ") }
	for _, c := range []struct {
		c   Command
		err string
	}{
		{Command{}, ""},
		{Command{Program: []string{"a"}, Args: []string{""}}, ""},
		{Command{Program: words(maxWords / 2), Args: words(maxWords / 2)}, ""},
		{Command{Program: words(maxWords/2 + 1), Args: words(maxWords / 2)}, "4097 words"},
		{Command{Args: words(maxWords + 1)}, "4097 words"},
		{Command{Program: []string{strings.Repeat("x", MaxCommand-1)}}, ""},
		{Command{Program: []string{strings.Repeat("x", MaxCommand)}}, "65537 bytes"},
		{Command{Program: []string{"a"}, Args: []string{strings.Repeat("x", MaxCommand-2)}}, "65537 bytes"},
		{Command{Program: []string{"a\x00"}}, "without NUL"},
		{Command{Args: []string{"\xff"}}, "need UTF-8"},
		{Command{Program: []string{"", "a"}}, "name is empty"},
	} {
		if err := c.c.Validate(); c.err == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, c.err)
		}
	}
}

func TestCommandIsShownAsTyped(t *testing.T) {
	require.Equal(t, `python -m "a b" -- "" x`, (&Command{Program: []string{"python", "-m", "a b"},
		Args: []string{"", "x"}}).String())
	require.Equal(t, `"a\n"`, (&Command{Program: []string{"a\n"}}).String())
	require.Equal(t, "--", (&Command{Args: []string{}}).String())
	require.Empty(t, (&Command{}).String())
	require.Len(t, (&Command{Program: []string{strings.Repeat("x", 300)}}).String(), 300)
	long := (&Command{Program: []string{strings.Repeat("x", 301)}}).String()
	require.Equal(t, strings.Repeat("x", 297)+"...", long)
}
