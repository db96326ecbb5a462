// Package deathnotice tells the rendezvous of a launcher that was killed.
package deathnotice

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"dlrover-run/launcher/proc/guard"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// Notice keeps the death notice of this node ready. The guard sends it to the rendezvous when the launcher is
// killed, and the launcher when the guard is killed. The methods of nil do nothing.
type Notice struct {
	link    *guard.Link
	session atomic.Pointer[api.Session] // nil: not yet

	mu      sync.Mutex
	request func() ([]byte, error) // nil: there is nothing to send any more
}

// New returns nil if there is no client, because this process serves the rendezvous: then no receiver would be left.
func New(link *guard.Link, client *api.Client, run, id string) *Notice {
	if link == nil || client == nil {
		return nil
	}
	f := &Notice{link: link, request: func() ([]byte, error) { // with the token of the day
		return client.LeaveRequest(run, rendezvous.Leave{ID: id, Reason: "its launcher was killed", Killed: true})
	}}
	client.WhenDialed(f.dialed)
	return f
}

// dialed directs the notice to the peer of the last connection.
func (f *Notice) dialed(peer net.Addr) {
	tcp, ok := peer.(*net.TCPAddr)
	if !ok {
		return
	}
	addr := tcp.AddrPort()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.request == nil {
		return
	}
	request, err := f.request()
	if err != nil {
		return
	}
	f.link.SetDeathNotice(guard.DeathNotice{
		IP: addr.Addr().Unmap().AsSlice(), Zone: zoneOf(addr.Addr()), Port: addr.Port(), Request: request,
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

// Joined sets the session that Say abandons.
func (f *Notice) Joined(s *api.Session) {
	if f != nil {
		f.session.Store(s)
	}
}

// Drop withdraws the notice: this node has left by itself, or has no reason to leave.
func (f *Notice) Drop() {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.request = nil
	f.link.SetDeathNotice(guard.DeathNotice{})
}

// Say sends the notice for a launcher whose guard was killed.
func (f *Notice) Say() {
	if f == nil {
		return
	}
	if s := f.session.Load(); s != nil {
		s.Abandon()
	}
	f.link.SendDeathNotice()
}
