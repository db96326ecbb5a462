package launcher

import (
	"context"
	"errors"
	"syscall"
	"time"

	"dlrover-run/launcher/proc"
)

// stopper ends the processes of a group.
type stopper struct {
	cfg     *Config
	bg      *background
	stopped chan stopResult
}

// stopOrder is the way in which a group is stopped.
type stopOrder struct {
	signal    syscall.Signal
	grace     time.Duration // between the signal and SIGKILL
	keepSides bool          // side processes run on
	first     func()        // to be done before the signal; nil is nothing
}

// stop ends the group in the background; the loop is notified.
func (s *stopper) stop(g *group, o stopOrder) {
	if g.stopping {
		return
	}
	g.stopping, g.stopSignal, g.hadFailed = true, o.signal, len(g.failures) > 0
	if o.first == nil {
		g.signaledNow()
	}
	g.timers.end()
	if g.endWatch != nil {
		g.endWatch()
	}
	g.before.end()
	s.cfg.Rendezvous.Running(nil)
	ps := make([]*proc.Process, len(g.workers))
	for i, w := range g.workers {
		ps[i] = w.proc
	}
	if g.meanwhile != nil {
		ps = append(ps, g.meanwhile)
	}
	s.bg.Go(func() {
		g.before.wait()
		if o.first != nil {
			o.first()
			g.signaledNow()
		}
		force, end := s.patience(g)
		err := s.cfg.Processes.Stop(ps, o.signal, o.grace, force)
		end()
		for _, w := range g.workers {
			w.out.Drain(drainBudget)
		}
		g.watchers.Wait()
		if !o.keepSides {
			err = errors.Join(err, endSides(s.cfg, g.sides, o.grace, s.bg.force))
			g.sides = nil
		}
		post(s.bg, s.stopped, stopResult{g, err})
	})
}

func (g *group) signaledNow() {
	t := now()
	g.signaledAt.Store(&t)
}

type stopResult struct {
	g   *group
	err error
}

// patience closes over when the workers of g, which have just got the signal, are to be killed: by a second signal, or
// when Restart.Grace is over and counts. end has to be called when they have ended.
func (s *stopper) patience(g *group) (over <-chan struct{}, end func()) {
	if !g.again.Load() || s.cfg.Restart.Grace >= s.cfg.ShutdownTimeout {
		return s.bg.force, func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	enough := make(chan struct{})
	s.bg.Go(func() {
		t := time.NewTimer(s.cfg.Restart.Grace)
		defer t.Stop()
		select {
		case <-ctx.Done():
			return
		case <-s.bg.force:
			close(enough)
			return
		case <-t.C:
		}
		if g.again.Load() && s.short(ctx) { // another failure may have ruled a restart out since
			s.cfg.Logger.Warn("workers do not end; killing them for the restart", "grace", s.cfg.Restart.Grace.String())
			close(enough)
			return
		}
		select {
		case <-ctx.Done():
		case <-s.bg.force:
			close(enough)
		}
	})
	return enough, cancel
}

// short reports whether Restart.Grace counts.
func (s *stopper) short(ctx context.Context) bool {
	if s.cfg.Restart.Always || s.cfg.Preset.QuickRestart {
		return true
	}
	return s.cfg.Saved != nil && s.cfg.Saved(ctx)
}
