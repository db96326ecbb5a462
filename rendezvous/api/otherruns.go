package api

import (
	"maps"
	"slices"
	"time"

	"dlrover-run/rendezvous"
)

// otherRunsAfter is how long a run without its first world waits before other such runs are considered: the nodes of
// one job seldom arrive at the same moment.
const otherRunsAfter = 5 * time.Second

// lookForOtherRuns looks once, later, for two runs that would make one world. It is called after a node has joined.
func (h *Hub) lookForOtherRuns(r *run) {
	if r.lacks() == (rendezvous.Lack{}) {
		return
	}
	if h.runs.Len() > 1 && h.looking.CompareAndSwap(false, true) {
		time.AfterFunc(otherRunsAfter, h.tellOtherRuns)
	}
}

func (h *Hub) tellOtherRuns() {
	h.looking.Store(false)
	runs, lacks := h.runs.All(), map[string]rendezvous.Lack{}
	for id, r := range runs {
		if l := r.lacks(); l != (rendezvous.Lack{}) {
			lacks[id] = l
		}
	}
	ids := slices.Sorted(maps.Keys(lacks))
	for i, id := range ids {
		other := slices.IndexFunc(ids, func(o string) bool { return o != id && lacks[id].With(lacks[o]) })
		if other >= 0 {
			_ = runs[ids[i]].step(rendezvous.OtherRun{ID: ids[other]}) // a run that has ended meanwhile needs no hint
		}
	}
}

func (r *run) lacks() rendezvous.Lack {
	r.Lock()
	defer r.Unlock()
	return r.round.Lacks()
}
