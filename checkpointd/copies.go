package checkpointd

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"dlrover-run/checkpointd/shm"
)

// copies are those of our saves on other nodes, and theirs here. They begin when a checkpoint or the configuration asks
// for them.
type copies struct {
	cfg   *Config
	life  *lifetime
	log   *slog.Logger
	count *counters
	segs  *segments

	mu    sync.Mutex
	world World
	peers *peers // nil until copies are wanted
}

// want starts keeping copies on nodes nodes, this one included.
func (c *copies) want(nodes int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if nodes < 2 || c.peers != nil || c.world.GroupWorldSize < 2 || c.life.ctx.Err() != nil {
		return
	}
	p, err := newPeers(c, nodes)
	if err != nil {
		c.log.Warn("checkpoints are not copied to other nodes", "err", err)
		return
	}
	c.peers = p
	p.exchange(c.world)
}

// setWorld begins an epoch.
func (c *copies) setWorld(w World) {
	c.mu.Lock()
	c.world = w
	p := c.peers
	c.mu.Unlock()
	if p == nil {
		c.want(c.cfg.Replicas)
	} else {
		p.exchange(w)
	}
}

// current returns the peers, nil if there are none, and the epoch.
func (c *copies) current() (*peers, World) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.peers, c.world
}

// kept reports whether other nodes may have copies.
func (c *copies) kept() bool {
	p, _ := c.current()
	return p != nil
}

// replicate gives a new save to the pusher. Of a rank and directory only the newest waits. A state that every node
// holds anyway needs no copies.
func (c *copies) replicate(saved time.Time, m shm.Meta) {
	c.want(m.Replicas)
	if p, _ := c.current(); p != nil {
		p.enqueue(saved, m)
		p.wakePush()
	}
}

// fetch brings a rank's newest shard from another node, if that has a newer one than this node.
func (c *copies) fetch(ctx context.Context, r request) {
	p, w := c.current()
	if p == nil {
		return
	}
	if c.life.until(ctx, func() bool { return p.knows(w) }) != nil {
		return // no answer in time: use the saves of this node
	}
	gone := map[int]bool{}
	for _, h := range p.holders(w.GroupRank, r, c.segs.restorable(r)) {
		if gone[h.node] {
			continue
		}
		err := p.fetchFrom(ctx, h, r.Dir)
		if err == nil {
			return
		}
		gone[h.node] = absent(err)
		c.log.Warn("cannot fetch a checkpoint from another node", "step", h.copy.Step, "rank", h.copy.Rank,
			"node", h.node, "err", err)
	}
}

// close ends the exchange with other nodes.
func (c *copies) close() {
	if p, _ := c.current(); p != nil {
		p.close()
	}
}
