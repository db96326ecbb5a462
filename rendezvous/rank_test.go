package rendezvous

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWishedRanksDecide(t *testing.T) {
	s := newSim(t, Params{Min: 3, Max: 3})
	for i, id := range []string{"c", "a", "b"} {
		s.joinNode(Node{ID: id, Name: id, Rank: (i + 2) % 3, Slots: 2})
	}
	s.obey()
	require.Equal(t, "a b c", s.order())
}

func TestTopologyKeepsASwitchTogether(t *testing.T) {
	var lines strings.Builder
	for i := range 10 {
		fmt.Fprintf(&lines, "asw%d psw0 192.168.0.%d\n", []int{0, 1, 2, 3, 0, 1, 2, 3, 0, 1}[i], i)
	}
	topo, err := ParseTopology(strings.NewReader(lines.String()))
	require.NoError(t, err)
	s := newSim(t, Params{Min: 10, Max: 10})
	s.r = New(Config{Topology: topo})
	for i := range 10 {
		s.joinNode(Node{ID: fmt.Sprint(i), Name: fmt.Sprint(i), Rank: i, IP: fmt.Sprintf("192.168.0.%d", i), Slots: 1})
	}
	s.obey()
	require.Equal(t, "0 4 8 1 5 9 2 6 3 7", s.order())
}

func TestParseTopologyErrors(t *testing.T) {
	for in, want := range map[string]string{
		"a b\n":               "line 1",
		"a p 1\nb p 1\n":      "already under switch a",
		"# x\n\na p 1 more\n": "line 3",
	} {
		_, err := ParseTopology(strings.NewReader(in))
		require.ErrorContains(t, err, want)
	}
}

// Wishes count more than the ranks of the world before.
func TestWishedRanksDecideAgain(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 3})
	s.joinNode(Node{ID: "b", Name: "b", Rank: 1, Slots: 2})
	s.joinNode(Node{ID: "c", Name: "c", Rank: 2, Slots: 2})
	s.pass(defaultLastCall)
	s.obey()
	require.Equal(t, "b c", s.order())
	s.joinNode(Node{ID: "a", Name: "a", Rank: 0, Slots: 2})
	s.obey()
	require.Equal(t, "a b c", s.order())
}

// They decide only when everybody has one: a newcomer without a wish displaces nobody.
func TestANewcomerWithoutAWishIsTheLast(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 3})
	s.joinNode(Node{ID: "a", Name: "a", Rank: 1, Slots: 2})
	s.joinNode(Node{ID: "b", Name: "b", Rank: 0, Slots: 2})
	s.pass(defaultLastCall)
	s.obey()
	require.Equal(t, "b a", s.order())
	s.join("c")
	s.obey()
	require.Equal(t, "b a c", s.order())
}

// Wishes of which two are the same decide nothing about nodes that have ranks.
func TestTheSameWishTwice(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 3})
	for _, id := range []string{"a", "b"} {
		s.joinNode(Node{ID: id, Name: id, Rank: 1, Slots: 2})
	}
	s.pass(defaultLastCall)
	s.obey()
	s.joinNode(Node{ID: "c", Name: "c", Rank: 0, Slots: 2})
	s.obey()
	require.Equal(t, "a b c", s.order())
}

func FuzzParseTopology(f *testing.F) {
	f.Add("asw0 psw0 10.0.0.1\n# comment\n\nasw1 psw0 10.0.0.2\n")
	f.Add("a b\n")
	f.Fuzz(func(t *testing.T, text string) {
		topo, err := ParseTopology(strings.NewReader(text))
		if err != nil {
			return
		}
		for ip, asw := range topo {
			require.NotEmpty(t, asw)
			require.Contains(t, text, ip)
		}
	})
}

func TestStaticRanks(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, Static: true})
	s.joinNode(Node{ID: "one", Name: "one", Rank: 1, Slots: 2})
	err := s.step(Join{Node: Node{ID: "x", Name: "x", Rank: 1, Slots: 2}, Params: s.p})
	require.ErrorIs(t, err, ErrTaken, "it may be dead, so the answer is not final")
	require.ErrorContains(t, err, "by one")
	require.ErrorContains(t, s.step(Join{Node: Node{ID: "x", Name: "x", Rank: 2, Slots: 2}, Params: s.p}), "from 0 to 1")
	s.joinNode(Node{ID: "zero", Name: "zero", Rank: 0, Slots: 2})
	s.obey()
	require.Equal(t, "zero one", s.order())
}
