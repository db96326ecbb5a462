package replica

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// cluster is one node for each entry, on the switch it names.
func cluster(switches ...string) []Peer {
	peers := make([]Peer, len(switches))
	for i, s := range switches {
		peers[i] = Peer{Node: i, Addr: fmt.Sprintf("10.0.0.%d:1", i), Switch: s}
	}
	return peers
}

func nodes(peers []Peer) (out []int) {
	for _, p := range peers {
		out = append(out, p.Node)
	}
	return out
}

func TestPartners(t *testing.T) {
	for _, tc := range []struct {
		name   string
		peers  []Peer
		copies int
		want   [][]int // of each node
	}{
		{"nobody else", cluster(""), 1, [][]int{nil}},
		{"no copies", cluster("", ""), 0, [][]int{nil, nil}},
		{"negative", cluster("", ""), -1, [][]int{nil, nil}},
		{"pair", cluster("", ""), 1, [][]int{{1}, {0}}},
		{"fewer nodes than copies", cluster("", "", ""), 9, [][]int{{1, 2}, {2, 0}, {0, 1}}},
		{"ring", cluster("", "", "", ""), 2, [][]int{{2, 3}, {3, 0}, {0, 1}, {1, 2}}},
		{"two switches", cluster("a", "a", "b", "b"), 1, [][]int{{2}, {3}, {0}, {1}}},
		{"two switches, two copies", cluster("a", "a", "b", "b"), 2, [][]int{{2, 3}, {3, 0}, {0, 1}, {1, 2}}},
		{"one node apart", cluster("a", "a", "a", "b"), 1, [][]int{{2}, {3}, {0}, {1}}},
		{"most on one switch", cluster("a", "a", "a", "a", "a", "a", "b", "b", "b"), 2, [][]int{
			{4, 6}, {5, 7}, {6, 8}, {7, 0}, {8, 1}, {0, 2}, {1, 3}, {2, 4}, {3, 5},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for self, want := range tc.want {
				require.ElementsMatch(t, want, nodes(Partners(self, tc.peers, tc.copies)), "node %d", self)
			}
		})
	}
	require.Nil(t, Partners(7, cluster("", ""), 1), "self is unknown")
	twice := append(cluster("", ""), Peer{Node: 1, Addr: "z"})
	require.Equal(t, []Peer{{Node: 1, Addr: "10.0.0.1:1"}}, Partners(0, twice, 2), "a peer that is listed twice")
}

// checkAssignment checks the invariants, and returns the number of pairs on one switch.
func checkAssignment(t *testing.T, peers []Peer, copies int) (inside int) {
	t.Helper()
	chosen := map[int]int{}
	want := min(copies, len(peers)-1)
	for _, p := range peers {
		partners := Partners(p.Node, peers, copies)
		seen := map[int]bool{p.Node: true}
		for _, q := range partners {
			require.False(t, seen[q.Node], "node %d: itself or twice: %v", p.Node, partners)
			seen[q.Node] = true
			chosen[q.Node]++
			if q.Switch == p.Switch {
				inside++
			}
		}
		require.Len(t, partners, want)
	}
	for _, p := range peers {
		require.Equal(t, want, chosen[p.Node], "node %d", p.Node)
	}
	return inside
}

func TestPartnersOfRandomClusters(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		peers := make([]Peer, 1+rnd.IntN(24))
		switches := 1 + rnd.IntN(6)
		for i := range peers {
			peers[i] = Peer{Node: i * 3, Switch: string(rune('a' + min(rnd.IntN(switches), rnd.IntN(switches))))}
		}
		copies := 1 + rnd.IntN(5)
		inside := checkAssignment(t, peers, copies)
		biggest := 0
		for _, p := range peers {
			biggest = max(biggest, len(slices.DeleteFunc(slices.Clone(peers),
				func(q Peer) bool { return q.Switch != p.Switch })))
		}
		n := len(peers)
		if copies <= n-2*biggest+1 {
			require.Zero(t, inside, "there is room to avoid the own switch: %v", peers)
		}
		if n > 1 {
			require.Equal(t, max(0, 2*biggest-n), checkAssignment(t, peers, 1), "no single copy could do better: %v",
				peers)
		}
		other := slices.Clone(peers)
		rnd.Shuffle(len(other), func(i, j int) { other[i], other[j] = other[j], other[i] })
		require.Equal(t, Partners(0, peers, copies), Partners(0, other, copies))
	}
}

func BenchmarkPartners(b *testing.B) {
	peers := make([]Peer, 1000)
	for i := range peers {
		peers[i] = Peer{Node: i, Switch: fmt.Sprint(i / 16)}
	}
	for b.Loop() {
		Partners(7, peers, 2)
	}
}
