package agents

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	"dlrover-run/internal/job"
	"dlrover-run/internal/pickle"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto"
)

// worlds numbers epochs as DLRover numbers rounds: every start of workers has one, and with it keys of its own.
type worlds struct {
	last    int
	numbers map[job.EpochID]int
	answers map[answerKey][]byte // encoded: all nodes of a world ask for the same
}

type answerKey struct {
	number  int
	dialect pyproto.Dialect
}

func newWorlds() worlds {
	return worlds{numbers: map[job.EpochID]int{}, answers: map[answerKey][]byte{}}
}

// number is that of an epoch. Older ones than the one before are forgotten.
func (w *worlds) number(e job.EpochID) int {
	n, ok := w.numbers[e]
	if ok {
		return n
	}
	w.last++
	w.numbers[e] = w.last
	for other, n := range w.numbers {
		if n < w.last-1 {
			delete(w.numbers, other)
		}
	}
	for key := range w.answers {
		if key.number < w.last-1 {
			delete(w.answers, key)
		}
	}
	return w.last
}

// prefix is where the agents of a world keep their keys (MasterKVStore and PrefixStore in DLRover's agent).
func prefix(number int) string {
	return fmt.Sprintf("%s/torch.rendezvous.%s.%d.0/", training, training, number)
}

// commWorld returns the world of the node's directive, or that there is none yet. An agent that has received a world
// counts as having workers from then on.
func (h *Host) commWorld(ctx context.Context, who caller, d pyproto.Dialect) ([]byte, error) {
	h.mu.Lock()
	a := h.reg.agents[who]
	if a == nil || !a.mayRun() {
		if a == nil && h.reg.last != nil {
			h.reg.stray(who)
		}
		why, known := a.idle(), h.worlds.last > 0
		h.mu.Unlock()
		if why == aside || why == gathering && (known || h.cfg.sealed(ctx)) {
			return elsewhere[d], nil
		}
		return numbered(d, 0), nil
	}
	dir, key := a.dir, answerKey{h.worlds.number(a.dir.EpochID), d}
	answer := h.worlds.answers[key]
	h.mu.Unlock()
	if answer == nil {
		world, err := h.cfg.Service.World(ctx, h.cfg.Run)
		if err != nil {
			return nil, err
		}
		answer = h.worldOf(world, a, dir, key)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if answer == nil || a.dir.EpochID != dir.EpochID || !a.mayRun() {
		return numbered(d, 0), nil
	}
	a.works, a.worked, a.place = true, dir.EpochID, dir.Place
	return answer, nil
}

// mayRun: the node is in a world that has not ended for it.
func (a *agent) mayRun() bool {
	return (a.dir.Kind == job.Lead || a.dir.Kind == job.Run) && a.dir.EpochID != a.ended && !a.dir.Hold
}

// idle is why an agent has no world.
type idle int

const (
	busy      idle = iota // it has one, or ends
	gathering             // it waits for others, or they have a world without it
	aside                 // it is to have none now
)

func (a *agent) idle() idle {
	if a == nil {
		return busy
	}
	switch d := a.dir; {
	case d.Kind == job.Bar || d.Hold:
		return aside
	case d.Kind != job.Wait:
		return busy
	case d.Paused != nil || d.Barred != nil:
		return aside
	default:
		return gathering
	}
}

// elsewhere are the answers with a world that no agent is in. An agent that gets one waits; without, it gives up after
// its join timeout.
var elsewhere = func() map[pyproto.Dialect][]byte {
	m := map[pyproto.Dialect][]byte{}
	for _, d := range pyproto.Dialects() {
		world := &pyproto.Dict{Pairs: []pyproto.Pair{{Key: rendezvous.MaxNodes, Value: 1}}}
		m[d] = pickle.Encode(rendezvousState(d, world, 0, 0, 0))
	}
	return m
}()

// worldOf encodes the world of an epoch, once, and stores the keys that the agents will read there. Nil: the table is
// that of another world by now.
func (h *Host) worldOf(world []job.Member, a *agent, dir rendezvous.Directive, key answerKey) []byte {
	if len(world) != dir.Place.GroupWorldSize || world[dir.Place.GroupRank].Node != a.node.Name {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if answer := h.worlds.answers[key]; answer != nil || key.number < h.worlds.last-1 {
		return answer
	}
	dict := &pyproto.Dict{}
	ours := false
	for i, m := range world {
		rank := rendezvous.MaxNodes + i // a launcher of ours: no agent has this rank
		if a := h.reg.names[m.Node]; a != nil && m.Agent != "" {
			rank = a.node.Rank
		}
		ours = ours || i == 0 && rank >= rendezvous.MaxNodes
		dict.Pairs = append(dict.Pairs, pyproto.Pair{Key: rank, Value: m.Slots})
	}
	h.store.forget(training, h.worlds.last-1)
	h.store.sizes[key.number] = len(world)
	h.store.seed(world, ours, dir.Place, key)
	answer := pickle.Encode(rendezvousState(key.dialect, dict, 0, key.number, 0))
	h.worlds.answers[key] = answer
	return answer
}

// seed writes the keys that our launchers do not write themselves: the workers' meeting place, if one of them leads.
// Agents of 0.4 with torch 2.4 or later also exchange ranks before their leader publishes the place. The others hear of
// the world only then, so seed writes their ranks.
func (s *store) seed(world []job.Member, ours bool, place *job.Place, key answerKey) {
	p := prefix(key.number)
	if ours && place.MasterPort > 0 {
		s.put(p+masterAddr, []byte(place.MasterAddr))
		s.put(p+masterPort, []byte(strconv.Itoa(place.MasterPort)))
	}
	if key.dialect != pyproto.Grpc {
		return
	}
	for i, m := range world {
		info, _ := json.Marshal(map[string]any{"role": "dlrover-trainer", "rank": i, "local_world_size": m.Slots})
		s.put(p+roleInfo+strconv.Itoa(i), info)
		if ours {
			assigned, _ := json.Marshal([]int{m.RankBase, place.WorldSize, m.RankBase, place.WorldSize})
			s.put(p+assignedRanks+strconv.Itoa(i), assigned)
		}
	}
}
