package checkpointd

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/shm"
)

// breakpoints write the saves in memory when workers fail or end.
type breakpoints struct {
	life    *lifetime
	log     *slog.Logger
	count   *counters
	segs    *segments
	saves   *saves
	storage *storage
	flusher *flusher
	restart *restart
	coords  coordinators
	master  bool // the nodes meet at a master, which decides who writes a shard that several hold
}

// start saves in the background the memory of the workers of epoch w. later is an epoch that has begun since, or "".
func (b *breakpoints) start(w World, later, reason string, pace Pace) {
	if pace == AfterRestart {
		b.restart.begin()
	} else {
		b.restart.over()
	}
	b.saves.countBreakpoint(1)
	b.count.add(func(n *Counters) { n.Breakpoints++ })
	b.life.wg.Go(func() {
		all := b.holdings(w, later)
		if pace != Early {
			b.life.wg.Go(func() { b.announce(w, slices.Collect(maps.Keys(all))) })
		}
		for dir, hs := range all {
			if err := b.save(w, later, dir, hs, reason, pace); err != nil && b.life.ctx.Err() == nil {
				b.log.Warn("cannot save what is in memory", "dir", dir, "err", err)
			}
		}
		b.saves.countBreakpoint(-1)
		b.segs.rescan()
	})
}

// announce reports the directories of this node, so that other nodes do not wait for the rest. A node that has just
// replaced another holds nothing.
func (b *breakpoints) announce(w World, dirs []string) {
	if w.GroupWorldSize < 2 {
		return
	}
	s := coordinator.Participation{Of: w.Key(), Node: w.GroupRank}
	for _, dir := range dirs {
		s.Keys = append(s.Keys, breakpointKey(w, dir, false), breakpointKey(w, dir, true))
	}
	ctx, cancel := context.WithTimeout(b.life.ctx, agreePatience) // then no node waits any more
	defer cancel()
	if err := b.coords.shared.Announce(ctx, s); err != nil {
		b.log.Debug("the other nodes have to wait", "err", err)
	}
}

// breakpointKey names the agreement of an epoch about a directory.
func breakpointKey(w World, dir string, early bool) string {
	sum := sha256.Sum256([]byte(dir))
	key := "breakpoint." + w.Key() + "." + hex.EncodeToString(sum[:8])
	if early {
		key += ".early"
	}
	return key
}

// holdings lists, by checkpoint directory, the saves that this node has in memory, except those of the epoch later.
func (b *breakpoints) holdings(w World, later string) map[string][]coordinator.Holding {
	out := map[string][]coordinator.Holding{}
	b.segs.each(func(name string, _ *segment, h shm.Header, m shm.Meta) {
		if later != "" && m.Epoch == later {
			return
		}
		if w.GroupWorldSize > 1 && !b.master && !m.Primary {
			return // without a master nothing decides which of several holders writes
		}
		out[m.Dir] = append(out[m.Dir], coordinator.Holding{Save: m.Save, Dir: m.Dir, Step: m.Step, Saved: h.Saved,
			Shard: m.Shard, Shards: m.Shards, Copy: !ours(name)})
	})
	return out
}

// save writes the newest save of dir whose shards are all in memory, unless the disk has it.
func (b *breakpoints) save(w World, later, dir string, hs []coordinator.Holding, reason string, pace Pace) error {
	c := b.coords.local
	if w.GroupWorldSize > 1 {
		c = b.coords.shared
	}
	node, nodes := w.GroupRank, w.GroupWorldSize
	if nodes == 1 {
		node = 0
	}
	ctx, cancel := context.WithTimeout(b.life.ctx, 2*agreePatience)
	defer cancel()
	inFlight := slices.DeleteFunc(b.saves.inFlight(dir),
		func(j *save) bool { return later != "" && j.meta.Epoch == later })
	plan, ok, err := c.Agree(ctx, breakpointKey(w, dir, pace == Early), node, nodes, hs, agreePatience)
	if err != nil {
		newest := slices.MaxFunc(hs, func(x, y coordinator.Holding) int { return x.Saved.Compare(y.Saved) })
		b.saves.decide(dir, &newest)
		return err
	}
	b.saves.decide(dir, nil)
	dropIncomplete(inFlight, plan, hs, ok)
	if !ok || b.storage.hasPlanned(plan, hs) {
		return nil
	}
	if !b.saves.abortedTwice(plan.Save) {
		b.log.Info("saving what is in memory", "step", plan.Step, "dir", dir, "reason", reason)
	}
	for _, shard := range plan.Mine {
		j := b.startHeld(plan.Save, shard, pace)
		if j == nil {
			err = errors.Join(err, fmt.Errorf("shard %d of step %d is no longer in memory", shard, plan.Step),
				postFailure(ctx, c, plan, hs, shard, errIncomplete))
		} else if ph, _ := b.saves.state(j); ph.aborted() {
			err = errors.Join(err, postFailure(ctx, c, plan, hs, shard, errAbortedBefore))
		}
	}
	return err
}

var errAbortedBefore = errors.New("it was given up before")

var errIncomplete = errors.New("not all of its shards are left in memory")

// dropIncomplete drops the saves that were made after the newest complete one.
func dropIncomplete(inFlight []*save, plan coordinator.Plan, hs []coordinator.Holding, ok bool) {
	for _, j := range inFlight {
		if !ok || madeAfter(j, plan, hs) {
			j.drop(errIncomplete)
		}
	}
}

// madeAfter reports whether j was made after the planned save. Steps may go back, and only the saves of one shard are
// certain to come one after the other.
func madeAfter(j *save, plan coordinator.Plan, hs []coordinator.Holding) bool {
	var last time.Time
	for _, h := range hs {
		if h.Save == plan.Save && h.Shard == j.meta.Shard {
			return j.saved.After(h.Saved)
		}
		if h.Save == plan.Save && h.Saved.After(last) {
			last = h.Saved
		}
	}
	if last.IsZero() { // nothing of it is here
		return j.meta.Step > plan.Step
	}
	return j.saved.After(last)
}

// postFailure informs the writers of the other shards that one will not come.
func postFailure(ctx context.Context, c coordinator.Coordinator, plan coordinator.Plan,
	hs []coordinator.Holding, shard int, why error) error {
	shards := 0
	for _, h := range hs {
		if h.Save == plan.Save {
			shards = h.Shards
		}
	}
	s := coordinator.Save{ID: plan.Save, Step: plan.Step, Shards: shards, Dir: plan.Dir}
	r := coordinator.Report{Save: s, Phase: coordinator.Failed, Shards: []int{shard}, Error: why.Error()}
	_, err := c.Post(ctx, r)
	return err
}

// startHeld writes a shard from any segment that has it, a second time if it was aborted. nil: no segment has it.
func (b *breakpoints) startHeld(id string, shard int, pace Pace) (started *save) {
	b.segs.each(func(_ string, s *segment, h shm.Header, m shm.Meta) {
		if started == nil && m.Save == id && m.Shard == shard {
			j := newSave(s, h.Seq, h.Saved, m)
			j.afterRestart = pace == AfterRestart
			j.secondAttempt = b.saves.tried(id, shard)
			started = b.flusher.launch(j)
		}
	})
	return started
}
