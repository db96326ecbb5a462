package launcher

import (
	"context"
	"time"

	"dlrover-run/launcher/verdict"
)

// AfterRequest describes the end of an epoch's workers to Config.After.
type AfterRequest struct {
	StopRequest
	// Succeeded: the workers have done their work. Otherwise Failed is the first failure of one of them before they were
	// stopped; nil: they were stopped for a reason from elsewhere.
	Succeeded bool
	Failed    *verdict.Failure
}

// around runs what precedes and follows the workers of an epoch. The group exists meanwhile, without workers, so that
// directives and signals stop it as any other.
type around struct {
	cfg    *Config
	bg     *background
	passed chan *group   // Before has returned
	ended  chan struct{} // After has
}

// before is a Config.Before under way.
type before struct {
	cancel context.CancelFunc
	done   chan struct{}    // closed when it has returned
	failed *verdict.Failure // known then
}

func (r *around) before(g *group) {
	ctx, cancel := context.WithCancel(r.bg.ctx)
	b := &before{cancel: cancel, done: make(chan struct{})}
	g.before = b
	r.bg.Go(func() {
		b.failed = r.cfg.Before(ctx, g.epoch)
		close(b.done)
		post(r.bg, r.passed, g)
	})
}

// end stops the Before of g. A nil b has none.
func (b *before) end() {
	if b != nil {
		b.cancel()
	}
}

func (b *before) wait() {
	if b != nil {
		<-b.done
	}
}

// after runs After for a group that has ended, and reports whether it is to be waited for. It has what is left of the
// grace if this node leaves, and a second signal ends it.
func (r *around) after(g *group, stop StopRequest, succeeded bool, l *leaver) bool {
	if r.cfg.After == nil || g.epoch.Hold || g.before != nil && g.before.failed != nil {
		return false
	}
	req := AfterRequest{StopRequest: stop, Succeeded: succeeded}
	if !succeeded && g.hadFailed {
		req.Failed = &g.failures[0]
	}
	ctx, cancel := context.WithCancel(r.bg.ctx)
	if g.endAfter = cancel; l.leaving() {
		time.AfterFunc(l.grace(), cancel)
	}
	r.bg.Go(func() {
		select {
		case <-r.bg.force:
			cancel()
		case <-ctx.Done():
		}
	})
	r.bg.Go(func() {
		defer cancel()
		r.cfg.After(ctx, req)
		post(r.bg, r.ended, struct{}{})
	})
	return true
}

// notBegun is the failure of Before, and counts as that of the node's first worker.
func (r *reporter) notBegun(g *group, f verdict.Failure) aftermath {
	f.Rank = g.epoch.Place.RankBase
	r.failures.complete(g, &f)
	act := r.failures.decideBy(g, &f, func() (_, _ []byte) { return nil, []byte(f.LastLines) })
	g.failures = append(g.failures, f)
	r.cfg.Logger.Error("no workers are started", "why", f.Reason(), "action", act.String())
	r.report(g, act)
	return aftermath{failed: &f}
}
