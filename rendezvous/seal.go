package rendezvous

import (
	"fmt"
	"slices"
	"time"
)

func (r *Round) trySeal(now time.Time) bool {
	if r.owing > 0 || now.Before(r.holdAt) {
		return false
	}
	size := r.params.floor(min(r.joined, r.params.Max))
	if size < r.params.Min {
		r.lastCallAt, r.short = time.Time{}, true
		return false
	}
	if r.joined < r.params.Max && (r.fresh() || r.short) && !r.lastCallOver(now) {
		return false
	}
	r.seal(size)
	return true
}

// lastCallOver starts the last call when the world first could be sealed. A world
// that merely lost nodes skips it: everyone who is known is here.
func (r *Round) lastCallOver(now time.Time) bool {
	if r.lastCallAt.IsZero() {
		r.lastCallAt = now.Add(r.params.LastCall)
		r.note("last-call", "", fmt.Sprintf("%d of %d:%d nodes; sealing in %s", r.joined, r.params.Min, r.params.Max, r.params.LastCall))
	}
	return !now.Before(r.lastCallAt)
}

func (r *Round) seal(size int) {
	chosen := choose(r.waiters(), size)
	ranked := rank(chosen, r.cfg.Topology, r.params.Static)
	if r.resumed { // an earlier daemon may have announced an epoch that would have the same name
		r.id.Term, r.resumed = max(r.cfg.Term, r.id.Term+1), false
	}
	if !r.elastic && slices.Equal(r.world, ranked) {
		r.id.Epoch++
	} else {
		r.id.Round++
		r.id.Epoch = 0
	}
	if r.charge && !r.elastic {
		r.restarts++
	}
	r.world = ranked
	r.joined -= size
	r.phase = releasing
	places := r.places(ranked)
	for i, n := range ranked {
		n.state, n.rank, n.rankBase = member, i, places[i].RankBase
	}
	r.resetEpoch()
	r.direct(ranked[0], Directive{Kind: Lead, Place: &places[0], Cause: r.cause})
	r.note("seal", ranked[0].Name, "")
}

// resetEpoch forgets what was collected about the epoch before.
func (r *Round) resetEpoch() {
	r.charge, r.elastic, r.short = false, false, false
	r.failures, r.losses = nil, nil
	r.lastCallAt, r.growAt, r.doomAt, r.holdAt = time.Time{}, time.Time{}, time.Time{}, time.Time{}
}

func (r *Round) places(ranked []*node) []Place {
	roles := map[string]int{}
	ps := make([]Place, len(ranked))
	base := 0
	for i, n := range ranked {
		ps[i] = Place{GroupRank: i, GroupWorldSize: len(ranked), RankBase: base, RoleRankBase: roles[n.Role], RestartCount: r.restarts}
		base += n.Slots
		roles[n.Role] += n.Slots
	}
	for i, n := range ranked {
		ps[i].WorldSize, ps[i].RoleWorldSize = base, roles[n.Role]
	}
	r.worldSize = base
	return ps
}

func (r *Round) waiters() []*node {
	var ws []*node
	for _, n := range r.nodes {
		if n.state == waiting {
			ws = append(ws, n)
		}
	}
	return ws
}

// tryGrow restarts a running world for newcomers when they make it larger.
func (r *Round) tryGrow(now time.Time) {
	size := r.params.floor(min(len(r.world)+r.joined, r.params.Max))
	if r.joined == 0 || size <= len(r.world) || r.done > 0 {
		r.growAt = time.Time{}
		return
	}
	if r.growAt.IsZero() {
		r.growAt = now.Add(r.params.GrowthDelay)
	}
	if size < r.params.Max && now.Before(r.growAt) {
		return
	}
	r.breakWorld(now, Cause{Kind: CauseGrowth, Text: fmt.Sprintf("the world grows from %d to %d nodes", len(r.world), size)})
	r.elastic = true
}

// checkJoinTimeout: the time that members take to stop their workers does not count;
// their launchers bound it.
func (r *Round) checkJoinTimeout(now time.Time) {
	if r.owing > 0 {
		r.formingAt = now
		return
	}
	if now.Before(r.formingAt.Add(r.params.JoinTimeout)) {
		return
	}
	text := fmt.Sprintf("no world within %s: %d nodes joined, need %d", r.params.JoinTimeout, r.joined, r.params.Min)
	if r.params.Unit > 1 {
		text += fmt.Sprintf(" in multiples of %d", r.params.Unit)
	}
	r.finish(now, Failed, &Cause{Kind: CauseTimeout, Text: text})
}
