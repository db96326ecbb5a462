package storeacl

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

func TestGuestsSilentPlaces(t *testing.T) {
	g := New(false, 2)
	at := func(s string) int { return g.Silent(netip.MustParseAddr(s)) }
	require.Equal(t, []int{8, 0}, []int{at("127.0.0.1"), at("10.0.0.1")}, "before there is a world")
	g.Admit([]job.Member{{Addr: "10.0.0.1", Addrs: []string{"10.0.0.1", "10.1.0.1"}, Slots: 2},
		{Addr: "10.0.0.2", Slots: 3}})
	require.Equal(t, []int{8, 8, 12, 0, 20},
		[]int{at("10.0.0.1"), at("10.1.0.1"), at("10.0.0.2"), at("10.0.0.3"), at("::1")})
	require.False(t, g.Allow(netip.MustParseAddr("10.0.0.3")))
	g.open = true
	require.Equal(t, 20, at("10.0.0.3"))
}
