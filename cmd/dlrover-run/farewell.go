package main

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"dlrover-run/launcher/proc/guard"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// farewell keeps ready what the guard says to the rendezvous when the launcher is killed, and the launcher when the
// guard is: that this node is lost. Nil, and all of its methods with it, does nothing.
type farewell struct {
	link    *guard.Link
	session atomic.Pointer[api.Session] // nil: not yet

	mu      sync.Mutex
	request []byte // nil: nothing is to be said any more
}

// newFarewell is that of a launcher whose rendezvous is served elsewhere: where this process serves it, nobody is left
// to be told.
func newFarewell(link *guard.Link, e *endpoint, run, id string) *farewell {
	if link == nil || e.client == nil {
		return nil
	}
	request, err := e.client.LeaveRequest(run,
		rendezvous.Leave{ID: id, Reason: "its launcher was killed", Killed: true})
	if err != nil {
		return nil
	}
	f := &farewell{link: link, request: request}
	e.client.WhenDialed(f.dialed)
	return f
}

// dialed: the farewell goes where the last connection went.
func (f *farewell) dialed(peer net.Addr) {
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

// joined: who says the farewell also tells the session.
func (f *farewell) joined(s *api.Session) {
	if f != nil {
		f.session.Store(s)
	}
}

// drop: this node has said good-bye itself, or has no reason to.
func (f *farewell) drop() {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.request = nil
	f.link.SetDeathNotice(guard.DeathNotice{})
}

// say is for a launcher whose guard was killed.
func (f *farewell) say() {
	if f == nil {
		return
	}
	if s := f.session.Load(); s != nil {
		s.Abandon()
	}
	f.link.SendDeathNotice()
}
