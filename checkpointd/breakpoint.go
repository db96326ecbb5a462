package checkpointd

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/shm"
)

// SetWorld sets the epoch whose workers the launcher is about to start.
func (d *Daemon) SetWorld(w World) {
	d.mu.Lock()
	for _, epoch := range append(d.foundEpochs, d.world.Key()) {
		d.endedEpochs[epoch] = true
	}
	d.foundEpochs = nil
	delete(d.endedEpochs, w.Key())
	d.world = w
	d.recovered, d.loggedLoads = map[string]bool{}, map[string]bool{}
	d.changedLocked()
	p := d.peers
	d.mu.Unlock()
	if p == nil {
		d.wantCopies(d.cfg.Replicas)
	} else {
		p.exchange(w)
	}
	d.rescan() // for saves of the earlier workers
}

// dropPartial drops the saves whose other shards cannot come any more: a worker of this node has saved over its shard,
// or (of saves of this node alone) the workers of their epoch have ended.
func (d *Daemon) dropPartial() {
	d.mu.Lock()
	whole := !slices.ContainsFunc(d.inFlightLocked(""), func(j *save) bool { return j.meta.Shards > 1 })
	d.mu.Unlock()
	if whole {
		return
	}
	latest, here := d.latestOrders(), map[shardOf]bool{} // in this order: a save that was passed was here before
	d.eachHeld(func(_ string, _ *segment, _ shm.Header, m shm.Meta) { here[shardOf{m.Save, m.Shard}] = true })
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.breakpoints > 0 { // it may be about to start the others
		return
	}
	tried := map[string]int{}
	for _, j := range d.saves {
		if p := (shardOf{j.meta.Save, j.meta.Shard}); !j.secondAttempt {
			here[p] = true
			tried[p.save]++
		}
	}
	for _, j := range d.inFlightLocked("") {
		ended := d.endedEpochs[j.meta.Epoch] && d.coordinatorOf(j.meta) == d.local
		if ended && tried[j.meta.Save] < j.meta.Shards || latest.passed(j, here) {
			d.drop(j, errPartial)
		}
	}
}

// part is a shard of a save.
type shardOf struct {
	save  string
	shard int
}

// stream identifies the saves of one shard. They are made one after the other.
type stream struct {
	epoch, dir    string
	shard, shards int
}

// orders are the latest saves of the streams of this node.
type orders map[stream]struct {
	saved time.Time
	order int64
}

func (d *Daemon) latestOrders() orders {
	latest := orders{}
	d.eachHeld(func(name string, _ *segment, h shm.Header, m shm.Meta) {
		if at := (stream{m.Epoch, m.Dir, m.Shard, m.Shards}); ours(name) && m.Primary &&
			h.Saved.After(latest[at].saved) {
			l := latest[at]
			l.saved, l.order = h.Saved, m.Order
			latest[at] = l
		}
	})
	return latest
}

// passed reports whether a worker of this node has made a later save and its shard of j is gone. Workers may restart
// their count within an epoch, so the time counts as well.
func (o orders) passed(j *save, here map[shardOf]bool) bool {
	m := j.meta
	for at, last := range o {
		same := at == stream{m.Epoch, m.Dir, at.shard, m.Shards}
		if same && m.Order > 0 && last.order > m.Order && last.saved.After(j.saved) &&
			!here[shardOf{m.Save, at.shard}] {
			return true
		}
	}
	return false
}

// Breakpoint saves in the background: it writes the newest step whose shards are all in memory, unless the disk has
// that step or a newer one. Launchers of all nodes call it when the workers of an epoch have ended. early means that
// the workers still run, and have been sent a signal to end.
func (d *Daemon) Breakpoint(reason string, early bool) {
	d.breakpointOf(World{}, reason, early)
}

// breakpointOf is Breakpoint for the epoch w, or for the present one if w is zero.
func (d *Daemon) breakpointOf(w World, reason string, early bool) {
	d.scan()
	d.mu.Lock()
	if w == (World{}) {
		w = d.world
	}
	later := ""
	if w.Key() != d.world.Key() {
		later = d.world.Key()
	}
	d.breakpoints++
	d.count.Breakpoints++
	d.mu.Unlock()
	d.wg.Go(func() {
		all := d.holdings(w, later)
		if !early {
			d.wg.Go(func() { d.announce(w, slices.Collect(maps.Keys(all))) })
		}
		for dir, hs := range all {
			if err := d.breakpoint(w, later, dir, hs, reason, early); err != nil && d.ctx.Err() == nil {
				d.log.Warn("cannot save what is in memory", "dir", dir, "err", err)
			}
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		d.breakpoints--
		d.changedLocked()
		d.rescan()
	})
}

// announce reports the directories of this node, so that other nodes do not wait for the rest. A node that has just
// replaced another holds nothing.
func (d *Daemon) announce(w World, dirs []string) {
	if w.GroupWorldSize < 2 {
		return
	}
	s := coordinator.Participation{Of: w.Key(), Node: w.GroupRank}
	for _, dir := range dirs {
		s.Keys = append(s.Keys, breakpointKey(w, dir, false), breakpointKey(w, dir, true))
	}
	ctx, cancel := context.WithTimeout(d.ctx, agreePatience) // then no node waits any more
	defer cancel()
	if err := d.shared().Announce(ctx, s); err != nil {
		d.log.Debug("the other nodes have to wait", "err", err)
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
func (d *Daemon) holdings(w World, later string) map[string][]coordinator.Holding {
	out := map[string][]coordinator.Holding{}
	d.eachHeld(func(name string, _ *segment, h shm.Header, m shm.Meta) {
		if later != "" && m.Epoch == later {
			return
		}
		if w.GroupWorldSize > 1 && d.cfg.Remote == nil && !m.Primary {
			return // without a master nothing decides which of several holders writes
		}
		out[m.Dir] = append(out[m.Dir], coordinator.Holding{Save: m.Save, Dir: m.Dir, Step: m.Step, Saved: h.Saved,
			Shard: m.Shard, Shards: m.Shards, Copy: !ours(name)})
	})
	return out
}

func (d *Daemon) breakpoint(w World, later, dir string, hs []coordinator.Holding, reason string, early bool) error {
	c := d.local
	if w.GroupWorldSize > 1 {
		c = d.shared()
	}
	node, nodes := w.GroupRank, w.GroupWorldSize
	if nodes == 1 {
		node = 0
	}
	ctx, cancel := context.WithTimeout(d.ctx, 2*agreePatience)
	defer cancel()
	d.mu.Lock()
	inFlight := slices.DeleteFunc(d.inFlightLocked(dir),
		func(j *save) bool { return later != "" && j.meta.Epoch == later })
	d.mu.Unlock()
	plan, ok, err := c.Agree(ctx, breakpointKey(w, dir, early), node, nodes, hs, agreePatience)
	d.mu.Lock()
	delete(d.undecided, dir)
	if err != nil {
		d.undecided[dir] = slices.MaxFunc(hs, func(a, b coordinator.Holding) int { return a.Saved.Compare(b.Saved) })
	}
	d.mu.Unlock()
	if err != nil {
		return err
	}
	d.dropIncomplete(inFlight, plan, hs, ok)
	if !ok || d.onDiskAlready(plan, hs) {
		return nil
	}
	if !d.abortedTwice(plan) {
		d.log.Info("saving what is in memory", "step", plan.Step, "dir", dir, "reason", reason)
	}
	for _, shard := range plan.Mine {
		switch j := d.startHeld(plan.Save, shard); {
		case j == nil:
			err = errors.Join(err, fmt.Errorf("shard %d of step %d is no longer in memory", shard, plan.Step),
				d.postFailure(ctx, c, plan, hs, shard, errIncomplete))
		case d.isAborted(j):
			err = errors.Join(err, d.postFailure(ctx, c, plan, hs, shard, errAbortedBefore))
		}
	}
	return err
}

// abortedTwice reports whether this node has given a save up for good.
func (d *Daemon) abortedTwice(plan coordinator.Plan) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.ContainsFunc(d.saves, func(j *save) bool {
		return j.meta.Save == plan.Save && j.secondAttempt && j.aborted()
	})
}

// isAborted reports whether j was aborted for good.
func (d *Daemon) isAborted(j *save) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return j.aborted()
}

var errAbortedBefore = errors.New("it was given up before")

var errIncomplete = errors.New("not all of its shards are left in memory")

// dropIncomplete drops the saves that were made after the newest complete one.
func (d *Daemon) dropIncomplete(inFlight []*save, plan coordinator.Plan, hs []coordinator.Holding, ok bool) {
	for _, j := range inFlight {
		if !ok || madeAfter(j, plan, hs) {
			d.drop(j, errIncomplete)
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
func (d *Daemon) postFailure(ctx context.Context, c coordinator.Coordinator, plan coordinator.Plan,
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

// onDiskAlready reports whether storage has the planned save or a later one.
func (d *Daemon) onDiskAlready(plan coordinator.Plan, hs []coordinator.Holding) bool {
	var saved time.Time
	for _, h := range hs {
		if h.Save == plan.Save && h.Saved.After(saved) {
			saved = h.Saved
		}
	}
	if m, ok := d.committedAt(plan.Dir, plan.Step); ok && m.ID == plan.Save {
		return true
	}
	m, ok := d.tracked(plan.Dir)
	return ok && !saved.IsZero() && m.Saved.After(saved)
}

// startHeld writes a shard from any segment that has it, a second time if it was aborted. nil: no segment has it.
func (d *Daemon) startHeld(id string, shard int) (started *save) {
	d.eachHeld(func(_ string, s *segment, h shm.Header, m shm.Meta) {
		if started == nil && m.Save == id && m.Shard == shard {
			j := newSave(s, h.Seq, h.Saved, m)
			j.secondAttempt = d.tried(id, shard)
			started = d.launch(j)
		}
	})
	return started
}

func (d *Daemon) tried(id string, shard int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.latestLocked(id, shard) != nil
}
