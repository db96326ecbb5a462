package launcher

import (
	"cmp"
	"context"
	"time"

	"dlrover-run/launcher/verdict"
)

// Time that the examination of a group takes at most, in all a second.
const (
	examineTime  = 900 * time.Millisecond
	examineGrace = 100 * time.Millisecond // to return after ctx has ended
)

// stopFailed stops a group because a worker has failed, of this node (f) or of another one (cause). If the failure was
// a collective that timed out, the Examiner sees the living workers first; nothing waits for any other failure.
func (s *stopper) stopFailed(g *group, o stopOrder, f verdict.Failure, cause string) {
	if g.stopping || s.cfg.Examiner.Examine == nil {
		s.stop(g, o)
		return
	}
	why := cmp.Or(timeoutIn(cause), f.Timeout(), g.timeoutSaid())
	pids, anyone := g.living()
	if why == "" || !anyone {
		s.stop(g, o)
		return
	}
	ctx, cancel := context.WithTimeout(s.bg.ctx, examineTime)
	g.hurry = cancel
	s.cfg.Logger.Info("looking at the workers before they are stopped: a collective has timed out", "why", why)
	o.first = func() {
		defer cancel()
		x := s.cfg.Examiner
		s.cfg.attendFor(ctx, examineGrace, x.Name, func() { x.Examine(ctx, g.epoch, pids, why) })
	}
	s.stop(g, o)
}

func timeoutIn(cause string) string {
	if verdict.TimedOut(cause) {
		return cause
	}
	return ""
}

// living lists the workers' process ids by local rank, 0 for an ended worker, and reports whether any still runs.
func (g *group) living() (pids []int, anyone bool) {
	pids = g.pids()
	for i, w := range g.workers {
		select {
		case <-w.proc.Done():
			pids[i] = 0
		default:
			anyone = true
		}
	}
	return pids, anyone
}

// timeoutSaid is a timeout that a worker has reported, "" if none has. Gloo's first timeout closes its connections, so
// that other workers fail by these, and may be the first to end: an interpreter takes a tenth of a second for that.
func (g *group) timeoutSaid() string {
	for _, w := range g.workers {
		_, stderr := w.out.Tail()
		stderr = stderr[max(0, len(stderr)-4*lastLines):]
		if why := (verdict.Failure{LastLines: tailText(stderr)}).Timeout(); why != "" {
			return why
		}
	}
	return ""
}
