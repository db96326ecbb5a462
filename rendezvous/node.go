package rendezvous

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

type nodeState string

const (
	waiting   nodeState = "waiting"   // joined, not in the world
	checking  nodeState = "checking"  // as waiting, but a check has to clear it first
	barred    nodeState = "barred"    // joined, and gets no workers
	pending   nodeState = "stopping"  // member of a broken epoch that has not joined again
	member    nodeState = "member"    // in the world that is releasing or running
	succeeded nodeState = "succeeded" // member whose workers all exited with 0
	leaving   nodeState = "leaving"   // it will go, and the others do not wait for it
)

// node is a launcher that is here.
type node struct {
	Node
	state       nodeState
	rank        int       // group rank in the newest world it was in, or -1
	arrival     int       // order of first arrival
	since       time.Time // start of the launcher
	starts      int       // worlds that were sealed with it
	rankBase    int
	leaf        string // its switch when its world was sealed, see Topology.leafOf
	attached    int    // requests held open
	detached    time.Time
	broken      bool
	silent      bool // it broke because the host had given no sign of life
	unreachable bool // and it answers no new connection either
	hungUp      bool // it was closed while no request was open
	dir         Directive
	known       uint64 // the directive before, if dir tells its launcher nothing new; or 0
	differs     bool   // its Params are not the run's
	failed      bool   // workers of it have, which the others outlive

	cleared  bool       // its newest check has passed
	until    time.Time  // and counts until then; zero: for good
	domain   string     // of its newest check that has passed
	bar      *job.Cause // a check has failed, and none has passed since
	again    bool       // the next gate may check it again, although it is barred
	unsure   bool       // the check that bars it has proved nothing
	unpaired bool       // it is cleared, but had no partner
	late     bool       // the present gate has asked it once more for that
	asked    bool       // it has got a Check, and the answer is missing
	optional bool       // it waits, and has a Check all the same; its answer is not waited for
	drained  *job.Cause // it has been asked to leave
}

// idle: it has no workers, and none that it would have to stop.
func (n *node) idle() bool { return n.state == waiting || n.state == checking || n.state == barred }

// away: it has no request open, and nothing is known of its connection.
func (n *node) away() bool { return n.attached == 0 && !n.broken }

// mute: it may live, and not reach us.
func (n *node) mute() bool { return n.attached == 0 && (!n.broken || n.silent) }

// suspect: its connection broke, and it has not come back: it has no request open.
func (n *node) suspect() bool { return n.broken }

// supersededBy: a pod with the same node rank proves that a suspect is dead, and one
// of a later generation that any is.
func (o *node) supersededBy(n Node) bool {
	return o.suspect() || o.state == leaving || o.Generation > 0 && n.Generation > o.Generation
}

func (n Node) can(a Ability) bool { return slices.Contains(n.Can, a) }

func (n Node) machine() string { return cmp.Or(n.Machine, n.Name) }

// renewed is n as it joins for the next epoch: it may have another address and other ports, and the rest stays.
func (n Node) renewed(o Node) Node {
	n.Slots, n.Addr, n.Addrs, n.Peer, n.Via, n.Ports, n.Bases = o.Slots, o.Addr, o.Addrs, o.Peer, o.Via, o.Ports, o.Bases
	return n
}

// validate checks everything that a node brings against its bound.
func (n Node) validate() error {
	if err := n.checkNames(); err != nil {
		return err
	}
	return n.checkOffers()
}

func (n Node) checkNames() error {
	for _, name := range []string{n.ID, n.Name, n.Role, n.Machine} {
		if len(name) > MaxName || !text.Printable(name) {
			return fmt.Errorf("the id, name, role or machine %.100q of a node: %s, at most %d bytes",
				name, text.PrintableRule, MaxName)
		}
	}
	if len(n.Addrs) > MaxAddrs {
		return fmt.Errorf("node %q brings %d addresses; at most %d are kept", n.Name, len(n.Addrs), MaxAddrs)
	}
	for _, addr := range append([]string{n.Addr, n.IP}, n.Addrs...) {
		if len(addr) > MaxName {
			return fmt.Errorf("node %q brings the address %.100q of %d bytes; at most %d are kept",
				n.Name, addr, len(addr), MaxName)
		}
	}
	return nil
}

// checkOffers checks a node's extra offers against the bounds.
func (n Node) checkOffers() error {
	if len(n.Ports) > MaxPorts {
		return fmt.Errorf("node %q brings %d ports; at most %d are kept", n.Name, len(n.Ports), MaxPorts)
	}
	if len(n.Bases) > maxBases {
		return fmt.Errorf("node %q brings %d first ports; at most %d are kept", n.Name, len(n.Bases), maxBases)
	}
	for _, p := range slices.Concat(n.Ports, n.Bases) {
		if p < 1 || p > 65535 {
			return fmt.Errorf("node %q brings port %d; need 1 to 65535", n.Name, p)
		}
	}
	if p := n.Life.Port; p < 0 || p > 65535 || len(n.Life.Key) > MaxName {
		return fmt.Errorf("node %q lives at port %d with a key of %d bytes; need 1 to 65535, and at most %d", n.Name, p,
			len(n.Life.Key), MaxName)
	}
	if n.Serve < 0 || n.Serve > 65535 {
		return fmt.Errorf("node %q can serve at port %d; need 1 to 65535", n.Name, n.Serve)
	}
	if len(n.Can) > maxAbilities {
		return fmt.Errorf("node %q brings %d abilities; at most %d are kept", n.Name, len(n.Can), maxAbilities)
	}
	return nil
}

// lost is l with the place of the node.
func (n *node) lost(l job.Loss) job.Loss {
	l.Node, l.GroupRank, l.RankBase, l.Slots, l.Switch = n.Name, n.rank, n.rankBase, n.Slots, n.leaf
	return l
}
