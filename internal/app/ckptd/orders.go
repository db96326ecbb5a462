package ckptd

import (
	"context"
	"errors"
	"time"

	"dlrover-run/checkpointd"
)

// request is a message to a daemon. It may be called again, with the next daemon.
type request func(ctx context.Context, c *checkpointd.Control) error

// deliver executes requests one after the other, in the background.
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

// send queues a request to the daemon.
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

// call sends a request to the daemon, or to the next one if it dies meanwhile. If no daemon was ever started, workers
// have nothing to keep, and the request is dropped.
func (s *Supervisor) call(ctx context.Context, order request) error {
	for begun := time.Now(); ; {
		c, expected := s.daemonNow()
		if !expected {
			return nil
		}
		err := errors.New("it does not run")
		if c == nil && s.cfg.Sidecar != "" && time.Since(begun) > OrderBudget {
			return err // this process does not start a sidecar
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

// daemonNow is the connection to the daemon, if there is one now; expected reports whether there should be.
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
