package api

import (
	"context"
	"errors"
	"time"

	"dlrover-run/internal/retry"
	"dlrover-run/rendezvous"
)

// Final reports whether no repetition helps against the error: the node is refused.
func Final(err error) bool {
	for _, final := range []error{rendezvous.ErrRefused, ErrUnauthorized, ErrBadRequest, ErrClosed} {
		if errors.Is(err, final) {
			return true
		}
	}
	return false
}

// retry repeats f until it succeeds, fails for good or ctx ends. The daemon's absence is logged once, and so is its
// return.
func (s *Session) retry(ctx context.Context, what string, f func(context.Context) error) error {
	away := outage{s: s, what: what}
	for {
		err := f(ctx)
		if err == nil || Final(err) || errors.Is(err, rendezvous.ErrUnknownNode) {
			away.over(err)
			return err
		}
		if ctx.Err() != nil {
			return ended(ctx, away.last)
		}
		if !away.wait(ctx, err) {
			return ended(ctx, err)
		}
	}
}

// ended is the reason why ctx ended, with the last error of the attempts.
func ended(ctx context.Context, last error) error {
	if last == nil {
		return context.Cause(ctx)
	}
	return &awayError{context.Cause(ctx), last}
}

// awayError reads as the last attempt's error and is also the error that ended the attempts.
type awayError struct{ cause, last error }

func (e *awayError) Error() string   { return e.last.Error() }
func (e *awayError) Unwrap() []error { return []error{e.cause, e.last} }

// retryKnown is retry for requests of a node that the daemon should know: one that was
// started again does not, until follow has introduced the node.
func (s *Session) retryKnown(ctx context.Context, what string, f func(context.Context) error) error {
	const attempts = 8 // some three seconds
	unknown := 0
	ctx, cancel := s.patient(ctx)
	defer cancel()
	return s.retry(ctx, what, func(ctx context.Context) error {
		err := f(ctx)
		if errors.Is(err, rendezvous.ErrUnknownNode) {
			if unknown++; unknown < attempts {
				return errNotIntroduced
			}
		}
		return err
	})
}

var errNotIntroduced = errors.New("api: the daemon does not know this node yet")

// outage is the absence of the daemon as one caller sees it.
type outage struct {
	s     *Session
	what  string
	since time.Time
	pause retry.Backoff
	last  error
	said  bool
}

// sayAfter keeps a daemon that is merely a moment late out of the log.
const sayAfter = 500 * time.Millisecond

// wait sleeps before the next attempt; it reports false when ctx ended meanwhile.
func (o *outage) wait(ctx context.Context, err error) bool {
	if o.since.IsZero() {
		o.since, o.pause = time.Now(), retry.Backoff{First: minBackoff, Spread: true}
	}
	o.last = err
	if !o.said && time.Since(o.since) >= sayAfter {
		o.said = true
		text := "cannot reach the rendezvous daemon; trying again"
		if errors.Is(err, errStranger) {
			text = "the rendezvous does not know this host yet; trying again"
		} else if o.s.working() {
			text = "cannot reach the rendezvous daemon; running workers keep running, trying again"
		}
		o.s.cfg.Logger.Warn(text, "daemon", o.s.cfg.Where, "what", o.what, "err", err)
	}
	o.pause.Most = maxBackoff
	if time.Since(o.since) < eager {
		o.pause.Most = eagerBackoff
	}
	return o.pause.Wait(ctx)
}

func (o *outage) over(err error) {
	if o.said && err == nil {
		after := time.Since(o.since).Round(time.Millisecond)
		o.s.cfg.Logger.Info("the rendezvous daemon is back", "daemon", o.s.cfg.Where, "after", after.String())
	}
	o.since, o.said = time.Time{}, false
}

// Back-off between attempts to reach the daemon.
const (
	minBackoff = 10 * time.Millisecond
	maxBackoff = time.Second
	// A daemon that was started again should hear of a running world before others
	// found a new one.
	eager        = 10 * time.Second
	eagerBackoff = 250 * time.Millisecond
)
