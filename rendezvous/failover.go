package rendezvous

import (
	"fmt"
	"strings"
)

// maxDeputies bounds the launchers that may serve next.
const maxDeputies = 5

// Server is the launcher that serves a run to which it belongs itself.
type Server struct {
	ID   string // of its node
	Host string // its address, if it has no place in the world
	Port int    // at which it listens
	Term uint64 // a later server of the run has a higher one; the first one has 1
}

// Failover tells the members of a sealed world which launchers may serve the rendezvous when the present one is lost.
type Failover struct {
	Term   uint64 `json:"term"`   // launchers that this world elects have higher ones
	Server string `json:"server"` // where that launcher itself listens, HOST:PORT
	// Voters is the number of members besides that launcher.
	Voters   int      `json:"voters"`
	Deputies []Deputy `json:"deputies,omitempty"` // in the order in which they are to serve
}

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
	w := &Failover{Term: s.Term + e.number()*(maxDeputies+1), Voters: len(e.world)}
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
