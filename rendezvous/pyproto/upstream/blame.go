package upstream

import (
	"context"
	"slices"
	"time"

	"dlrover-run/internal/job"
)

// When a worker dies, its peers fail within milliseconds, before the master can report that the node of the first one
// wants a new world. A node of such peers pays nothing if the workers of another node failed by themselves. If none
// did, such as after an interruption of the network, one of those nodes pays: restarts have to come to an end.

// The keys below a world's for that: a node's workers have failed by themselves; the number of nodes without another to
// blame.
const (
	blameKey   = "dlrover-run/blame"
	nobodysKey = "dlrover-run/nobodys"
)

// pendingCharge is a failure that no node has paid for yet.
type pendingCharge struct {
	since time.Time // zero: there is none
	own   bool      // a worker of this node has failed by itself, too
	world world
}

// follow reports whether every one of the failures can be another node's consequence.
func follow(fs []job.Failure, consequence func(job.Failure) bool) bool {
	return !slices.ContainsFunc(fs, func(f job.Failure) bool { return !consequence(f) })
}

// pay settles the pending charge, and reports whether that is done.
func (s *Service) pay(ctx context.Context) (bool, error) {
	s.mu.Lock()
	d := s.pendingCharge
	s.mu.Unlock()
	if d.since.IsZero() {
		return true, nil
	}
	mine, known, err := d.mine(ctx, s.master, s.every.blame)
	if err != nil || !known {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pendingCharge = pendingCharge{}
	switch {
	case !mine:
	case s.spent < s.params.MaxRestarts:
		s.spent++
	default:
		s.fail(*s.cause)
		return false, nil
	}
	return true, nil
}

// mine reports whether this node pays, if that is known.
func (d pendingCharge) mine(ctx context.Context, m *master, patience time.Duration) (mine, known bool, err error) {
	if d.own {
		m.kv.takeBlame(ctx, d.world)
		return true, true, nil
	}
	blamed, err := m.kv.text(ctx, d.world.key(blameKey))
	if err != nil || blamed != "" {
		return false, err == nil, err
	}
	waiting, err := m.waiting(ctx)
	if err != nil || waiting > 0 {
		return false, err == nil, err
	}
	if time.Since(d.since) < patience {
		return false, false, nil
	}
	n, err := m.kv.add(ctx, d.world.key(nobodysKey))
	return n == 1, err == nil, err
}
