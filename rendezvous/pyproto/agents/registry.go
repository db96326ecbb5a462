package agents

import (
	"fmt"
	"strconv"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// registry holds the agents, and knowledge of callers that are no agents yet, or no more. Host.mu guards it.
type registry struct {
	agents map[caller]*agent
	names  map[string]*agent
	ranks  map[int]*agent
	count  int               // agents that have come
	waits  int               // agents whose directive is to wait
	astray map[caller]bool   // agents that are in no node any more, and are called back
	places map[caller]string // the machines of agents that have joined
	params map[caller]rendezvous.Params
	last   *rendezvous.Params // of the newest agent that has sent its own
	steps  map[caller]int     // of the checkpoints in memory
}

// maxCallers bounds each of the maps about callers that may be in no run. One that is full is emptied.
const maxCallers = rendezvous.MaxNodes

func newRegistry() registry {
	return registry{agents: map[caller]*agent{}, names: map[string]*agent{}, ranks: map[int]*agent{},
		astray: map[caller]bool{}, places: map[caller]string{}, params: map[caller]rendezvous.Params{},
		steps: map[caller]int{}}
}

// heard notes a sign of life.
func (r *registry) heard(now time.Time, who caller) {
	if a := r.agents[who]; a != nil {
		a.seen = now
	}
}

// locate notes the machine of an agent.
func (r *registry) locate(who caller, machine string) {
	if len(r.places) >= maxCallers {
		clear(r.places)
	}
	r.places[who] = machine
}

// bring keeps the rules that an agent will join with.
func (r *registry) bring(who caller, p rendezvous.Params) {
	if len(r.params) >= maxCallers {
		clear(r.params) // the newest count for all
	}
	r.params[who], r.last = p, &p
}

// rulesOf are the rules that the agent has sent; an agent that returns does not send them again.
func (r *registry) rulesOf(who caller) *rendezvous.Params {
	if p, ok := r.params[who]; ok {
		return &p
	}
	return r.last
}

// claim is the answer to an agent that wants to be the node of a rank.
type claim struct {
	params rendezvous.Params
	again  *agent // it is a node already
	former *agent // the agent that has to leave first, and why
	why    string
}

// claim decides whether an agent can be the node of a rank.
func (r *registry) claim(now time.Time, who caller, rank, slots int, ip string) (c claim, err error) {
	a, p, holder := r.agents[who], r.rulesOf(who), r.ranks[rank]
	if p == nil {
		return c, fmt.Errorf("agents: the rules of the run are not known: node %d was here before this master; "+
			"start its pod again", who.id)
	}
	c.params = *p
	switch {
	case a != nil && a.node.Rank == rank && (a.works || a.node.Slots == slots && a.node.IP == ip):
		c.again = a
	case a != nil && a.node.Rank != rank && !a.exited:
		err = fmt.Errorf("agents: two agents with NODE_ID=%d, of node ranks %d and %d: every one needs a NODE_ID of "+
			"its own", who.id, a.node.Rank, rank)
	case holder != nil && holder != a && holder.who.id >= who.id && !holder.exited && !holder.silent(now):
		err = fmt.Errorf("agents: two agents with NODE_RANK=%d, of NODE_ID %d and %d: every one needs a NODE_RANK of "+
			"its own, and the pod that takes another's place a larger NODE_ID", rank, holder.who.id, who.id)
	case a != nil:
		c.former, c.why = a, "another agent has its NODE_ID"
	case holder != nil:
		c.former, c.why = holder, fmt.Sprintf("replaced by node %d", who.id)
	}
	return c, err
}

// add makes a node of an agent.
func (r *registry) add(now time.Time, who caller, p rendezvous.Params, rank, slots int, ip string) *agent {
	r.count++
	name := nodeName(who)
	a := &agent{who: who, params: p, seen: now, node: rendezvous.Node{
		ID: fmt.Sprintf("%s@%s.%d", name, strconv.FormatInt(now.UnixNano(), 36), r.count), Name: name, Rank: rank,
		Generation: who.id, Addr: ip, IP: ip, Slots: slots, Agent: rendezvous.AgentDLRover,
		Machine: r.places[who],
	}}
	r.agents[who], r.names[name], r.ranks[rank] = a, a, a
	delete(r.astray, who)
	return a
}

// remove reports false for an agent that is not there any more.
func (r *registry) remove(a *agent) bool {
	if r.agents[a.who] != a {
		return false
	}
	delete(r.agents, a.who)
	if r.names[a.node.Name] == a {
		delete(r.names, a.node.Name)
	}
	if r.ranks[a.node.Rank] == a {
		delete(r.ranks, a.node.Rank)
	}
	delete(r.steps, a.who)
	r.waitsBy(a, -1)
	return true
}

// direct gives an agent its newest directive.
func (r *registry) direct(a *agent, d rendezvous.Directive) {
	r.waitsBy(a, -1)
	a.dir = d
	r.waitsBy(a, 1)
}

// waitsBy keeps the number of agents that wait for others.
func (r *registry) waitsBy(a *agent, n int) {
	if a.dir.Kind == job.Wait {
		r.waits += n
	}
}

// strayed calls back an agent that has been here before. Either its node is gone, or its workers run since before this
// master and others wait for it.
func (r *registry) strayed(who caller) int {
	if r.astray[who] || r.waits > 0 {
		return 1
	}
	return 0
}

// stray notes that an agent is in no node any more, and does not know it.
func (r *registry) stray(who caller) {
	if len(r.astray) >= maxCallers {
		clear(r.astray) // an agent that polls is noted again
	}
	r.astray[who] = true
}

// silent returns the agents that may have died.
func (r *registry) silent(now time.Time) (as []*agent) {
	for _, a := range r.agents {
		if !a.exited && a.silent(now) {
			as = append(as, a)
		}
	}
	return as
}

// sameStep reports whether all agents of the world have reported the same step of their checkpoints in memory.
func (r *registry) sameStep(who caller, step int) bool {
	if r.agents[who] == nil {
		return false
	}
	r.steps[who] = step
	for other, a := range r.agents {
		if told, ok := r.steps[other]; a.worked.Round > 0 && !a.exited && (!ok || told != step) {
			return false
		}
	}
	return true
}
