package rendezvous

import (
	"fmt"
	"time"
)

// resumeWindow is how long a daemon that has lost its memory waits for all members
// of a running world to introduce themselves again.
const resumeWindow = SilentGrace

// Resume is what a launcher with running workers tells a daemon that does not know
// it: the epoch that runs and its own place in it. A daemon that was started again
// rebuilds the world from all members' words, and no worker notices.
type Resume struct {
	Round int   `json:"round"`
	Epoch int   `json:"epoch"`
	Place Place `json:"place"`
}

// resume is a world being rebuilt.
type resume struct {
	round, epoch int
	world        []*node // by group rank, nil where nobody has come yet
	missing      int
	until        time.Time
}

// adopt gives a node its old place back. It reports false when this Round has a
// history of its own, in which the node's world has no place.
func (r *Round) adopt(now time.Time, n *node, e *Resume) bool {
	if e == nil || r.phase != forming || (r.round > 0 && r.resume == nil) || !e.Place.plausible() {
		return false
	}
	if r.resume == nil {
		r.resume = &resume{round: e.Round, epoch: e.Epoch, world: make([]*node, e.Place.GroupWorldSize), missing: e.Place.GroupWorldSize, until: now.Add(resumeWindow)}
		r.round, r.epoch, r.restarts, r.worldSize = e.Round, e.Epoch, e.Place.RestartCount, e.Place.WorldSize
		r.note("resume", n.Name, fmt.Sprintf("waiting for %d nodes of a running world", e.Place.GroupWorldSize))
	}
	w := r.resume
	if w.round != e.Round || w.epoch != e.Epoch || len(w.world) != e.Place.GroupWorldSize || w.world[e.Place.GroupRank] != nil {
		return false
	}
	w.world[e.Place.GroupRank] = n
	w.missing--
	n.state, n.rank, n.rankBase = member, e.Place.GroupRank, e.Place.RankBase
	r.direct(n, Directive{Kind: Run, Place: &e.Place})
	return true
}

func (p Place) plausible() bool {
	return p.GroupWorldSize >= 1 && p.GroupWorldSize <= MaxNodes && p.GroupRank >= 0 && p.GroupRank < p.GroupWorldSize
}

// settleResume ends the rebuilding when everyone is back, or when waiting is useless.
func (r *Round) settleResume(now time.Time) {
	w := r.resume
	if w.missing > 0 && now.Before(w.until) {
		return
	}
	r.resume, r.phase = nil, running
	for _, n := range w.world {
		if n != nil {
			r.world = append(r.world, n)
		}
	}
	if w.missing == 0 {
		r.note("resumed", "", "the running world is complete again")
		return
	}
	r.elastic = true
	r.breakWorld(now, Cause{Kind: CauseLoss, Text: fmt.Sprintf("%d of %d nodes did not come back after the rendezvous daemon was started again", w.missing, len(w.world))})
}

// forgo takes a node out of a world that is being rebuilt.
func (w *resume) forgo(n *node) {
	if w.world[n.rank] == n {
		w.world[n.rank] = nil
		w.missing++
	}
}
