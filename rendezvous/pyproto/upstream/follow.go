package upstream

import (
	"context"
	"fmt"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// follow repeats the work of the present phase.
func (s *Service) follow() {
	for s.ctx.Err() == nil {
		s.mu.Lock()
		t, now := turn{s.at, s.at.turns.Load(), s.noticeOutage}, s.at.phase
		pause := now.pause(max(len(s.world.nodes), s.params.Min))
		s.mu.Unlock()
		s.noticeOutage(s.advance(now, t))
		t.sleep(s.ctx, pause)
	}
}

func (s *Service) advance(now phase, t turn) error {
	if now == inCheck || now == joining {
		if paid, err := s.pay(s.ctx); !paid {
			return err
		}
	}
	switch now {
	case inCheck:
		return s.test(s.ctx, t)
	case joining:
		return s.join(s.ctx, t)
	case forming:
		return s.askWorld(s.ctx, t)
	case following:
		return s.askAddress(s.ctx, t)
	case running:
		return s.askMembers(s.ctx, t)
	case ending:
		return s.meet(s.ctx, t)
	}
	return nil
}

// join asks for a place in the next world, once the job's own checks let it.
func (s *Service) join(ctx context.Context, t turn) error {
	if passed, err := s.enrolment.passes(ctx); err != nil || !passed {
		return err
	}
	if err := s.enlist(ctx, t, -1); err != nil {
		return withoutReasons(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.lasts() {
		s.at.enter(forming)
	}
	return nil
}

// enlist joins the rendezvous of the workers; see enrolment.
func (s *Service) enlist(ctx context.Context, t turn, before int) error {
	s.mu.Lock()
	p := s.params
	s.mu.Unlock()
	return s.enrolment.enlist(ctx, t, p, training, before)
}

// askMembers asks whether nodes wait for a new world.
func (s *Service) askMembers(ctx context.Context, t turn) error {
	s.mu.Lock()
	w, epoch, runs := s.world, s.dir.EpochID, s.at.phase == running
	s.mu.Unlock()
	if runs {
		if err := s.enrolment.show(ctx, w, epoch); err != nil {
			return err
		}
	}
	n, err := s.master.waiting(ctx)
	if err != nil || n <= 0 { // below 0: the job ends, and the workers of this node may still succeed
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.lasts() {
		s.stop(job.Cause{Kind: job.CauseGrowth, Text: fmt.Sprintf("nodes that wait for a new world: %d", n)})
	}
	return nil
}

// stop ends the epoch; the launcher joins again. s is locked.
func (s *Service) stop(cause job.Cause) {
	s.at.enter(idle)
	s.cause = &cause
	s.direct(rendezvous.Directive{Kind: job.Stop, Cause: &cause})
}

// fail ends the run for this node. s is locked.
func (s *Service) fail(cause job.Cause) {
	s.at.enter(over)
	s.outcome, s.cause = job.Failed, &cause
	s.direct(rendezvous.Directive{Kind: job.Fail, Cause: &cause})
}

// outage is a time without the master.
type outage struct {
	since time.Time
	said  bool
}

// sayAfter keeps a moment's absence out of the log.
const sayAfter = 2 * time.Second

// noticeOutage logs once that the master is away, and that it is back. A restarted master has forgotten the waiting
// nodes: each of them joins again.
func (s *Service) noticeOutage(err error) {
	if s.ctx.Err() != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch o := &s.away; {
	case err != nil && o.since.IsZero():
		o.since = time.Now()
	case err != nil && !o.said && time.Since(o.since) > sayAfter:
		o.said = true
		s.cfg.Log.Warn("cannot ask the master; trying again", "workers_running", s.at.phase == running, "err", err)
	case err != nil:
		s.forsaken(time.Since(o.since))
	case !o.since.IsZero():
		if o.said {
			s.cfg.Log.Info("the master is back", "after", time.Since(o.since).Round(time.Millisecond).String())
		}
		*o = outage{}
		s.enrolment.renew()
		if s.at.phase == forming {
			s.at.since = time.Now()
		}
	}
}

// forsaken ends a run without its master: workers that run go on, and their results count. s is locked.
func (s *Service) forsaken(gone time.Duration) {
	if gone < s.params.JoinTimeout || s.at.phase == running || s.at.phase == over {
		return
	}
	if s.at.phase == ending {
		s.cfg.Log.Warn("the master cannot be told that this node has succeeded")
		s.succeed()
		return
	}
	s.fail(job.Cause{Kind: job.CauseTimeout, Text: "no master for " + gone.Round(time.Second).String()})
}
