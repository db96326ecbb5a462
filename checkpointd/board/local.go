package board

import (
	"context"
	"errors"
	"fmt"
	"time"

	"dlrover-run/checkpointd/commit"
)

// local is a room for the shards of one node.
type local struct {
	node int
	room *room
}

// Local returns the Board of a node that writes all shards of its saves itself, which may be posted one by one. Agree
// and Peers answer at once, from this node alone.
func Local(node int) Board { return &local{node, newRoom()} }

func (b *local) Post(ctx context.Context, r Report) ([]commit.Entry, error) {
	for {
		es, err := b.room.post(ctx, r)
		if !errors.Is(err, errPending) {
			return es, saying(err, r)
		}
	}
}

// saying adds to an error of a context what was waited for.
func saying(err error, r Report) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("waiting for the other shards of save %s of step %d, %s here: %w", r.Save.ID, r.Save.Step, r.Phase, err)
	}
	return err
}

func (b *local) Agree(_ context.Context, _ string, _, _ int, hs []Holding, _ time.Duration) (Plan, bool, error) {
	p, ok := alone(b.node, hs)
	if ok {
		b.room.again(p.Save)
	}
	return p, ok, nil
}

func (b *local) Speaks(context.Context, Speaks) error { return nil }

func (b *local) Peers(_ context.Context, _ string, self Peer, _ int, _ time.Duration) ([]Peer, error) {
	return []Peer{self}, nil
}

func (b *local) Ages(_ context.Context, node int, ages []Age) error {
	return b.room.tell(Aged{node, ages})
}
