package checkpointd

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"dlrover-run/checkpointd/board"
	"dlrover-run/checkpointd/shm"
)

// SetWorld tells the daemon which epoch the launcher is about to start workers of.
func (d *Daemon) SetWorld(w World) {
	d.mu.Lock()
	d.world = w
	d.mended = map[string]bool{}
	d.changedLocked()
	p := d.peers
	d.mu.Unlock()
	if p == nil {
		d.wantCopies(d.cfg.Replicas)
	} else {
		p.exchange(w)
	}
}

// Breakpoint saves, in the background, the newest step that all shards are held of in
// memory, unless the disk has it or a newer one. Launchers of all nodes call it when the
// workers of an epoch have ended without success; early is for one that has been told to
// end while its workers still run.
func (d *Daemon) Breakpoint(reason string, early bool) {
	d.scan()
	d.mu.Lock()
	w := d.world
	d.breaking++
	d.count.Breakpoints++
	d.mu.Unlock()
	d.wg.Go(func() {
		for dir, hs := range d.holdings(w) {
			if err := d.breakpoint(w, dir, hs, reason, early); err != nil && d.ctx.Err() == nil {
				d.log.Warn("cannot save what is in memory", "dir", dir, "err", err)
			}
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		d.breaking--
		d.changedLocked()
	})
}

// holdings lists, by checkpoint directory, the saves that this node has in memory.
func (d *Daemon) holdings(w World) map[string][]board.Holding {
	out := map[string][]board.Holding{}
	d.held(func(name string, _ *segment, h shm.Header, m shm.Meta) {
		if w.GroupWorldSize > 1 && d.cfg.Remote == nil && !m.Primary {
			return // without a master nobody would settle which of several holders writes
		}
		out[m.Dir] = append(out[m.Dir], board.Holding{Save: m.Save, Dir: m.Dir, Step: m.Step, Saved: h.Saved, Shard: m.Shard, Shards: m.Shards, Copy: !ours(name)})
	})
	return out
}

func (d *Daemon) breakpoint(w World, dir string, hs []board.Holding, reason string, early bool) error {
	b := d.local
	if w.GroupWorldSize > 1 {
		b = d.shared()
	}
	sum := sha256.Sum256([]byte(dir))
	key := "breakpoint." + w.Key() + "." + hex.EncodeToString(sum[:8])
	if early {
		key += ".early"
	}
	node, nodes := w.GroupRank, w.GroupWorldSize
	if nodes == 1 {
		node = 0
	}
	ctx, cancel := context.WithTimeout(d.ctx, 2*agreePatience)
	defer cancel()
	plan, ok, err := b.Agree(ctx, key, node, nodes, hs, agreePatience)
	if err != nil || !ok || d.onDiskAlready(plan, hs) {
		return err
	}
	d.log.Info("saving what is in memory", "step", plan.Step, "dir", dir, "reason", reason)
	for _, shard := range plan.Mine {
		if !d.startHeld(plan.Save, shard) {
			err = errors.Join(err, fmt.Errorf("shard %d of step %d is no longer in memory", shard, plan.Step))
		}
	}
	return err
}

// onDiskAlready reports whether storage has the planned save or a later one.
func (d *Daemon) onDiskAlready(plan board.Plan, hs []board.Holding) bool {
	var saved time.Time
	for _, h := range hs {
		if h.Save == plan.Save && h.Saved.After(saved) {
			saved = h.Saved
		}
	}
	ms, err := d.store.Manifests(plan.Dir)
	if err != nil {
		return false
	}
	for _, m := range ms {
		if m.ID == plan.Save || !saved.IsZero() && m.Saved.After(saved) {
			return true
		}
	}
	return false
}

// startHeld writes a shard from whatever segment has it.
func (d *Daemon) startHeld(id string, shard int) bool {
	found := false
	d.held(func(_ string, s *segment, h shm.Header, m shm.Meta) {
		if !found && m.Save == id && m.Shard == shard {
			found = true
			d.start(s, h, m)
		}
	})
	return found
}

// shared is the board of all nodes.
func (d *Daemon) shared() board.Board {
	if d.cfg.Remote != nil {
		return d.cfg.Remote
	}
	return board.Markers(d.cfg.FS)
}
