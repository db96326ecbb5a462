package rendezvous

import (
	"fmt"
	"strings"

	"dlrover-run/internal/job"
)

// maxDeputies bounds the launchers that may serve next.
const maxDeputies = 5

// Server is the launcher that serves a run to which it belongs itself.
type Server struct {
	ID   string // of its node
	Host string // its address, if it has no place in the world
	Port int    // at which it listens
	Term uint64 // a later server of the run has a higher one; the first one has 1
	// Elected: members of a world have chosen it, and OfDead: one of them had sealed that world, and is dead, not silent.
	Elected, OfDead bool
	// Alone takes silence for death.
	Alone bool
}

// Failover tells the members of a sealed world which launchers may serve the rendezvous when the present one is lost.
type Failover struct {
	Term   uint64 `json:"term"`   // launchers that this world elects have higher ones
	Server string `json:"server"` // where that launcher itself listens, HOST:PORT
	// Voters is the number of members besides that launcher, and Members of all. Without Members the server is of an
	// older version, and may seal another world while it is cut off from most of this one.
	Voters   int      `json:"voters"`
	Members  int      `json:"members,omitempty"`
	Alone    bool     `json:"alone,omitempty"`    // a launcher on a silent host is taken for dead
	Deputies []Deputy `json:"deputies,omitempty"` // in the order in which they are to serve
}

// Electorate is the number of members of which more than half elect a server. That which has sealed the world is not
// one of them if it is dead. Zero: a server that is merely silent may still act.
func (w *Failover) Electorate(dead bool) int {
	if dead || w.Alone {
		return w.Voters
	}
	return w.Members
}

// ByMember reports whether the server had a place in the world that it sealed.
func (w *Failover) ByMember() bool { return w.Voters < w.Members }

// Deputy is a member that can serve: the launcher with the ID, at HOST:PORT.
type Deputy struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	Addr string `json:"addr"`
}

// failover is that of the newest world, which s serves; nil if s is, or if the world has no other member that can
// serve.
func (e *epoch) failover(s *Server, topo Topology) *Failover {
	if s == nil {
		return nil
	}
	o, host, home := overviewOf(e.world), s.Host, ""
	w := &Failover{Term: s.Term + e.number()*(maxDeputies+1), Voters: len(e.world), Members: len(e.world), Alone: s.Alone}
	for _, n := range e.world {
		if n.ID == s.ID {
			host, home = o.reach(n, n.Addr), n.host()
			w.Voters--
		}
	}
	w.Server = hostPort(host, s.Port)
	switches, hosts := map[string]bool{}, map[string]bool{home: true}
	for _, apart := range []func(*node) bool{
		func(n *node) bool { return len(topo) > 0 && !switches[topo[n.IP]] && !hosts[n.host()] },
		func(n *node) bool { return !hosts[n.host()] },
		func(*node) bool { return true }, // better than nobody
	} {
		for _, n := range e.world {
			if n.Serve == 0 || n.ID == s.ID || w.names(n.ID) || len(w.Deputies) == maxDeputies || !apart(n) {
				continue
			}
			switches[topo[n.IP]], hosts[n.host()] = true, true
			addr := hostPort(o.reach(n, n.Addr), n.Serve)
			w.Deputies = append(w.Deputies, Deputy{ID: n.ID, Name: n.Name, Addr: addr})
		}
	}
	if len(w.Deputies) == 0 {
		return nil
	}
	return w
}

// failover is that of the epoch, unless another server may have been elected in an earlier one.
func (s *sealer) failover() *Failover {
	if _, silent := s.absent(); s.epoch.tied && silent > 0 {
		return nil
	}
	s.epoch.away, s.epoch.tied = nil, false
	return s.epoch.failover(s.cfg.Server, s.cfg.Topology)
}

// number is larger for a newer epoch of a server. With it, those that two worlds of a server elect have different
// terms.
func (e *epoch) number() uint64 { return uint64(e.id.Round)<<20 | uint64(e.id.Epoch) }

func hostPort(host string, port int) string {
	if strings.Contains(host, ":") {
		host = "[" + host + "]" // of IPv6
	}
	return fmt.Sprintf("%s:%d", host, port)
}

func (w *Failover) names(id string) bool {
	for _, h := range w.Deputies {
		if h.ID == id {
			return true
		}
	}
	return false
}

// away is a member of the newest world that has gone with its vote.
type away struct {
	id, name string
	silent   bool // it may live
	early    bool // it went while the world was rebuilt, and so has no place in it
}

// cameBack books that a node of the name has joined: the one that was silent has ended, or has given up its vote.
func (e *epoch) cameBack(name string) {
	for i := range e.away {
		e.away[i].silent = e.away[i].silent && e.away[i].name != name
	}
}

// outvoted reports whether members of the newest world may have elected another server. One that seals a world all the
// same would divide the run. Those that wait for the next world have no vote any more. With half of the world this
// server goes on, but no other may be elected in its next worlds: if it dies, the silent half may serve itself.
func (s *sealer) outvoted() bool {
	e, server, most := s.epoch, s.cfg.Server, (s.epoch.size-1)/2
	if server == nil || server.Alone || !e.votes {
		return false
	}
	if e.tied = false; e.size-len(e.world)+len(e.away) <= most {
		return false
	}
	absent, silent := s.absent()
	ofDead := e.other && server.OfDead
	if ofDead {
		absent, silent = absent-1, silent-1 // the dead server has no vote
	}
	if absent <= most || silent == 0 {
		return false
	}
	if 2*absent == e.size && !ofDead {
		e.tied = true
		return false
	}
	s.shortage.tellWaiting(job.EventTooFew, "", fmt.Sprintf("no world is sealed while %d of the %d nodes of the newest "+
		"one are away, because they may have elected another server: start the launchers of silent hosts again, or, if a "+
		"silent host is a dead host here, start all launchers with --rdzv-conf=alone=true", absent, e.size))
	return true
}

// absent is the number of members of the newest world that may have voted, and of those that may still do so: a member
// that was started again does not. One that has come back has given up its vote before it asked for a place.
func (s *sealer) absent() (absent, silent int) {
	unknown := s.epoch.size - len(s.epoch.world)
	absent, silent = unknown, unknown
	for _, a := range s.epoch.away {
		n := s.members.nodes[a.id]
		if a.early && n != nil && s.epoch.seated(n) {
			continue // it was back in time
		}
		if a.early {
			absent, silent = absent-1, silent-1 // it is one of the unknown
		}
		if n == nil {
			absent++
		}
		if a.silent {
			silent++
		}
	}
	return absent, silent
}
