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
	slots int // of this node
	world atomic.Pointer[world]
}

// world is the workers of each address, and of all.
type world struct {
	slots map[netip.Addr]int
	all   int
}

func newGuests(open bool, slots int) *guests { return &guests{open: open, slots: slots} }

func (g *guests) allow(a netip.Addr) bool {
	if g.open || a.IsLoopback() {
		return true
	}
	w := g.world.Load()
	return w != nil && w.slots[a] > 0
}

// callbacks is how many silent connections a worker may have: PyTorch 1.x opens one for every TCPStore that it makes.
const callbacks = 4

// silent is how many silent connections an address may have. Several nodes may share this machine.
func (g *guests) silent(a netip.Addr) int {
	w := g.world.Load()
	switch {
	case w == nil && a.IsLoopback():
		return callbacks * g.slots
	case w == nil:
		return 0
	case g.open || a.IsLoopback():
		return callbacks * w.all
	}
	return callbacks * w.slots[a]
}

// admit replaces the world.
func (g *guests) admit(members []rendezvous.Member) {
	w := world{slots: map[netip.Addr]int{}}
	for _, m := range members {
		w.all += m.Slots
		for a := range addresses(m) {
			w.slots[a] += m.Slots
		}
	}
	g.world.Store(&w)
}

// addresses are a member's, each once.
func addresses(m rendezvous.Member) map[netip.Addr]bool {
	as := map[netip.Addr]bool{}
	for _, text := range append(m.Addrs, m.Addr) {
		if a, err := netip.ParseAddr(text); err == nil {
			as[a.Unmap().WithZone("")] = true
		}
	}
	return as
}
