package rendezvous

import (
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

// at is a node that announces addr, and whose connection to the daemon's address via comes from peer.
func at(id, addr, peer, via string) Node {
	return Node{ID: id, Name: id, Rank: -1, Slots: 1, Addr: addr, Peer: peer, Via: via}
}

func TestLoopbackIsToldToItsOwnHostOnly(t *testing.T) {
	far := at("far", "10.0.0.2", "10.0.0.2", "10.0.0.1")
	for name, c := range map[string]struct {
		nodes []Node
		want  []string
	}{
		"one host": {[]Node{at("a", "127.0.0.1", "", ""), at("b", "127.0.0.1", "127.0.0.1", "127.0.0.1")},
			[]string{"127.0.0.1", "127.0.0.1"}},
		"one host by its own address": {[]Node{at("a", "127.0.0.1", "10.0.0.1", "10.0.0.1"), at("b", "::1", "", "")},
			[]string{"127.0.0.1", "::1"}},
		"one other host": {[]Node{at("a", "127.0.0.1", "10.0.0.2", "10.0.0.1"), at("b", "localhost", "10.0.0.2", "10.0.0.1")},
			[]string{"127.0.0.1", "localhost"}},
		"in the daemon's process": {[]Node{at("a", "127.0.0.1", "", ""), far}, []string{"10.0.0.1", "10.0.0.2"}},
		"on the daemon's host": {[]Node{at("a", "localhost", "127.0.0.1", "127.0.0.1"), far},
			[]string{"10.0.0.1", "10.0.0.2"}},
		"on the daemon's host, IPv6": {[]Node{at("a", "::1", "::1", "::1"), at("far", "fd00::2", "fd00::2", "fd00::1")},
			[]string{"fd00::1", "fd00::2"}},
		"on another host": {[]Node{at("a", "127.0.0.2", "10.0.0.3", "10.0.0.1"), far}, []string{"10.0.0.3", "10.0.0.2"}},
		"what is chosen counts": {[]Node{at("a", "192.168.0.1", "10.0.0.3", "10.0.0.1"), at("b", "node1", "", ""), far},
			[]string{"192.168.0.1", "node1", "10.0.0.2"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, Params{Min: len(c.nodes), Max: len(c.nodes)})
			for _, n := range c.nodes {
				s.joinNode(n)
			}
			var got []string
			for _, m := range s.r.World() {
				got = append(got, m.Addr)
			}
			require.Equal(t, c.want, got)
			lead := s.dirs["a"]
			require.Equal(t, job.Lead, lead.Kind)
			s.must(Ready{ID: "a", EpochID: lead.EpochID, Addr: c.nodes[0].Addr, Port: 7})
			for _, n := range c.nodes {
				require.Equal(t, c.want[0], s.dirs[n.ID].Place.MasterAddr, n.ID)
			}
			told := 0
			for _, n := range s.log {
				if n.Event == "address" {
					told++
					require.Equal(t, "a", n.Node)
					require.Contains(t, n.Text, "it announces "+c.nodes[0].Addr+", which other hosts cannot reach; they are told "+
						c.want[0])
				}
			}
			require.Equal(t, c.want[0] != c.nodes[0].Addr, told == 1)
		})
	}
}
