package rendezvous

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

// deputies are the names in the Failover that the node has got.
func (s *sim) deputies(id string) (names []string) {
	s.t.Helper()
	require.NotNil(s.t, s.runs[id].Failover)
	for _, h := range s.runs[id].Failover.Deputies {
		names = append(names, h.Name)
	}
	return names
}

// served is a run that the launcher "a" serves, which has a place in it.
func served(t *testing.T, p Params) *sim {
	s := newSim(t, p)
	s.r.cfg.Server = &Server{ID: "a", Host: "10.0.0.1", Port: 29400, Term: 1}
	return s
}

// member joins by its own address, with a port at which it can serve.
func (s *sim) peer(id, addr string, serve int) {
	s.t.Helper()
	s.joinNode(Node{ID: id, Name: id, Rank: -1, Slots: 1, Addr: addr, IP: addr, Peer: addr, Via: "10.0.0.1", Serve: serve})
}

func TestDeputiesAreOnHostsOnceAndFirst(t *testing.T) {
	s := served(t, Params{Min: 7, Max: 7})
	s.joinNode(Node{ID: "a", Name: "a", Rank: -1, Slots: 1, Addr: "10.0.0.1"})
	s.peer("b", "10.0.0.1", 1) // on the host that may be lost
	s.peer("c", "10.0.0.2", 1)
	s.peer("d", "10.0.0.2", 2)
	s.peer("e", "10.0.0.3", 1)
	s.peer("f", "10.0.0.4", 0) // cannot serve
	s.peer("g", "10.0.0.4", 1)
	s.obey()
	require.Equal(t, []string{"c", "e", "g", "b", "d"}, s.deputies("f"))
	w := s.runs["f"].Failover
	require.Equal(t, Failover{Term: w.Term, Server: "10.0.0.1:29400", Voters: 6, Deputies: w.Deputies}, *w)
	require.Equal(t, Deputy{ID: "c", Name: "c", Addr: "10.0.0.2:1"}, w.Deputies[0])
	require.Equal(t, w, s.runs["a"].Failover)
}

func TestDeputiesAreUnderOtherSwitches(t *testing.T) {
	s := served(t, Params{Min: 5, Max: 5})
	s.r.cfg.Topology = Topology{"10.0.0.2": "x", "10.0.0.3": "x", "10.0.0.4": "y", "10.0.0.5": "y"}
	s.joinNode(Node{ID: "a", Name: "a", Rank: -1, Slots: 1, Addr: "10.0.0.1"})
	for i := 2; i <= 5; i++ {
		s.peer(string(rune('a'+i-1)), fmt.Sprint("10.0.0.", i), 1)
	}
	s.obey()
	require.Equal(t, []string{"b", "d", "c", "e"}, s.deputies("a"))
}

// The server of a run may have no place in its world, and then all members have a vote.
func TestDeputiesOfServerThatIsNoMember(t *testing.T) {
	s := served(t, Params{Min: 2, Max: 2})
	s.peer("b", "10.0.0.2", 1)
	s.peer("c", "10.0.0.3", 1)
	s.obey()
	require.Equal(t, 2, s.runs["b"].Failover.Voters)
	require.Equal(t, "10.0.0.1:29400", s.runs["b"].Failover.Server)
	require.Equal(t, "[fd00::1]:29400", hostPort("fd00::1", 29400))
}

// Launchers that two worlds of a server elect have different terms.
func TestTermsOfWorlds(t *testing.T) {
	worlds := []job.EpochID{{Round: 1}, {Round: 1, Epoch: 1}, {Round: 1, Epoch: 1000}, {Round: 2}, {Round: 1 << 20}}
	for i, id := range worlds[1:] {
		older, newer := epoch{id: worlds[i]}, epoch{id: id}
		require.Greater(t, newer.number(), older.number())
	}
	s := served(t, Params{Min: 2, Max: 2})
	s.peer("b", "10.0.0.2", 1)
	s.peer("c", "10.0.0.3", 1)
	s.obey()
	require.Equal(t, 1+s.r.epoch.number()*(maxDeputies+1), s.runs["b"].Failover.Term)
}

func TestNoDeputies(t *testing.T) {
	s := served(t, Params{Min: 2, Max: 2})
	s.joinNode(Node{ID: "a", Name: "a", Rank: -1, Slots: 1, Addr: "10.0.0.1"})
	s.peer("b", "10.0.0.2", 0)
	s.obey()
	require.Nil(t, s.runs["b"].Failover, "no member can serve")
	s = newSim(t, Params{Min: 1, Max: 1})
	s.peer("b", "10.0.0.2", 1)
	s.obey()
	require.Nil(t, s.runs["b"].Failover, "a daemon serves")
	_, err := s.r.Step(s.now, Join{Node: Node{ID: "x", Name: "x", Serve: 65536}, Params: s.p})
	require.ErrorContains(t, err, "can serve at port 65536")
}
