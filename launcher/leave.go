package launcher

import (
	"context"
	"syscall"
	"time"

	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc"
)

// announceTime is how long the rendezvous may take to hear that this node will leave; the workers run meanwhile.
const announceTime = time.Second

// hurryUp sets the time by which this node has to be gone, if there is one.
func (a *Agent) hurryUp() {
	if a.cfg.LeaveGrace > 0 {
		a.deadline = now().Add(a.cfg.LeaveGrace)
	}
}

// leaveFor ends this node's part of the job for good. The rendezvous is notified before any worker, so that the others
// go on without this node at once.
func (a *Agent) leaveFor(s syscall.Signal, why string) {
	a.signal, a.why = s, why
	if a.group != nil && a.group.hurry != nil {
		a.group.hurry()
	}
	a.cfg.observe(LeaveInfo{Reason: why, Grace: a.cfg.LeaveGrace})
	switch {
	case a.group == nil:
		a.sayGoodbye()
		a.endLeft()
	case a.group.stopping:
		a.sayGoodbye()
		a.hasten()
	default:
		a.announce()
	}
}

// hasten ends the grace of workers that are being stopped already when this node has to be gone.
func (a *Agent) hasten() {
	if a.deadline.IsZero() {
		return
	}
	left := a.grace()
	a.bg.Go(func() {
		select {
		case <-time.After(left):
			a.bg.hurry()
		case <-a.bg.over:
		}
	})
}

// announce notifies the rendezvous that this node will leave.
func (a *Agent) announce() {
	why, grace := a.why, a.grace()
	a.bg.Go(func() {
		ctx, cancel := context.WithTimeout(a.bg.ctx, min(announceTime, max(grace/10, 50*time.Millisecond)))
		defer cancel()
		err := a.cfg.Rendezvous.Leaving(ctx, why, grace)
		post(a.bg, a.announced, err)
	})
}

// onAnnounced stops the workers, unless that is under way. A rendezvous that does not answer, or is of an older
// version, is notified when it can be.
func (a *Agent) onAnnounced(err error) {
	if err != nil {
		a.log.Debug("announce the leave", "err", err)
		a.sayGoodbye()
	}
	a.stopToLeave()
}

// stopToLeave saves the workers' state in memory, and stops them.
func (a *Agent) stopToLeave() {
	if a.group == nil || a.group.stopping {
		return
	}
	a.cfg.stopParts(a.stopRequest(a.group, true))
	a.stop(a.group, a.signal)
}

// onLeave is onSignal for a reason other than a signal: it ends in the same way.
func (a *Agent) onLeave(why string) {
	if a.signal != 0 || a.result != nil {
		return
	}
	a.log.Warn("leaving the job", "why", why)
	a.left = why
	a.hurryUp()
	a.leaveFor(syscall.SIGTERM, why)
}

// onDrain leaves by order of the rendezvous, which therefore knows already.
func (a *Agent) onDrain(why string) {
	if a.signal != 0 {
		return
	}
	a.onLeave("drained: " + why)
}

// sayGoodbye takes this node out of the run, once.
func (a *Agent) sayGoodbye() {
	if !a.parted {
		a.parted = true
		a.goodbye(a.why)
	}
}

// endLeft is the end of a node that leaves.
func (a *Agent) endLeft() {
	a.sayGoodbye()
	a.end(Result{Reason: policy.Signaled(int(a.signal)), Left: a.left, Deadline: a.deadline})
}

// grace is how long workers have between a signal and SIGKILL: less, where this node leaves and has to save in time.
func (a *Agent) grace() time.Duration {
	if a.deadline.IsZero() {
		return a.cfg.ShutdownTimeout
	}
	left := max(0, a.deadline.Sub(now()))
	return min(a.cfg.ShutdownTimeout, left-min(left/4, saveTime))
}

// saveTime is the longest part of a leave that the workers reserve for the parts that save their state.
const saveTime = 5 * time.Second

// again is another signal while this node leaves: no more grace.
func (a *Agent) again(s syscall.Signal) {
	a.cfg.observe(SignalInfo{Signal: s, Again: true})
	a.bg.hurry()
	a.stopToLeave()
}

func (a *Agent) warnSignal(s syscall.Signal) {
	if a.group == nil {
		a.log.Warn("received a signal; leaving", "signal", proc.SignalName(s))
		return
	}
	a.log.Warn("received a signal; stopping the workers", "signal", proc.SignalName(s), "grace",
		a.grace().Round(100*time.Millisecond).String())
}
