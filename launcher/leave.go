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

// leaver takes this node out of the job for good.
type leaver struct {
	cfg *Config
	bg  *background
	// announced carries the answer of the rendezvous to this node's announcement that it will leave.
	announced chan error
	signal    syscall.Signal // the signal that made this node end, or SIGTERM for another reason to leave
	why       string         // it leaves, in a few words
	left      string         // as why, if no signal is the reason
	parted    bool           // it has signed off
	deadline  time.Time      // of a leave; zero: none
}

func (l *leaver) leaving() bool { return l.signal != 0 }

// hurryUp sets the time by which this node has to be gone, if there is one.
func (l *leaver) hurryUp() {
	if l.cfg.LeaveGrace > 0 {
		l.deadline = now().Add(l.cfg.LeaveGrace)
	}
}

// hasten ends the grace of workers that are being stopped already when this node has to be gone.
func (l *leaver) hasten() {
	if l.deadline.IsZero() {
		return
	}
	left := l.grace()
	l.bg.Go(func() {
		select {
		case <-time.After(left):
			l.bg.hurry()
		case <-l.bg.over:
		}
	})
}

// announce notifies the rendezvous that this node will leave.
func (l *leaver) announce() {
	why, grace := l.why, l.grace()
	l.bg.Go(func() {
		ctx, cancel := context.WithTimeout(l.bg.ctx, min(announceTime, max(grace/10, 50*time.Millisecond)))
		defer cancel()
		err := l.cfg.Rendezvous.Leaving(ctx, why, grace)
		post(l.bg, l.announced, err)
	})
}

// sayGoodbye takes this node out of the run, once and at once, so that the other nodes need not wait for our workers'
// end.
func (l *leaver) sayGoodbye() {
	if l.parted {
		return
	}
	l.parted = true
	reason := l.why
	l.bg.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), leaveBudget)
		defer cancel()
		if _, err := l.cfg.Rendezvous.Leave(ctx, reason, nil); err != nil {
			l.cfg.Logger.Debug("leave", "err", err)
		}
	})
}

// result is the end of a node that leaves.
func (l *leaver) result() Result {
	return Result{Reason: policy.Signaled(int(l.signal)), Left: l.left, Deadline: l.deadline}
}

// grace is how long workers have between a signal and SIGKILL: less, where this node leaves and has to save in time.
func (l *leaver) grace() time.Duration {
	if l.deadline.IsZero() {
		return l.cfg.ShutdownTimeout
	}
	left := max(0, l.deadline.Sub(now()))
	return min(l.cfg.ShutdownTimeout, left-min(left/4, saveTime))
}

// saveTime is the longest part of a leave that the workers reserve for the parts that save their state.
const saveTime = 5 * time.Second

func (l *leaver) warnSignal(s syscall.Signal, workers bool) {
	if !workers {
		l.cfg.Logger.Warn("received a signal; leaving", "signal", proc.SignalName(s))
		return
	}
	l.cfg.Logger.Warn("received a signal; stopping the workers", "signal", proc.SignalName(s), "grace",
		l.grace().Round(100*time.Millisecond).String())
}

// onLeave is onSignal for a reason other than a signal: it ends in the same way.
func (a *Agent) onLeave(why string) {
	if a.leaver.leaving() || a.result != nil {
		return
	}
	a.log.Warn("leaving the job", "why", why)
	a.leaver.left = why
	a.leaver.hurryUp()
	a.leaveFor(syscall.SIGTERM, why)
}

// leaveFor ends this node's part of the job for good. The rendezvous is notified before any worker, so that the others
// go on without this node at once.
func (a *Agent) leaveFor(s syscall.Signal, why string) {
	a.leaver.signal, a.leaver.why = s, why
	if a.group != nil && a.group.hurry != nil {
		a.group.hurry()
	}
	a.cfg.observe(LeaveInfo{Reason: why, Grace: a.cfg.LeaveGrace})
	switch {
	case a.group == nil:
		a.leaver.sayGoodbye()
		a.endLeft()
	case a.group.stopping:
		a.leaver.sayGoodbye()
		a.leaver.hasten()
		if a.group.endAfter != nil {
			time.AfterFunc(a.leaver.grace(), a.group.endAfter)
		}
	default:
		a.leaver.announce()
	}
}

// onAnnounced stops the workers, unless that is under way. A rendezvous that does not answer, or is of an older
// version, is notified when it can be.
func (a *Agent) onAnnounced(err error) {
	if err != nil {
		a.log.Debug("announce the leave", "err", err)
		a.leaver.sayGoodbye()
	}
	a.stopToLeave()
}

// stopToLeave saves the workers' state in memory, and stops them.
func (a *Agent) stopToLeave() {
	if a.group == nil || a.group.stopping {
		return
	}
	a.cfg.stopParts(a.group, a.stopRequest(a.group, true))
	a.stop(a.group, a.leaver.signal)
}

// again is another signal while this node leaves: no more grace.
func (a *Agent) again(s syscall.Signal) {
	a.cfg.observe(SignalInfo{Signal: s, Again: true})
	a.bg.hurry()
	a.stopToLeave()
}

// endLeft is the end of a node that leaves.
func (a *Agent) endLeft() {
	a.leaver.sayGoodbye()
	a.end(a.leaver.result())
}
