package rendezvous

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func (s *sim) suspect(machines ...string) {
	s.r.cfg.Suspect = func(machine string) bool {
		for _, m := range machines {
			if m == machine {
				return true
			}
		}
		return false
	}
}

func TestASpareIsPreferredToASuspectNode(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 3})
	s.join("a", "b", "c", "spare")
	s.obey()
	require.Equal(t, "a b c", s.order())
	s.suspect("b")
	s.vanish("c")
	s.pass(BrokenGrace)
	s.obey()
	require.Equal(t, "a b spare", s.order(), "who is needed is taken")

	s.join("c")
	s.vanish("a")
	s.pass(BrokenGrace)
	s.obey()
	require.Len(t, s.r.epoch.world, 3, "no world is smaller for it")

	s.join("d")
	s.vanish("c")
	s.pass(BrokenGrace)
	s.obey()
	require.Contains(t, s.order(), "b", "three of three")
}

func TestASuspectMemberBecomesASpare(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.join("a", "b", "spare")
	s.obey()
	require.Equal(t, "a b", s.order())
	s.suspect("b")
	s.pass(time.Minute)
	require.Equal(t, "a b", s.order(), "a world that runs is left alone")
	s.ordered(OrderRestart, "")
	s.obey()
	require.Equal(t, "a spare", s.order())
	s.suspect()
	s.ordered(OrderRestart, "")
	s.obey()
	require.Equal(t, "a b", s.order(), "it is the senior again")
}

func TestSuspectsAmongThemselves(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2})
	s.suspect("a", "b", "c")
	s.join("a", "b", "c")
	s.obey()
	require.Equal(t, "a b", s.order())
}

// The machine counts, whatever its launchers are called, and the name where the machine is not known.
func TestTheMachineIsSuspect(t *testing.T) {
	r := New(Config{Suspect: func(machine string) bool { return machine == "gpu-07" }})
	require.True(t, r.sealer.suspect(&node{Node: Node{Name: "pod-3", Machine: "gpu-07"}}))
	require.False(t, r.sealer.suspect(&node{Node: Node{Name: "gpu-07", Machine: "gpu-08"}}))
	require.True(t, r.sealer.suspect(&node{Node: Node{Name: "gpu-07"}}))
	require.False(t, New(Config{}).sealer.suspect(&node{Node: Node{Name: "gpu-07"}}))
}
