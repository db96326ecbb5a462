package rendezvous

import (
	"fmt"
	"time"

	"dlrover-run/internal/job"
)

func (r *Round) join(now time.Time, e Join) error {
	if opens, err := r.memory.stranger(now, r.admission, e); err != nil {
		return err
	} else if opens {
		r.reset()
	}
	if r.epoch.phase == finished {
		if err := r.reopen(now, e); err != nil {
			return err
		}
	}
	if n := r.members.nodes[e.Node.ID]; n != nil {
		if err := e.Node.validate(); err != nil {
			return fmt.Errorf("%w: %w", ErrRefused, err)
		}
		r.rejoin(now, n, e)
		return nil
	}
	if err := r.admission.admit(e); err != nil {
		r.shortage.tellRefused(e.Node, err)
		return err
	}
	if r.epoch.fresh() && len(r.members.nodes) == 0 {
		r.memory.first(now, e)
	}
	if r.params.MaxRestarts == Unlimited {
		r.params.MaxRestarts = e.Params.MaxRestarts
	}
	r.liveness.arrived(now)
	n := r.members.arrived(now, e.Node)
	r.admission.learn(e)
	r.epoch.cameBack(n, e.Resume)
	r.sealer.cameAt = now
	n.differs = e.Params.WithDefaults() != *r.params
	if o := r.members.superseded(n); o != nil {
		o.broken, o.silent = true, false // it is dead
		r.depart(now, o, job.CauseLoss, "replaced by "+n.Name, true)
	}
	r.members.wish(n)
	r.memory.learn(now, n, e)
	r.orders.restoreCommand(e)
	if c := r.memory.pause(n, e); c != nil {
		seen := e.Seen
		r.pause(now, c, &seen)
	} else if r.orders.paused == nil {
		r.account.unpaused()
	}
	if c := r.memory.bar(now, n, e); c != nil {
		r.checks.barName(n.Name, c)
		r.enforce(now)
	}
	if !r.memory.adopt(now, n, e) {
		r.checks.queue(now, n)
	}
	r.out.note(job.EventJoin, n.Name, fmt.Sprintf("%d slots", n.Slots)).Machine = n.Machine
	return nil
}

// rejoin is a Join of a node that is already here: after the Stop of the present
// epoch, or else a repeated request that changes nothing.
func (r *Round) rejoin(now time.Time, n *node, e Join) {
	if e.Stopped != r.epoch.id || n.idle() || n.state == leaving {
		return
	}
	if r.memory.rebuild != nil {
		r.memory.rebuild.stop(n)
		return
	}
	if n.state != pending { // an earlier daemon had stopped it, unknown to this one
		r.breakWorld(now, restartedAcross())
	}
	r.account.progress(e.Progress)
	n.Node = n.renewed(e.Node)
	r.epoch.kept.record(e.Failures)
	r.checks.queue(now, n)
}

func (r *Round) leave(now time.Time, e Leave) error {
	n := r.members.nodes[e.ID]
	if n == nil && (!e.Killed || len(e.ID) > MaxName) {
		return ErrUnknownNode
	}
	r.members.leave(e.ID)
	if n == nil {
		return ErrUnknownNode // its join may still be under way
	}
	r.epoch.kept.record(e.Failures)
	kind := job.CauseLeave
	if e.Killed {
		kind = job.CauseLoss
	}
	r.depart(now, n, kind, e.Reason, false)
	return nil
}

// reopen answers a Join to a finished run. A launcher that knows one of its worlds, or was started before the end,
// belongs to that run, and is one of its nodes from then on. A later one opens the run anew.
func (r *Round) reopen(now time.Time, e Join) error {
	late := false
	switch {
	case len(r.members.nodes) == 0 && e.Seen.Newer(r.epoch.id):
		r.reset() // the run was opened anew, and the record of that is lost
		return nil
	case e.Seen.Round > 0, now.Add(-e.Node.Uptime).Before(r.epoch.finishedAt):
		if err := r.admission.conflict(e); err != nil {
			return fmt.Errorf("%w: %w", ErrRefused, err)
		}
	case r.admission.sameJob(now, e):
		late = true
	case len(r.members.nodes) > 0:
		return ErrFinishing
	default:
		r.reset()
		return nil
	}
	r.liveness.arrived(now)
	n := r.members.arrived(now, e.Node)
	r.members.become(n, waiting)
	if !late {
		r.out.direct(n, r.epoch.verdict())
		return nil
	}
	r.out.note(job.EventLate, n.Name, "the run has succeeded; nothing is started")
	r.out.direct(n, r.admission.late(now))
	return nil
}

// reset makes r as New does, with a new term. Bars are of names and stay, and so does a pause of a run that has not
// finished.
func (r *Round) reset() {
	over := r.admission.over
	if r.epoch.phase != finished {
		r.out.ended()
	} else {
		over = r.epoch.id
	}
	r.cfg.Term = r.out.seq + 1
	next := New(*r.cfg)
	next.admission.over = over
	next.members.left = r.members.left
	next.out.acts, next.out.told, next.out.free = r.out.acts, r.out.told, r.out.free
	next.orders.inherit(r.orders, r.account.spent.Held)
	*r = *next
}
