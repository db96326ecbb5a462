package upstream

import (
	"context"
	"fmt"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto"
)

// follow repeats the work of the present phase.
func (s *Service) follow() {
	for s.ctx.Err() == nil {
		s.mu.Lock()
		turn, now := s.turn, s.phase
		pause := s.pause()
		s.mu.Unlock()
		err := s.advance(now, turn)
		s.noticeOutage(err)
		s.sleep(turn, pause)
	}
}

// pause is the time between two questions, with s locked: large jobs ask less often, so that a master of some 3,000
// requests a second has at most half of that to do.
func (s *Service) pause() time.Duration {
	nodes := time.Duration(max(len(s.world.seats), s.params.Min))
	switch s.phase {
	case running:
		return min(500*time.Millisecond+nodes*time.Millisecond, 10*time.Second)
	case idle, examining, leading, over:
		return heartbeat // until it is kicked
	}
	return min(100*time.Millisecond+nodes*time.Millisecond, 3*time.Second)
}

// sleep waits for a pause, or until the phase is another one.
func (s *Service) sleep(turn int, pause time.Duration) {
	t := time.NewTimer(pause)
	defer t.Stop()
	for {
		s.mu.Lock()
		same := turn == s.turn
		s.mu.Unlock()
		if !same {
			return
		}
		select {
		case <-s.kick:
		case <-t.C:
			return
		case <-s.ctx.Done():
			return
		}
	}
}

func (s *Service) advance(now phase, turn int) error {
	if now == inCheck || now == joining {
		if paid, err := s.pay(s.ctx); !paid {
			return err
		}
	}
	switch now {
	case inCheck:
		return s.test(s.ctx, turn)
	case joining:
		return s.join(s.ctx, turn)
	case forming:
		return s.askWorld(s.ctx, turn)
	case following:
		return s.askAddress(s.ctx, turn)
	case running:
		return s.askMembers(s.ctx, turn)
	case ending:
		return s.meet(s.ctx, turn)
	}
	return nil
}

// join asks for a place in the next world, once the job's own checks let it.
func (s *Service) join(ctx context.Context, turn int) error {
	if passed, err := s.passes(ctx); err != nil || !passed {
		return err
	}
	if err := s.enlist(ctx, turn, training, -1); err != nil {
		return s.asideIs(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if turn == s.turn {
		s.enter(forming)
	}
	return nil
}

// enlist joins a rendezvous. If an answer was lost, this node may have joined after the round before already. So it
// looks first whether a world was sealed with it, which another join would make void. -1: it has not joined.
func (s *Service) enlist(ctx context.Context, turn int, name string, before int) error {
	s.mu.Lock()
	p := s.params
	s.mu.Unlock()
	err := s.insist(ctx, turn, func() error {
		if err := s.master.introduce(ctx, p); err != nil { // a new master has not heard the rules
			return err
		}
		w, mine, err := s.master.world(ctx, name)
		if err != nil || mine && before >= 0 && w.round > before {
			return err
		}
		before = w.round
		if err := s.hide(ctx); err != nil {
			return err
		}
		round, err := s.master.join(ctx, name)
		if err == nil {
			s.round = round
		}
		return err
	})
	s.joined = time.Now()
	return err
}

// insist asks the master until it has answered, or the phase is another one.
func (s *Service) insist(ctx context.Context, turn int, ask func() error) error {
	for pause := askPause; ; pause = min(2*pause, insistPause) {
		err := ask()
		s.noticeOutage(err)
		if err == nil {
			return nil
		}
		if err := s.wait(ctx, turn, pause); err != nil {
			return err
		}
	}
}

// preCheck is this node's view of the master's check of the job.
type preCheck struct {
	told   bool // the master knows that this node waits
	passed bool
	status string // the last one
}

// passes asks whether the master has checked the job; 0.4 checks nothing.
func (s *Service) passes(ctx context.Context) (bool, error) {
	c := &s.preCheck
	if c.passed || s.master.client.Dialect() == pyproto.Grpc {
		return true, nil
	}
	if !c.told {
		if err := s.master.event(ctx, "WAIT_PRE_CHECK"); err != nil {
			return false, err
		}
		c.told = true
	}
	m, err := s.master.client.Get(ctx, s.master.client.New("PreCheckRequest",
		pyproto.Field{Name: "timestamp", Value: int(time.Now().Unix())}, pyproto.Field{Name: "type", Value: ""}))
	if err != nil {
		return false, err
	}
	status := m.Str("status")
	if c.passed = m == nil || status == "PASS" || status == "DISABLED"; !c.passed && status != c.status {
		s.cfg.Log.Info("waiting for the master's check of the job", "status", status, "reason", m.Str("reason"))
	}
	c.status = status
	return c.passed, nil
}

// askMembers asks whether nodes wait for a new world.
func (s *Service) askMembers(ctx context.Context, turn int) error {
	if err := s.showAgain(ctx); err != nil {
		return err
	}
	n, err := s.master.waiting(ctx)
	if err != nil || n <= 0 { // below 0: the job ends, and the workers of this node may still succeed
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if turn == s.turn {
		s.stop(job.Cause{Kind: job.CauseGrowth, Text: fmt.Sprintf("nodes that wait for a new world: %d", n)})
	}
	return nil
}

// stop ends the epoch; the launcher joins again. s is locked.
func (s *Service) stop(cause job.Cause) {
	s.enter(idle)
	s.cause = &cause
	s.direct(rendezvous.Directive{Kind: job.Stop, Cause: &cause})
}

// fail ends the run for this node. s is locked.
func (s *Service) fail(cause job.Cause) {
	s.enter(over)
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
		s.cfg.Log.Warn("cannot ask the master; trying again", "workers_running", s.phase == running, "err", err)
	case err != nil:
		s.forsaken(time.Since(o.since))
	case !o.since.IsZero():
		if o.said {
			s.cfg.Log.Info("the master is back", "after", time.Since(o.since).Round(time.Millisecond).String())
		}
		*o = outage{}
		s.preCheck.told = false
		s.joined = time.Time{}
		if s.phase == forming {
			s.since = time.Now()
		}
	}
}

// forsaken ends a run whose master does not come back: workers that run go on, and their results count. s is locked.
func (s *Service) forsaken(gone time.Duration) {
	if gone < s.params.JoinTimeout || s.phase == running || s.phase == over {
		return
	}
	if s.phase == ending {
		s.cfg.Log.Warn("the master cannot be told that this node has succeeded")
		s.succeed()
		return
	}
	s.fail(job.Cause{Kind: job.CauseTimeout, Text: "no master for " + gone.Round(time.Second).String()})
}
