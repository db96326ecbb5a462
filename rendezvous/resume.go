package rendezvous

import (
	"fmt"
	"time"

	"dlrover-run/internal/job"
)

// resumeWindow is how long a daemon that has lost its memory waits for all members
// of a running world to introduce themselves again.
const resumeWindow = silentGrace

// Resume is a launcher's report to a daemon that does not know it: the present or last epoch of its workers, and its
// own place. A restarted daemon rebuilds the world from all members' reports, and no worker notices.
type Resume struct {
	job.EpochID
	Place job.Place `json:"place"`
	// Done: the workers have succeeded.
	Done bool `json:"done,omitempty"`
	// Hold: there are none, because the run is held.
	Hold bool `json:"hold,omitempty"`
	// Decision and Failures: a worker has failed, and the daemon may not know.
	Decision Decision      `json:"decision,omitempty"`
	Failures []job.Failure `json:"failures,omitempty"`
	Progress job.Progress  `json:"progress,omitzero"`
	// Stepped: the first step has been made. Ranks have succeeded, though not all.
	Stepped bool  `json:"stepped,omitempty"`
	Ranks   []int `json:"ranks,omitempty"`
	// Tolerated: no worker of the node is left, which ends nothing.
	Tolerated bool `json:"tolerated,omitempty"`
	Beside    bool `json:"beside,omitempty"` // as Failing.Beside
}

// resume is a world being rebuilt.
type resume struct {
	world   []*node // by group rank, nil for missing members
	missing int
	until   time.Time
	failing []Failing // to be acted upon when the world is rebuilt
	stopped []*node   // have ended their workers already, by a directive of the old daemon
	restart *Order    // to be carried out when the world is rebuilt
}

// adopt gives a node its old place back. It reports false when this Round has a
// history of its own, in which the node's world has no place.
func (r *Round) adopt(now time.Time, n *node, join Join) bool {
	e := join.Resume
	if e == nil || !r.epoch.collecting() || (!r.epoch.fresh() && r.resume == nil) || !plausible(e.Place) {
		return false
	}
	r.giveUpFor(now, e.EpochID)
	r.expirePause(now, e.EpochID)
	r.gate.leave(now)
	if r.resume == nil {
		r.rebuild(now, n, e)
	}
	w := r.resume
	if r.epoch.id != e.EpochID || len(w.world) != e.Place.GroupWorldSize || w.world[e.Place.GroupRank] != nil {
		return false
	}
	w.world[e.Place.GroupRank] = n
	w.missing--
	r.members.become(n, member)
	n.rank, n.rankBase = e.Place.GroupRank, e.Place.RankBase
	r.out.direct(n, Directive{Kind: job.Run, Place: &e.Place})
	r.catchUp(n, e)
	if join.Stopped == e.EpochID {
		w.stopped = append(w.stopped, n)
	}
	return true
}

// giveUpFor ends the rebuilding of a world without workers when a member of a newer one comes: the earlier members had
// been left out of that.
func (r *Round) giveUpFor(now time.Time, e job.EpochID) {
	w := r.resume
	if w == nil || !w.onlyStopped() || !e.Newer(r.epoch.id) {
		return
	}
	r.resume = nil
	for _, s := range w.stopped {
		if r.members.nodes[s.ID] == s {
			r.checks.queue(now, s)
		}
	}
}

// rebuild begins to collect the members of the world in which n has a place.
func (r *Round) rebuild(now time.Time, n *node, e *Resume) {
	size := e.Place.GroupWorldSize
	r.resume = &resume{world: make([]*node, size), missing: size, until: now.Add(resumeWindow)}
	r.epoch.id, r.account.restarts, r.epoch.workers, r.holdAt = e.EpochID, e.Place.RestartCount, e.Place.WorldSize, time.Time{}
	r.out.seq = max(r.out.seq, r.epoch.id.Term)
	r.epoch.held = e.Hold
	r.orders.restoreHold(e.Hold)
	r.out.note(job.EventResume, n.Name, fmt.Sprintf("waiting for %d nodes of a running world", size))
}

// onlyStopped reports that no member with running workers has come back.
func (w *resume) onlyStopped() bool { return len(w.stopped) == len(w.world)-w.missing }

// catchUp books the events of a member's workers while there was no daemon.
func (r *Round) catchUp(n *node, e *Resume) {
	if e.Stepped {
		r.account.progress(job.Progress{Step: 1, Stepping: true})
	}
	if e.Done || len(e.Ranks) > 0 {
		r.epoch.succeeded(n, Success{Ranks: e.Ranks}, r.params.Budget.Tolerate)
	}
	switch {
	case e.Done:
		r.succeed(n)
	case e.Decision != "":
		r.epoch.record(e.Failures)
		r.resume.failing = append(r.resume.failing, Failing{
			ID: n.ID, EpochID: e.EpochID, Decision: e.Decision, Failures: e.Failures, Progress: e.Progress,
			Tolerated: e.Tolerated, Beside: e.Beside,
		})
	}
}

func plausible(p job.Place) bool {
	return p.GroupWorldSize >= 1 && p.GroupWorldSize <= MaxNodes && p.GroupRank >= 0 && p.GroupRank < p.GroupWorldSize
}

// settleResume ends the rebuilding when everyone is back, or when waiting is useless.
func (r *Round) settleResume(now time.Time) {
	w := r.resume
	if w.missing > 0 && now.Before(w.until) {
		return
	}
	r.resume, r.epoch.adopted, r.epoch.phase, r.epoch.sealedAt, r.account.newest.ranAt = nil, true, running, now, now
	var members []*node
	for _, n := range w.world {
		if n != nil {
			members = append(members, n)
		}
	}
	r.epoch.setWorld(members)
	if w.missing > 0 {
		r.epoch.elastic = true
		text := fmt.Sprintf("%d of %d nodes did not come back after the rendezvous daemon was started again",
			w.missing, len(w.world))
		r.breakWorld(now, job.Cause{Kind: job.CauseLoss, Text: text})
	} else {
		r.out.note(job.EventResumed, "", "the running world is complete again")
	}
	r.carryOut(now, w)
	if r.epoch.phase == running {
		r.checks.askAll(now)
	}
	r.checkDone(now)
}

// carryOut handles events that had to wait for the world to be rebuilt.
func (r *Round) carryOut(now time.Time, w *resume) {
	for _, e := range w.failing {
		_ = r.failing(now, e) // the node is here, or its loss has been booked
	}
	if w.restart != nil && r.epoch.phase == running {
		r.restart(now, *w.restart)
	}
	r.enforce(now)
	if len(w.stopped) > 0 && r.epoch.phase == running {
		r.breakWorld(now, restartedAcross())
	}
	for _, n := range w.stopped {
		if n.state == pending { // and not gone meanwhile
			r.checks.queue(now, n)
		}
	}
}

// restartedAcross is the cause of an epoch that an earlier daemon had ended already.
func restartedAcross() job.Cause {
	return job.Cause{Kind: job.CauseFailure,
		Text: "the workers were being restarted when the rendezvous daemon was started again"}
}

// hurry waits no longer than a launcher's back-off for a world that has to be formed
// anew in any case.
func (w *resume) hurry(now time.Time) {
	if soon := now.Add(BrokenGrace); soon.Before(w.until) {
		w.until = soon
	}
}

// forgo takes a node out of a world that is being rebuilt.
func (w *resume) forgo(n *node) {
	w.world[n.rank] = nil
	w.missing++
}

// holding reports whether members of an older history may still come back, so that no world is sealed.
func (r *Round) holding(now time.Time) bool {
	if !r.holdAt.IsZero() && !now.Before(r.holdAt) {
		r.holdAt, r.epoch.formingAt = time.Time{}, now
	}
	return !r.holdAt.IsZero()
}
