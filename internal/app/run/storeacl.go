package run

import (
	"net/netip"
	"sync/atomic"

	"dlrover-run/internal/job"
)

// storeACL holds the addresses that may connect to the workers' store. PyTorch's protocol has no password, so a
// connection has to come from this machine or from an address of a node of the present world. --insecure admits all.
type storeACL struct {
	open  bool
	slots int // of this node
	world atomic.Pointer[world]
	guest atomic.Pointer[map[netip.Addr]bool] // other addresses that may connect during a check
}

// world is the workers of each address, and of all.
type world struct {
	slots map[netip.Addr]int
	all   int
}

func newStoreACL(open bool, slots int) *storeACL { return &storeACL{open: open, slots: slots} }

func (l *storeACL) allow(a netip.Addr) bool {
	if l.open || a.IsLoopback() {
		return true
	}
	if guests := l.guest.Load(); guests != nil && (*guests)[a] {
		return true
	}
	w := l.world.Load()
	return w != nil && w.slots[a] > 0
}

// lend lets the nodes at these addresses connect to the store until the returned function is called. There is one
// check at a time.
func (l *storeACL) lend(addrs []string) (end func()) {
	guests := map[netip.Addr]bool{}
	for _, text := range addrs {
		if a, err := netip.ParseAddr(text); err == nil {
			guests[a.Unmap().WithZone("")] = true
		}
	}
	l.guest.Store(&guests)
	return func() { l.guest.CompareAndSwap(&guests, nil) }
}

// callbacks is how many silent connections a worker may have: PyTorch 1.x opens one for every TCPStore that it makes.
const callbacks = 4

// silent is how many silent connections an address may have. Several nodes may share this machine.
func (l *storeACL) silent(a netip.Addr) int {
	w := l.world.Load()
	switch guests := l.guest.Load(); {
	case guests != nil && (*guests)[a]:
		return callbacks
	case w == nil && a.IsLoopback():
		return callbacks * l.slots
	case w == nil:
		return 0
	case l.open || a.IsLoopback():
		return callbacks * w.all
	}
	return callbacks * w.slots[a]
}

// admit replaces the world.
func (l *storeACL) admit(members []job.Member) {
	w := world{slots: map[netip.Addr]int{}}
	for _, m := range members {
		w.all += m.Slots
		for a := range addresses(m) {
			w.slots[a] += m.Slots
		}
	}
	l.world.Store(&w)
}

// addresses are a member's, each once.
func addresses(m job.Member) map[netip.Addr]bool {
	as := map[netip.Addr]bool{}
	for _, text := range append(m.Addrs, m.Addr) {
		if a, err := netip.ParseAddr(text); err == nil {
			as[a.Unmap().WithZone("")] = true
		}
	}
	return as
}
