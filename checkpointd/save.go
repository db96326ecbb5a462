package checkpointd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/retry"
)

// phase is how far this node is with its shard of a save:
//
//	waiting --> writing --> prepared --> committed
//	   |           |            |
//	   +-----------+------------+--> superseded, failed
//
// A save that is resumed begins with prepared, because an earlier daemon has written its files. A save that storage
// already has is committed at once. Within prepared the coordinator leads through intent, placed and published: a save
// that fails after the intent keeps its files, and recovery completes it. The last three phases are final; only a
// breakpoint may launch a second attempt at a shard that was aborted.
type phase string

const (
	waiting    phase = "waiting"  // for a writer
	writing    phase = "writing"  // to temporary files
	prepared   phase = "prepared" // durable here; the other shards are waited for
	committed  phase = "committed"
	superseded phase = "superseded" // overwritten by a newer save before it was written
	failed     phase = "failed"
)

func (p phase) terminal() bool { return p == committed || p == superseded || p == failed }

// save is one shard of a save on its way to the disk. Its goroutine (Daemon.run) owns it; fields that others read are
// guarded by Daemon.mu. The segment may be saved over at any time: until entry is set, a reader must pin it and compare
// seq.
type save struct {
	seg         *segment // nil: it holds a newer save by now
	seq         uint64
	saved       time.Time
	meta        shm.Meta
	begun       time.Time
	ctx         context.Context         // of all that is done for it
	quit        context.CancelCauseFunc // ends ctx
	waits       context.Context         // ends when it is of no use to wait for the other shards
	stopWaiting context.CancelCauseFunc // ends waits

	entry   *commit.Entry // the durable files; nil: none yet
	resumed bool          // entry is an earlier daemon's work
	release func()        // lets go of the segment, which is pinned; nil: it is not

	// Guarded by Daemon.mu.
	phase         phase
	err           error
	secondAttempt bool // a breakpoint's: the first was aborted
	logged        bool // the reason of the abort
	bytes, done   int64
	mount         mountIdentity
	stuck         bool // has waited for other shards for long: do not wait for it
}

var (
	errSuperseded = errors.New("overwritten by a newer save before it could be written")
	errLost       = errors.New("somebody has removed what was written")
	errPartial    = errors.New("a worker of this node has ended without its shard, or has saved over it")
)

// start puts a shard on its way to the disk, unless it is there, on the way, or aborted.
func (d *Daemon) start(s *segment, h shm.Header, m shm.Meta) *save {
	return d.launch(newSave(s, h.Seq, h.Saved, m))
}

func newSave(s *segment, seq uint64, saved time.Time, m shm.Meta) *save {
	j := &save{seg: s, seq: seq, saved: saved, meta: m, begun: time.Now(), phase: waiting}
	for _, f := range m.Files {
		j.bytes += f.Len
	}
	return j
}

// launch runs j, unless the same shard was launched before. An aborted save stays aborted for all its shards, except
// for the second attempt that a breakpoint may make.
func (d *Daemon) launch(j *save) *save {
	d.mu.Lock()
	defer d.mu.Unlock()
	o := d.latestLocked(j.meta.Save, j.meta.Shard)
	if o != nil && (!o.aborted() || !j.secondAttempt || o.secondAttempt) {
		return o
	}
	j.ctx, j.quit = context.WithCancelCause(d.ctx)
	j.waits, j.stopWaiting = context.WithCancelCause(j.ctx)
	d.saves = append(d.saves, j)
	d.trimLocked()
	d.changedLocked()
	d.wg.Go(func() { d.run(j) })
	return j
}

// latestLocked is the last attempt at a shard of a save, nil if there was none.
func (d *Daemon) latestLocked(id string, shard int) *save {
	for _, j := range slices.Backward(d.saves) {
		if j.meta.Save == id && j.meta.Shard == shard {
			return j
		}
	}
	return nil
}

// aborted reports whether j is over and not on disk. The lock is held.
func (j *save) aborted() bool { return j.phase == failed || j.phase == superseded }

// drop ends a save that will not be complete any more. If the leader may have decided otherwise already, it has a while
// to go on.
func (d *Daemon) drop(j *save, why error) {
	if j.waits.Err() == nil {
		j.stopWaiting(why)
		time.AfterFunc(dropGrace, func() { j.quit(why) })
	}
}

// trimLocked forgets the oldest saves that are over.
func (d *Daemon) trimLocked() {
	for i := 0; len(d.saves) > maxRemembered && i < len(d.saves); {
		if d.saves[i].phase.terminal() {
			d.saves = append(d.saves[:i], d.saves[i+1:]...)
			continue
		}
		i++
	}
}

// run takes one shard from memory to a committed step.
func (d *Daemon) run(j *save) {
	defer j.quit(nil)
	defer j.releaseSegment() // after finish has settled it
	ctx, cancel := context.WithTimeoutCause(j.ctx, timeoutOf(j.meta),
		fmt.Errorf("not committed within its save timeout of %s", timeoutOf(j.meta)))
	defer cancel()
	stop := d.progress(j)
	defer stop()
	if time.Since(j.saved) > lookFirst && d.outdated(j) { // an earlier daemon should have written it
		d.abort(j, errOutdated)
		d.finish(j, failed, errOutdated)
		return
	}
	if d.already(j) { // an earlier daemon committed it, and may not have reported it
		if j.meta.Shard == 0 {
			_, _ = d.coordinatorOf(j.meta).Post(ctx, reportOf(j, coordinator.Published, commit.Entry{}))
		}
		d.finish(j, committed, nil)
		return
	}
	err := d.flush(ctx, j)
	if j.seg != nil && d.gone(ctx, j, err) {
		j.entry, j.resumed = nil, false
		j.releaseSegment()
		err = d.flush(ctx, j)
	}
	switch {
	case d.ctx.Err() != nil && err != nil: // the next daemon continues
	case err == nil, errors.Is(err, coordinator.ErrCommitted), d.already(j):
		d.finish(j, committed, nil)
	case errors.Is(err, errSuperseded), errors.Is(err, commit.ErrSuperseded):
		d.abort(j, err)
		d.finish(j, superseded, err)
	default:
		if cause := context.Cause(ctx); cause != nil && ctx.Err() != nil {
			err = fmt.Errorf("%w; last: %w", cause, err)
		}
		d.abort(j, err)
		d.finish(j, failed, err)
	}
}

// gone reports whether the written files have been removed, perhaps those of an earlier daemon. Memory may still have
// the shard.
func (d *Daemon) gone(ctx context.Context, j *save, err error) bool {
	if j.entry == nil || !errors.Is(err, fs.ErrNotExist) {
		return false
	}
	gone, err := bounded(ctx, func() (bool, error) { return d.store.Gone(saveOf(j), *j.entry) || d.deleted(j), nil })
	return gone && err == nil
}

// flush makes the shard durable, releases its segment, and commits it.
func (d *Daemon) flush(ctx context.Context, j *save) error {
	if j.entry == nil {
		var entry commit.Entry
		err := d.retry(ctx, j, func() (err error) { entry, j.release, err = d.prepare(ctx, j); return err })
		if err != nil {
			return err
		}
		j.entry = &entry
		d.markDurable(j)
	}
	d.setPhase(j, prepared)
	defer d.watchStorage(j)()
	return d.commit(ctx, j, *j.entry)
}

// markDurable records that the shard is prepared, and only then releases its segment. A worker that had it earlier
// would find a save that the disk still wants, save over it and report the step as dropped, while we commit it. A
// segment without a record is kept until the save is over.
func (d *Daemon) markDurable(j *save) {
	if err := d.keepPrepared(j, *j.entry); err != nil {
		d.log.Debug("a segment stays in use until its save is committed", "err", err)
		return
	}
	j.seg.seg.SetReleased(j.seq)
	j.releaseSegment()
}

// releaseSegment gives the segment back to its worker, if it is kept.
func (j *save) releaseSegment() {
	if j.release != nil {
		j.release()
		j.release = nil
	}
}

var (
	errElsewhere = errors.New("another daemon has committed it")
	errOutdated  = errors.New("workers that were started later have saved a newer step")
)

// watchStorage ends a wait for other shards when storage shows that it is of no use: others may have completed the
// save, or continued without it, and be dead.
func (d *Daemon) watchStorage(j *save) (stop func()) {
	ctx, cancel := context.WithCancel(j.ctx)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for pause := (retry.Backoff{First: lookFirst, Most: lookMost}); pause.Wait(ctx); {
			d.checkStorage(j)
		}
	}()
	return func() { cancel(); <-gone }
}

func (d *Daemon) checkStorage(j *save) {
	m, ok := d.committedAt(j.meta.Dir, j.meta.Step)
	if ok && m.ID == j.meta.Save {
		j.quit(errElsewhere)
	}
	if d.outdated(j) {
		d.drop(j, errOutdated)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !j.stuck && time.Since(j.begun) > agreePatience {
		j.stuck = true
		d.changedLocked()
	}
}

// outdated reports whether workers that were started later have continued from another state, or have saved the same
// step.
func (d *Daemon) outdated(j *save) bool {
	later := func(m commit.Manifest) bool { return m.Epoch != j.meta.Epoch && m.Overtakes(j.made(), true) }
	if m, ok := d.tracked(j.meta.Dir); ok && later(m) {
		return true
	}
	m, ok := d.committedAt(j.meta.Dir, j.meta.Step)
	return ok && m.ID != j.meta.Save && later(m)
}

// made returns j as a manifest with the fields that order saves, for comparisons.
func (j *save) made() commit.Manifest {
	return commit.Manifest{Save: commit.Save{Epoch: j.meta.Epoch, Saved: j.saved}}
}

func timeoutOf(m shm.Meta) time.Duration {
	if m.TimeoutS <= 0 {
		return defaultSave
	}
	return time.Duration(m.TimeoutS) * time.Second
}

// already reports whether an earlier daemon committed this very save.
func (d *Daemon) already(j *save) bool {
	m, ok := d.committedAt(j.meta.Dir, j.meta.Step)
	return ok && m.ID == j.meta.Save
}

func saveOf(j *save) commit.Save {
	m := j.meta
	return commit.Save{ID: m.Save, Epoch: m.Epoch, Dir: m.Dir, Framework: m.Framework, Layout: m.Layout, Step: m.Step,
		Shards: m.Shards, WorldSize: m.WorldSize, Saved: j.saved, Trackers: m.Trackers, Retention: m.Retention,
		Late: j.resumed}
}

// abort reports to the other shards that this save will not be complete, and removes our files. When the leader may be
// past its intent, the files stay: recovery completes the save.
func (d *Daemon) abort(j *save, cause error) {
	if errors.Is(cause, coordinator.ErrStalled) {
		return
	}
	ctx, cancel := context.WithTimeout(d.ctx, refuseBudget)
	defer cancel()
	report := reportOf(j, coordinator.Failed, commit.Entry{})
	report.Error = cause.Error()
	if _, err := d.coordinatorOf(j.meta).Post(ctx, report); err != nil && !errors.Is(err, coordinator.ErrAborted) {
		d.log.Debug("a failed save stays for recovery", "step", j.meta.Step, "err", err)
		return
	}
	if _, err := bounded(ctx, func() (any, error) {
		return nil, d.store.Abort(saveOf(j), j.meta.Shard)
	}); err != nil {
		d.log.Debug("clean up after a failed save", "step", j.meta.Step, "err", err)
	}
}

func (d *Daemon) setPhase(j *save, to phase) {
	d.mu.Lock()
	defer d.mu.Unlock()
	j.phase = to
	d.changedLocked()
}

// finish records the end of a save and releases its segment.
func (d *Daemon) finish(j *save, to phase, err error) {
	switch to {
	case committed:
		if j.seg != nil {
			j.seg.seg.SetDurable(j.seq)
		}
	case superseded:
		d.logOnce(j, slog.LevelWarn, "a checkpoint was not written: a newer one came first", "err", err)
	case failed:
		d.logOnce(j, slog.LevelError, "a checkpoint was not committed", "err", err)
	}
	if j.seg != nil {
		j.seg.seg.SetReleased(j.seq)
	}
	d.dropPrepared(j)
	d.mu.Lock()
	defer d.mu.Unlock()
	j.phase, j.err = to, err
	switch to {
	case committed:
		d.count.Commits++
		if !j.saved.Before(d.undecided[j.meta.Dir].Saved) {
			delete(d.undecided, j.meta.Dir)
		}
		d.useLocked(j)
		if !j.saved.Before(d.durable[j.meta.Rank].Saved) {
			d.durable[j.meta.Rank] = SegmentStatus{Rank: j.meta.Rank, Step: j.meta.Step, Saved: j.saved, Durable: true}
		}
	case superseded:
		d.count.Superseded++
	case failed:
		d.count.Failures++
	}
	d.changedLocked()
}

// logOnce logs the reason of an abort, in one line for all shards of the save on this node.
func (d *Daemon) logOnce(j *save, level slog.Level, text string, more ...any) {
	d.mu.Lock()
	said := slices.ContainsFunc(d.saves, func(o *save) bool { return o.meta.Save == j.meta.Save && o.logged })
	j.logged = true
	d.mu.Unlock()
	if said {
		level = slog.LevelDebug
	}
	d.log.Log(d.ctx, level, text, append([]any{"step", j.meta.Step, "shard", j.meta.Shard, "dir", j.meta.Dir},
		more...)...)
}

// progress logs a long write from time to time, and less often while nothing moves.
func (d *Daemon) progress(j *save) (stop func()) {
	ctx, cancel := context.WithCancel(j.ctx)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		last, pause := int64(-1), retry.Backoff{First: progressEvery}
		for pause.Wait(ctx) {
			if done := d.logProgress(j); done > last {
				last = done
				pause.Reset()
			}
		}
	}()
	return func() { cancel(); <-gone }
}

func (d *Daemon) logProgress(j *save) (done int64) {
	d.mu.Lock()
	ph, done := j.phase, j.done
	d.mu.Unlock()
	took := time.Since(j.begun)
	d.log.Info("checkpoint under way", "step", j.meta.Step, "shard", j.meta.Shard, "phase", string(ph), "percent",
		100*done/max(j.bytes, 1), "bytes", done, "of", j.bytes, "for", took.Round(time.Second).String())
	return done
}
