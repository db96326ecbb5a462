// Package storeacl admits connections to the workers' store.
package storeacl

import (
	"net/netip"
	"sync/atomic"

	"dlrover-run/internal/job"
)

// ACL holds the addresses that may connect to the workers' store. PyTorch's protocol has no password, so a
// connection has to come from this machine or from an address of a node of the present world. --insecure admits all.
type ACL struct {
	open  bool
	Slots int // of this node
	world atomic.Pointer[world]
	guest atomic.Pointer[map[netip.Addr]bool] // other addresses that may connect during a check
}

// world is the workers of each address, and of all.
type world struct {
	slots map[netip.Addr]int
	all   int
}

// New admits all if open; slots are the workers of this node.
func New(open bool, slots int) *ACL { return &ACL{open: open, Slots: slots} }

// Allow reports whether an address may connect.
func (l *ACL) Allow(a netip.Addr) bool {
	if l.open || a.IsLoopback() {
		return true
	}
	if guests := l.guest.Load(); guests != nil && (*guests)[a] {
		return true
	}
	w := l.world.Load()
	return w != nil && w.slots[a] > 0
}

// Lend lets the nodes at these addresses connect to the store until the returned function is called. There is one
// check at a time.
func (l *ACL) Lend(addrs []string) (end func()) {
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

// Silent is how many silent connections an address may have. Several nodes may share this machine.
func (l *ACL) Silent(a netip.Addr) int {
	w := l.world.Load()
	switch guests := l.guest.Load(); {
	case guests != nil && (*guests)[a]:
		return callbacks
	case w == nil && a.IsLoopback():
		return callbacks * l.Slots
	case w == nil:
		return 0
	case l.open || a.IsLoopback():
		return callbacks * w.all
	}
	return callbacks * w.slots[a]
}

// Admit replaces the world.
func (l *ACL) Admit(members []job.Member) {
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
