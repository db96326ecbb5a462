package rendezvous

import (
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A Join for the next epoch renews a node's slots, addresses and ports. A new field must be in one of the two lists.
func TestRenewed(t *testing.T) {
	n := Node{ID: "a", Name: "b", Rank: 1, Generation: 2}
	o := Node{
		ID: "x", Name: "x", Rank: 9, Generation: 9, Addr: "x", IP: "x", Addrs: []string{"x"}, Peer: "x", Via: "x",
		Slots: 9, Role: "x", Machine: "x", Devices: 9, Uptime: time.Hour, Ports: []int{9}, Bases: []int{9},
		Life: Life{Port: 9}, Serve: 9, Agent: "x", Can: []Ability{"x"},
	}
	kept := []string{
		"ID", "Name", "Rank", "Generation", "Uptime", "IP", "Role", "Machine", "Devices", "Life", "Serve",
		"Agent", "Can",
	}
	was, got, other := reflect.ValueOf(n), reflect.ValueOf(n.renewed(o)), reflect.ValueOf(o)
	for i := range got.NumField() {
		name, want := got.Type().Field(i).Name, other.Field(i)
		require.False(t, want.IsZero(), "give %s a value", name)
		for _, k := range kept {
			if k == name {
				want = was.Field(i)
			}
		}
		require.Equal(t, want.Interface(), got.Field(i).Interface(), name)
	}
}

// A node is held to its bounds at every Join.
func TestRejoinHasBounds(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1, MaxRestarts: 3})
	s.join("a")
	s.obey()
	n := s.r.members.nodes["a"].Node
	n.Addrs = make([]string, MaxAddrs+1)
	require.ErrorIs(t, s.step(Join{Node: n, Params: s.p, Stopped: s.runs["a"].EpochID}), ErrRefused)
}
