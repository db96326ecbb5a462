package ckptd

import (
	"context"
	"errors"
	"time"

	"dlrover-run/checkpointd"
)

// request says something to a daemon. It may be called again, with the next daemon.
type request func(ctx context.Context, c *checkpointd.Control) error

// deliver carries out orders one after the other, beside the launcher's loop.
func (s *Supervisor) deliver() {
	for {
		select {
		case o := <-s.orders:
			o()
		case <-s.quit:
			return
		}
	}
}

// send queues something to tell the daemon.
func (s *Supervisor) send(order request) {
	deliver := func() {
		ctx, cancel := context.WithTimeout(context.Background(), OrderBudget)
		defer cancel()
		if err := s.call(ctx, order); err != nil {
			s.log.Warn("cannot tell the checkpoint daemon", "err", err)
		}
	}
	select {
	case s.orders <- deliver:
	case <-s.quit:
	}
}

// call tells the daemon, or the next one if it dies meanwhile. Without a daemon no worker has anything to keep, and
// nothing is told.
func (s *Supervisor) call(ctx context.Context, order request) error {
	for begun := time.Now(); ; {
		c, expected := s.daemonNow()
		if !expected {
			return nil
		}
		err := errors.New("it does not run")
		if c == nil && s.cfg.Sidecar != "" && time.Since(begun) > OrderBudget {
			return err // nobody here starts it again
		}
		if c != nil {
			if err = order(ctx, c); err == nil {
				return nil
			}
			s.disconnect(c)
		}
		select {
		case <-time.After(startPause):
		case <-ctx.Done():
			return err
		case <-s.quit:
			return err
		}
	}
}

// daemonNow is the connection to the daemon, if there is one now; expected says whether there should be.
func (s *Supervisor) daemonNow() (c *checkpointd.Control, expected bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.control, s.started
}

// pendingBreakpoint is the last breakpoint, if the daemon before may have died over it: the others wait for its part.
// mu is held.
func (s *Supervisor) pendingBreakpoint() request {
	if time.Now().After(s.resendUntil) {
		return nil
	}
	return s.lastBreakpoint
}
