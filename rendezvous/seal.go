package rendezvous

import (
	"fmt"
	"time"

	"dlrover-run/internal/job"
)

func (r *Round) trySeal(now time.Time) bool {
	if !r.holdAt.IsZero() && !now.Before(r.holdAt) {
		r.holdAt, r.epoch.formingAt = time.Time{}, now
	}
	if r.members.stopping > 0 || !r.holdAt.IsZero() || r.orders.paused != nil || r.account.backingOff(now, r.epoch.elastic) {
		if r.members.stopping == 0 {
			r.checks.epochOver(now)
		}
		r.gate.leave(now)
		return false
	}
	r.checks.epochOver(now)
	r.gate.endSecondOpinions(now)
	candidates := r.members.possible()
	if r.params.fit(candidates) < r.params.Min {
		return r.tooFew(now)
	}
	r.shortage.over()
	if r.epoch.phase != gating && candidates < r.params.Max && (r.epoch.fresh() || r.short) && !r.lastCallOver(now, candidates) {
		return false
	}
	size, open := r.gate.pass(now)
	if open {
		r.seal(now, size)
	}
	if r.epoch.phase == forming { // checks have been given up
		return r.tooFew(now)
	}
	return open
}

// tooFew reacts to too few nodes for a world.
func (r *Round) tooFew(now time.Time) (sealed bool) {
	r.lastCallAt, r.short = time.Time{}, true
	r.gate.leave(now)
	r.shortage.tell()
	return false
}

// lastCallOver starts the last call when the world first could be sealed. A world that merely lost nodes skips it: all
// known nodes are here.
func (r *Round) lastCallOver(now time.Time, candidates int) bool {
	if p := r.params; r.lastCallAt.IsZero() {
		r.lastCallAt = now.Add(p.LastCall)
		text := fmt.Sprintf("%d of %d:%d nodes; sealing in %s", candidates, p.Min, p.Max, p.LastCall)
		switch {
		case p.Quiet > 0 && candidates < min(p.Promised, p.Max):
			text += fmt.Sprintf(" at the latest, or %s after the last of the %d that are promised", p.Quiet,
				min(p.Promised, p.Max))
		case p.Quiet > 0:
			text += fmt.Sprintf(" at the latest, or %s after the newest node", p.Quiet)
		}
		r.out.note(job.EventLastCall, "", text)
	}
	return !now.Before(r.lastCallEnd(candidates))
}

// lastCallEnd is when the last call is over, unless another node comes.
func (r *Round) lastCallEnd(candidates int) time.Time {
	p := r.params
	if p.Quiet == 0 || candidates < min(p.Promised, p.Max) {
		return r.lastCallAt
	}
	quiet := r.lastCallAt.Add(-p.LastCall) // from its beginning
	if r.cameAt.After(quiet) {
		quiet = r.cameAt
	}
	return earlier(quiet.Add(p.Quiet), r.lastCallAt)
}

func (r *Round) seal(now time.Time, size int) {
	r.out.ended()
	chosen := choose(r.members.candidates(size), size, r.suspect)
	ranked := rank(chosen, r.cfg.Topology, r.params.Static)
	r.epoch.next(now, ranked)
	r.account.book(now, r.epoch.elastic)
	places := r.epoch.places(r.account.restarts)
	for i, n := range ranked {
		r.members.become(n, member)
		n.rank, n.rankBase, n.optional, n.failed, n.starts = i, places[i].RankBase, false, false, n.starts+1
	}
	r.epoch.forget()
	r.short = false
	clear(r.shortage.gone)
	r.lastCallAt, r.growAt, r.holdAt = time.Time{}, time.Time{}, time.Time{}
	r.gate.failAt = time.Time{}
	r.out.direct(ranked[0], Directive{Kind: job.Lead, Place: &places[0], Cause: r.epoch.cause})
	if r.params.Gate {
		r.gate.endChecks()
		if r.members.checking == 1 {
			r.checks.findPartners(now)
		}
	}
	r.out.note(job.EventSeal, ranked[0].Name, "").Members = r.World()
	r.noteAddresses()
}

// tryGrow restarts a running world for newcomers when they make it larger.
func (r *Round) tryGrow(now time.Time) {
	newcomers := r.checks.newcomers()
	size := r.params.fit(len(r.epoch.world) + newcomers)
	if newcomers == 0 || size <= len(r.epoch.world) || r.epoch.done > 0 {
		r.growAt = time.Time{}
		return
	}
	if r.growAt.IsZero() {
		r.growAt = now.Add(r.params.GrowthDelay)
	}
	if size < r.params.Max && now.Before(r.growAt) {
		return
	}
	if r.checks.askAll(now) > 0 {
		r.checks.findPartners(now)
		r.growAt = time.Time{} // a clearance has run out meanwhile
		return
	}
	text := fmt.Sprintf("the world grows from %d to %d nodes", len(r.epoch.world), size)
	r.breakWorld(now, job.Cause{Kind: job.CauseGrowth, Text: text})
	r.epoch.elastic = true
}

// checkJoinTimeout: the time that members take to stop their workers does not count; their launchers bound it. Nor
// does a pause, the wait for members of an older history, or the time in the gate (leaveGate).
func (r *Round) checkJoinTimeout(now time.Time) {
	if r.members.stopping > 0 || r.orders.paused != nil || !r.holdAt.IsZero() || r.account.backingOff(now, r.epoch.elastic) {
		r.epoch.formingAt = now
		return
	}
	if r.epoch.phase == forming && !now.Before(r.epoch.formingAt.Add(r.params.JoinTimeout)) {
		r.finish(now, job.Failed, r.shortage.cause())
	}
}
