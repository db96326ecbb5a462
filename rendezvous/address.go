package rendezvous

import (
	"cmp"
	"net/netip"
)

// overview is on how many hosts the nodes of a world are, as far as their connections show it.
type overview struct {
	several bool
	via     string // the address of the daemon's host by which a node of another host has reached it
	by      string // the name of that node
}

func overviewOf(world []*node) (o overview) {
	for _, n := range world {
		o.several = o.several || n.host() != world[0].host()
		if o.via == "" && n.host() != "" {
			o.via, o.by = n.Via, n.Name
		}
	}
	return o
}

// host is the node's as the daemon sees it: the address from which its connection comes; "" is the daemon's own.
func (n Node) host() string {
	if n.Peer == n.Via || loopback(n.Peer) {
		return ""
	}
	return n.Peer
}

// reach is the address at which the world reaches a node that announces addr. A loopback address is of use on one host
// only. Where the world spans several hosts, all nodes get the source address of the node's connection. For a node on
// the daemon's host, they get the address by which another node has reached that host.
func (o overview) reach(n *node, addr string) string {
	if !o.several || !loopback(addr) {
		return addr
	}
	return cmp.Or(n.host(), o.via, addr)
}

func loopback(addr string) bool {
	a, err := netip.ParseAddr(addr)
	return err == nil && a.IsLoopback() || addr == "localhost"
}
