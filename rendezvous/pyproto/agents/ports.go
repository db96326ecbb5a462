package agents

import (
	"maps"
	"time"

	"dlrover-run/rendezvous/pyproto"
)

// ports finds one from which on ports are free on all nodes, for the collectives of Ascend's devices: each agent offers
// a port that is free on its own, and gets either the common one or the next to try. Agents ask before they join, every
// five seconds until they have it, and never again.
type ports struct {
	offers map[caller]offer
	agreed int // of the agents that are here; 0: nothing yet
}

type offer struct {
	port int
	at   time.Time
}

// ask takes an offer of one of so many agents.
func (p *ports) ask(now time.Time, who caller, port, need int) (common, next int) {
	switch {
	case p.agreed > port:
		return 0, p.agreed
	case p.agreed > 0:
		return p.agreed, 0
	case len(p.offers) >= maxCallers:
		clear(p.offers)
	}
	p.offers[who] = offer{port, now}
	maps.DeleteFunc(p.offers, func(_ caller, o offer) bool { return now.Sub(o.at) > silence }) // it has died
	lowest, highest := port, port
	for _, o := range p.offers {
		lowest, highest = min(lowest, o.port), max(highest, o.port)
	}
	if lowest != highest || len(p.offers) < need || port <= 0 {
		return 0, highest
	}
	clear(p.offers)
	p.agreed = port
	return port, 0
}

// forget forgets an agent, and with the last one the agreed port.
func (p *ports) forget(who caller, last bool) {
	delete(p.offers, who)
	if last {
		p.agreed = 0
	}
}

// syncPort returns the agreed port. An agent that comes later, such as a replacement, gets the port that the others
// have, as it is too late for them to take another.
func (h *Host) syncPort(who caller, m *pyproto.Message) *pyproto.Message {
	h.mu.Lock()
	defer h.mu.Unlock()
	need := 1
	if h.reg.last != nil {
		need = h.reg.last.Min
	}
	offered := m.Int("port")
	port, next := h.ports.ask(time.Now(), who, offered, need)
	if port > 0 && port != offered {
		h.cfg.Log.Warn("the ports that the nodes have agreed on are not free on a node that came later; start its pod on "+
			"another machine, or all of them again", "node_id", who.id, "port", port, "free_from", offered)
	}
	return pyproto.DialectOf(m).New("SyncTrainingPort", pyproto.Field{Name: "port", Value: port},
		pyproto.Field{Name: "newport", Value: next})
}
