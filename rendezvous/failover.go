package rendezvous

import (
	"fmt"
	"slices"
	"strings"
	"time"

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
	// World is the Failover of the world in Epoch, which has chosen it.
	World *Failover
	Epoch job.EpochID
	// Alone takes silence for death.
	Alone bool
	// Bars are those that it was told by the server before it; nil: none.
	Bars *Bars
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
	// Names are those of the members by group rank, if they are few, so that the next server can say who is missing. Seat
	// is the rank of the one that serves.
	Names []string `json:"names,omitempty"`
	Seat  int      `json:"seat,omitempty"`
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

// of reports whether w is that of the world of e.
func (w *Failover) of(id job.EpochID, e *epoch) bool {
	return w != nil && id == e.id && w.Members == e.size
}

// name is that of the member with the group rank; "": it is not known.
func (w *Failover) name(rank int) string {
	if rank < 0 || rank >= len(w.Names) || len(w.Names) != w.Members {
		return ""
	}
	return w.Names[rank]
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
	w := &Failover{Term: s.Term + e.number()*(maxDeputies+1), Voters: len(e.world), Members: len(e.world), Alone: s.Alone}
	for i, n := range e.world {
		if n.ID == s.ID {
			host, home, w.Seat = o.reach(n, n.Addr), n.host(), i
			w.Voters--
		}
		if len(e.world) <= maxKeptNames {
			w.Names = append(w.Names, n.Name)
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
	s.epoch.away, s.epoch.started, s.epoch.tied = nil, nil, false
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

// deputy reports whether the launcher with the ID may serve next.
func (e *epoch) deputy(id string) bool { return e.plan != nil && e.plan.names(id) }

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
	id, name string    // "": not known
	rank     int       // in the world
	heard    time.Time // it lived until then, or later
	silent   bool      // it may live
	early    bool      // it went before the world was rebuilt, and so has no place in it
}

// cameBack books that a node has joined. A member that joins has given up its vote. Resume tells the place of one that
// has not been here since.
func (e *epoch) cameBack(n *node, r *Resume) {
	if !e.votes && !e.tied {
		return
	}
	if e.started == nil {
		e.started = map[string]time.Time{}
	}
	if n.since.After(e.started[n.Name]) {
		e.started[n.Name] = n.since
	}
	for i := range e.away {
		a := &e.away[i]
		if a.id == "" && r != nil && r.EpochID == e.id && r.Place.GroupRank == a.rank {
			a.id = n.ID
		}
		a.silent = a.silent && a.id != n.ID
	}
}

// mute reports whether a member that has gone may still live: no launcher of its name was started since.
func (e *epoch) mute(a away) bool { return a.silent && !e.started[a.name].After(a.heard) }

// forsake books the members of a rebuilt world that have not come back to an elected server, and returns the names of
// all that are missing, as far as they are known. Of a dead server outvoted knows.
func (e *epoch) forsake(w *rebuild, s *Server) (names []string) {
	if !e.votes || s == nil {
		return nil
	}
	of := s.World
	if !of.of(s.Epoch, e) {
		of = &Failover{Members: len(w.world)}
	}
	for rank, n := range w.world {
		a := away{rank: rank, heard: w.began, silent: true, early: true}
		if a.name = of.name(rank); n == nil && a.name != "" {
			names = append(names, a.name)
		}
		known := slices.ContainsFunc(e.away, func(a away) bool { return a.rank == rank })
		if n == nil && !known && !(s.OfDead && rank == of.Seat) {
			e.away = append(e.away, a)
		}
	}
	return names
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
		if a.early {
			absent, silent = absent-1, silent-1 // it is one of the unknown
		}
		if s.members.nodes[a.id] == nil {
			absent++
		}
		if s.epoch.mute(a) {
			silent++
		}
	}
	return absent, silent
}
