package main

import (
	"net/netip"
	"sync/atomic"

	"dlrover-run/rendezvous"
)

// guests are those who may speak to the workers' store. PyTorch's protocol knows no
// password, so a connection has to come from this machine or from an address of a
// node of the present world; --insecure lets everyone in.
type guests struct {
	open  bool
	world atomic.Pointer[map[netip.Addr]bool]
}

func newGuests(open bool) *guests { return &guests{open: open} }

func (g *guests) allow(a netip.Addr) bool {
	if g.open || a.IsLoopback() {
		return true
	}
	w := g.world.Load()
	return w != nil && (*w)[a.Unmap().WithZone("")]
}

// admit replaces the world.
func (g *guests) admit(members []rendezvous.Member) {
	w := map[netip.Addr]bool{}
	for _, m := range members {
		for _, text := range append(m.Addrs, m.Addr) {
			if a, err := netip.ParseAddr(text); err == nil {
				w[a.Unmap().WithZone("")] = true
			}
		}
	}
	g.world.Store(&w)
}
