package launcher

import (
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
