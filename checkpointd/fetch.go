package checkpointd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/retry"
	"dlrover-run/internal/stable"
)

var errUnwanted = errors.New("not for this node")

type holder struct {
	node int
	addr string
	copy coordinator.Copy
}

// holders are the nodes that have a newer save for the rank and directory of r than this node. Complete saves are
// first, because only those can be loaded, then those with the most shards left. Among equals the newest is first.
func (p *peers) holders(self int, r request, have []restorable) []holder {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []holder
	shards := map[string]map[int]bool{}
	for _, peer := range p.known {
		for _, c := range peer.Copies {
			if c.Dir != "" && c.Dir != r.Dir {
				continue
			}
			if shards[c.Save] == nil {
				shards[c.Save] = map[int]bool{}
			}
			shards[c.Save][c.Shard] = true
			if peer.Node != self && (c.Rank == r.Rank || c.Rank == anyRank) && newer(c, have) {
				out = append(out, holder{peer.Node, peer.Addr, c})
			}
		}
	}
	whole := func(c coordinator.Copy) int {
		if c.Shards > 0 && len(shards[c.Save]) == c.Shards {
			return 1
		}
		return 0
	}
	stable.Sort(out, func(a, b holder) int {
		return cmp.Or(whole(b.copy)-whole(a.copy), len(shards[b.copy.Save])-len(shards[a.copy.Save]),
			compareAge(b.copy, a.copy))
	})
	return out
}

func newer(c coordinator.Copy, have []restorable) bool {
	return !slices.ContainsFunc(have, func(o restorable) bool {
		return o.Save == c.Save || compareAge(c, coordinator.Copy{Step: o.Step, SavedNS: o.SavedNS}) <= 0
	})
}

// compareAge is positive if a is newer. Not every node reports the time of a save.
func compareAge(a, b coordinator.Copy) int {
	if a.SavedNS != 0 && b.SavedNS != 0 {
		return cmp.Or(cmp.Compare(a.SavedNS, b.SavedNS), cmp.Compare(a.Step, b.Step))
	}
	return cmp.Compare(a.Step, b.Step)
}

// fetchFrom waits a little for a node whose daemon is being started again.
func (p *peers) fetchFrom(ctx context.Context, h holder, dir string) error {
	pause := retry.Backoff{First: fetchFirst}
	for tries := 1; ; tries++ {
		err := p.fetchOne(ctx, h, dir)
		if !absent(err) || ctx.Err() != nil {
			return err
		}
		addr := p.renew(ctx, h.node)
		if addr != "" && addr != h.addr {
			h.addr = addr
			continue
		}
		if tries == fetchTries || !pause.Wait(ctx) {
			return err
		}
	}
}

func (p *peers) fetchOne(ctx context.Context, h holder, dir string) error {
	if pin, err := (replicaStore{p.segs}).Copy(h.copy.Rank, h.copy.Save); err == nil {
		pin.Release()
		return nil // another local rank has fetched it
	}
	into := func(m shm.Meta, size int64) (*shm.Incoming, error) {
		if m.Dir != dir {
			return nil, fmt.Errorf("%w: it is of %s", errUnwanted, m.Dir)
		}
		in, err := (replicaStore{p.segs}).Incoming(m, size)
		if err != nil {
			err = fmt.Errorf("%w: %w", errUnwanted, err)
		}
		return in, err
	}
	seg, err := p.client.Fetch(ctx, h.addr, h.copy.Rank, h.copy.Save, into)
	if err != nil {
		return err
	}
	p.log.Info("fetched a checkpoint from another node", "step", h.copy.Step, "rank", h.copy.Rank, "node", h.node)
	replicaStore{p.segs}.Published(seg)
	p.count.add(func(n *Counters) { n.CopiesFetched++ })
	return nil
}
