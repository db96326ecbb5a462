package rendezvous

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

// able are nodes of today.
func able() []Ability { return []Ability{CanGate, CanHold, CanCommand, CanLeave} }

// held is a sim of a run that begins held, or not, whose nodes have met.
func held(t testing.TB, p Params, ids ...string) *sim {
	s := newSim(t, p)
	s.can = able()
	s.join(ids...)
	s.pass(s.p.WithDefaults().LastCall)
	s.obey()
	return s
}

func TestAHeldRunMeetsAndWaits(t *testing.T) {
	s := held(t, Params{Min: 2, Max: 3, Hold: true}, "a", "b")
	require.Equal(t, job.Run, s.dirs["a"].Kind)
	require.True(t, s.dirs["a"].Hold && s.dirs["b"].Hold)
	require.NotNil(t, s.r.Status().Hold)
	s.pass(time.Hour)
	s.join("c")
	s.obey()
	require.True(t, s.dirs["c"].Hold, "it grows as any other")
	s.must(Order{Kind: OrderRestart})
	s.obey()
	require.True(t, s.dirs["a"].Hold, "what is started anew is held, too")

	s.must(Order{Kind: OrderResume, Text: "go", Command: &job.Command{Args: []string{"x"}}})
	s.obey()
	require.False(t, s.dirs["a"].Hold)
	require.Equal(t, &job.Command{Args: []string{"x"}}, s.dirs["c"].Command)
	require.Equal(t, 0, s.runs["a"].Place.RestartCount)
	require.Equal(t, 2, s.runs["a"].Epoch, "the same nodes: another epoch")
	require.ErrorIs(t, s.step(Order{Kind: OrderResume}), ErrNotPaused)
	s.succeed("a", "b", "c")
	require.Equal(t, job.Succeeded, s.r.Evidence().Outcome)
}

// A hold that an order has ended does not come back with the world of an earlier daemon: its workers are started.
func TestAnEndedHoldStaysEnded(t *testing.T) {
	old := held(t, Params{Min: 2, Max: 2, Hold: true}, "a", "b")
	v := old.revive()
	v.join("x")
	v.must(Order{Kind: OrderResume})
	for _, id := range []string{"a", "b"} {
		d := old.dirs[id]
		v.must(Join{Node: Node{ID: id, Name: id, Rank: -1, Slots: 2, Can: able()}, Params: v.p, Seen: d.EpochID,
			Resume: &Resume{EpochID: d.EpochID, Place: *d.Place, Hold: true}})
	}
	require.Nil(t, v.r.Status().Hold)
	require.Equal(t, "the hold has ended", v.dirs["a"].Cause.Text)
}

// An older launcher that comes after the end of a held run hears of the end, whatever it could have followed before.
func TestTheEndOfAHeldRunIsForEveryone(t *testing.T) {
	s := held(t, Params{Min: 1, Max: 1, Hold: true}, "a")
	s.must(Order{Kind: OrderStop})
	require.Nil(t, s.r.Status().Hold)
	s.must(Join{Node: Node{ID: "late", Name: "late", Rank: -1, Slots: 2, Uptime: time.Hour}, Params: s.p})
	require.Equal(t, job.Fail, s.dirs["late"].Kind)
}

func TestAHoldEndsBeforeTheNodesHaveMet(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, Hold: true})
	s.can = able()
	s.join("a")
	s.must(Order{Kind: OrderResume})
	s.join("b")
	s.obey()
	require.False(t, s.dirs["a"].Hold)
	require.Equal(t, job.Run, s.dirs["a"].Kind)
}

// A hold that ends before the nodes have their places ends no world.
func TestAHoldEndsBeforeTheStoreIsReady(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, Hold: true})
	s.can = able()
	s.join("a", "b")
	require.Equal(t, releasing, s.r.epoch.phase)
	s.must(Order{Kind: OrderResume})
	s.obey()
	require.Equal(t, "a b", s.order())
	require.False(t, s.runs["a"].Hold)
	require.Equal(t, [2]int{1, 0}, [2]int{s.runs["a"].Round, s.runs["a"].Epoch})
}

func TestCommandsOfARun(t *testing.T) {
	s := held(t, Params{Min: 2, Max: 3}, "a", "b")
	s.must(Order{Kind: OrderPause})
	s.obey()
	s.must(Order{Kind: OrderResume, Command: &job.Command{Program: []string{"b.py"}}})
	s.obey()
	require.Equal(t, []string{"b.py"}, s.runs["a"].Command.Program)
	require.Equal(t, "b.py", s.notes("command")[0].Text)
	s.join("c")
	s.pass(defaultGrowthDelay)
	s.obey()
	require.Equal(t, []string{"b.py"}, s.runs["c"].Command.Program, "who comes later gets it")

	s.must(Order{Kind: OrderPause, Command: &job.Command{Args: []string{"--fast"}}})
	require.Equal(t, &job.Command{Program: []string{"b.py"}, Args: []string{"--fast"}}, s.dirs["a"].Command,
		"a daemon that is started again hears of it")
	s.obey()
	s.must(Order{Kind: OrderResume})
	s.obey()
	require.Equal(t, []string{"--fast"}, s.runs["b"].Command.Args)
	s.must(Order{Kind: OrderRestart, Command: &job.Command{Program: []string{"c"}}})
	s.obey()
	require.Equal(t, &job.Command{Program: []string{"c"}}, s.runs["b"].Command)
}

func TestACommandThatWasGivenInAdvance(t *testing.T) {
	join := func(s *sim, id string, c *job.Command) {
		s.must(Join{Node: Node{ID: id, Name: id, Rank: -1, Slots: 2, Can: able()}, Params: s.p, OnResume: c})
		s.must(Attach{ID: id})
	}
	for _, hold := range []bool{false, true} {
		s := newSim(t, Params{Min: 2, Max: 2, Hold: hold})
		join(s, "a", &job.Command{Program: []string{"first"}})
		join(s, "b", &job.Command{Program: []string{"second"}})
		s.obey()
		require.Nil(t, s.dirs["a"].Command)
		if !hold {
			s.must(Order{Kind: OrderPause})
			s.obey()
		}
		s.must(Order{Kind: OrderResume})
		s.obey()
		require.Equal(t, []string{"first"}, s.runs["b"].Command.Program, "that of the node which opened the run")
		s.must(Order{Kind: OrderPause})
		s.obey()
		s.must(Order{Kind: OrderResume, Command: &job.Command{Program: []string{"x"}}})
		s.obey()
		require.Equal(t, []string{"x"}, s.runs["b"].Command.Program)
	}
}

func TestNobodyIsToldWhatItCannotDo(t *testing.T) {
	s := held(t, Params{Min: 1, Max: 3}, "a")
	s.can = []Ability{CanHold}
	s.join("old")
	c := &job.Command{Program: []string{"x"}}
	require.ErrorContains(t, s.step(Order{Kind: OrderRestart, Command: c}), `node "old" takes no other command`)
	s.must(Leave{ID: "old"})
	s.must(Order{Kind: OrderPause, Command: c})
	err := s.step(Join{Node: Node{ID: "late", Name: "late", Slots: 2}, Params: s.p})
	require.ErrorContains(t, err, "executes another command")

	s = held(t, Params{Min: 1, Max: 2, Hold: true}, "a")
	err = s.step(Join{Node: Node{ID: "late", Name: "late", Slots: 2}, Params: s.p})
	require.ErrorContains(t, err, "is held")
}

func TestADaemonWithoutMemoryHearsOfHoldAndCommand(t *testing.T) {
	c := &job.Command{Program: []string{"x"}}
	again := func(s, old *sim, id string, hold bool) {
		run := old.runs[id]
		s.must(Join{
			Node: Node{ID: id, Name: id, Rank: -1, Slots: 2, Can: able()}, Params: old.p, Seen: run.EpochID,
			Command: run.Command, Paused: old.dirs[id].Paused,
			Resume: &Resume{EpochID: run.EpochID, Place: *run.Place, Hold: hold},
		})
		s.must(Attach{ID: id})
		s.runs[id], s.worked[id] = s.dirs[id], s.dirs[id]
	}
	t.Run("held", func(t *testing.T) {
		old := held(t, Params{Min: 2, Max: 2, Hold: true}, "a", "b")
		s := newSim(t, old.p)
		again(s, old, "a", true)
		again(s, old, "b", true)
		s.obey()
		require.True(t, s.dirs["a"].Hold)
		s.must(Order{Kind: OrderResume})
		s.obey()
		require.Equal(t, job.Run, s.dirs["a"].Kind)
		require.False(t, s.dirs["a"].Hold)
	})
	t.Run("resumed before all are back", func(t *testing.T) {
		old := held(t, Params{Min: 2, Max: 2, Hold: true}, "a", "b")
		s := newSim(t, old.p)
		again(s, old, "a", true)
		s.must(Order{Kind: OrderResume})
		again(s, old, "b", true)
		s.obey()
		require.False(t, s.dirs["a"].Hold)
		require.Equal(t, job.Run, s.dirs["b"].Kind)
		require.Greater(t, s.dirs["b"].Term, old.dirs["b"].Term)
	})
	t.Run("it had been resumed with another command", func(t *testing.T) {
		old := held(t, Params{Min: 2, Max: 2, Hold: true}, "a", "b")
		old.must(Order{Kind: OrderResume, Command: c})
		old.obey()
		s := newSim(t, old.p)
		again(s, old, "a", false)
		again(s, old, "b", false)
		s.obey()
		require.False(t, s.dirs["a"].Hold)
		require.Nil(t, s.r.Status().Hold)
		require.Equal(t, old.dirs["a"].EpochID, s.dirs["a"].EpochID, "nobody is disturbed")
		s.must(Order{Kind: OrderRestart})
		s.obey()
		require.Equal(t, c, s.runs["b"].Command)
	})
}

func TestValidateCommand(t *testing.T) {
	require.NoError(t, (*job.Command)(nil).Validate())
	require.NoError(t, (&job.Command{Args: []string{""}}).Validate())
	for want, c := range map[string]*job.Command{
		"without NUL":                 {Program: []string{"a\x00"}},
		"need UTF-8":                  {Args: []string{"\xff"}},
		"5000 words; at most 4096":    {Args: make([]string, 5000)},
		"65539 bytes; at most 65536":  {Program: []string{"a"}, Args: []string{strings.Repeat("x", job.MaxCommand)}},
		"the program's name is empty": {Program: []string{"", "a"}},
	} {
		require.ErrorContains(t, c.Validate(), want)
		require.ErrorIs(t, Order{Kind: OrderRestart, Command: c}.validate(), ErrBadOrder)
	}
	require.ErrorContains(t, Order{Kind: OrderBar, Node: "a", Command: &job.Command{}}.validate(), "bar takes no command")
	require.Equal(t, `a.py "b c" -- "" "\x1b[31m"`, (&job.Command{Program: []string{"a.py", "b c"},
		Args: []string{"", "\x1b[31m"}}).String())
	require.Len(t, (&job.Command{Args: []string{strings.Repeat("x", 9999)}}).String(), 300)

	none := &job.Command{Args: []string{}}
	text, err := json.Marshal(none)
	require.NoError(t, err)
	var read job.Command
	require.NoError(t, json.Unmarshal(text, &read))
	require.NotNil(t, read.Args, "no arguments are not the node's own")
}
