package rendezvous

import (
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A Join for the next epoch renews all of a node but its identity, fields that are still to be invented included.
func TestRenewed(t *testing.T) {
	n := Node{ID: "a", Name: "b", Rank: 1, Generation: 2}
	o := Node{
		ID: "x", Name: "x", Rank: 9, Generation: 9, Addr: "x", IP: "x", Addrs: []string{"x"}, Peer: "x", Via: "x",
		Slots: 9, Role: "x", Machine: "x", Devices: 9, Uptime: time.Hour, Ports: []int{9}, Bases: []int{9},
		Life: Life{Port: 9}, Agent: "x", Can: []Ability{"x"},
	}
	kept := []string{
		"ID", "Name", "Rank", "Generation", "Uptime", "IP", "Role", "Machine", "Devices", "Life", "Agent", "Can",
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
