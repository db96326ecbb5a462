package launcher

import (
	"context"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/policy"
)

// Restart holds how long workers have between the signal and SIGKILL when they are stopped for a restart.
type Restart struct {
	// Grace counts in place of Config.ShutdownTimeout, if it is shorter, and if Config.Saved, the preset or Always allows
	// it.
	Grace  time.Duration
	Always bool
}

// failed notes whether workers will follow those of g, as far as this node knows when one of them has failed.
func (g *group) failed(act policy.Action) {
	left := g.epoch.Place.RestartCount < g.epoch.MaxRestarts
	switch act {
	case policy.RestartFree:
		g.again.Store(true)
	case policy.RestartCharged, policy.RestartElsewhere, policy.Shrink:
		g.again.Store(left)
	default:
		g.again.Store(false)
	}
}

// restarts reports whether a directive stops workers so that others follow them, without a user's order.
func (d Directive) restarts() bool {
	switch d.Cause.Kind {
	case job.CauseOperator, job.CauseCheck, job.CauseDeadline, job.CauseNoStep, job.CauseTimeout:
		return false
	}
	return d.Kind == job.Stop
}

// patience closes over when the workers of g, which have just got the signal, are to be killed: by a second signal, or
// when Restart.Grace is over and counts. end has to be called when they have ended.
func (a *Agent) patience(g *group) (over <-chan struct{}, end func()) {
	if !g.again.Load() || a.cfg.Restart.Grace >= a.cfg.ShutdownTimeout {
		return a.bg.force, func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	enough := make(chan struct{})
	a.bg.Go(func() {
		t := time.NewTimer(a.cfg.Restart.Grace)
		defer t.Stop()
		select {
		case <-ctx.Done():
			return
		case <-a.bg.force:
			close(enough)
			return
		case <-t.C:
		}
		if g.again.Load() && a.short(ctx) { // another failure may have ruled a restart out since
			a.log.Warn("workers do not end; killing them for the restart", "grace", a.cfg.Restart.Grace.String())
			close(enough)
			return
		}
		select {
		case <-ctx.Done():
		case <-a.bg.force:
			close(enough)
		}
	})
	return enough, cancel
}

// short reports whether Restart.Grace counts.
func (a *Agent) short(ctx context.Context) bool {
	if a.cfg.Restart.Always || a.cfg.Preset.QuickRestart {
		return true
	}
	return a.cfg.Saved != nil && a.cfg.Saved(ctx)
}
