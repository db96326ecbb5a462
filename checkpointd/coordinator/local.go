package coordinator

import (
	"context"
	"errors"
	"fmt"
	"time"

	"dlrover-run/checkpointd/commit"
)

// local is a run with the shards of one node.
type local struct {
	node int
	run  *run
}

// Local returns the Coordinator of a node that writes all shards of its saves itself, which may be posted one by one.
// Agree and Peers answer at once, from this node alone.
func Local(node int) Coordinator { return &local{node, newRun()} }

func (c *local) Post(ctx context.Context, r Report) ([]commit.Entry, error) {
	for {
		es, err := c.run.post(ctx, r)
		if !errors.Is(err, errPending) {
			return es, withReport(err, r)
		}
	}
}

// withReport adds the report that was waiting to an error of a context.
func withReport(err error, r Report) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("waiting for the other shards of save %s of step %d, %s here: %w", r.Save.ID, r.Save.Step,
			r.Phase, err)
	}
	return err
}

func (c *local) Agree(_ context.Context, _ string, _, _ int, hs []Holding, _ time.Duration) (Plan, bool, error) {
	p, ok := alone(c.node, hs)
	if ok {
		c.run.reopen(p.Save)
	}
	return p, ok, nil
}

func (c *local) Announce(context.Context, Participation) error { return nil }

func (c *local) Peers(_ context.Context, _ string, self Peer, _ int, _ time.Duration) ([]Peer, error) {
	return []Peer{self}, nil
}

func (c *local) Ages(_ context.Context, of string, node int, ages []Age) error {
	return c.run.apply(agesEvent{of, node, ages})
}
