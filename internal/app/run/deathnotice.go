package run

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"dlrover-run/launcher/proc/guard"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// deathNotice keeps the death notice of this node ready. The guard sends it to the rendezvous when the launcher is
// killed, and the launcher when the guard is killed. The methods of nil do nothing.
type deathNotice struct {
	link    *guard.Link
	session atomic.Pointer[api.Session] // nil: not yet

	mu      sync.Mutex
	request []byte // nil: there is nothing to send any more
}

// newDeathNotice returns nil if this process serves the rendezvous: then no receiver would be left.
func newDeathNotice(link *guard.Link, e *endpoint, run, id string) *deathNotice {
	if link == nil || e.client == nil {
		return nil
	}
	request, err := e.client.LeaveRequest(run,
		rendezvous.Leave{ID: id, Reason: "its launcher was killed", Killed: true})
	if err != nil {
		return nil
	}
	f := &deathNotice{link: link, request: request}
	e.client.WhenDialed(f.dialed)
	return f
}

// dialed directs the notice to the peer of the last connection.
func (f *deathNotice) dialed(peer net.Addr) {
	tcp, ok := peer.(*net.TCPAddr)
	if !ok {
		return
	}
	addr := tcp.AddrPort()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.link.SetDeathNotice(guard.DeathNotice{
		IP: addr.Addr().Unmap().AsSlice(), Zone: zoneOf(addr.Addr()), Port: addr.Port(), Request: f.request,
	})
}

func zoneOf(a netip.Addr) uint32 {
	if a.Zone() == "" {
		return 0
	}
	i, err := net.InterfaceByName(a.Zone())
	if err != nil {
		return 0
	}
	return uint32(i.Index)
}

// joined sets the session that say abandons.
func (f *deathNotice) joined(s *api.Session) {
	if f != nil {
		f.session.Store(s)
	}
}

// drop withdraws the notice: this node has left by itself, or has no reason to leave.
func (f *deathNotice) drop() {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.request = nil
	f.link.SetDeathNotice(guard.DeathNotice{})
}

// say sends the notice for a launcher whose guard was killed.
func (f *deathNotice) say() {
	if f == nil {
		return
	}
	if s := f.session.Load(); s != nil {
		s.Abandon()
	}
	f.link.SendDeathNotice()
}
