package checkpointd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/internal/retry"
)

// flusher takes saves from memory to committed steps.
type flusher struct {
	life      *lifetime
	log       *slog.Logger
	count     *counters
	saves     *saves
	storage   *storage
	mounts    *mounts
	records   preparedRecords
	retries   *retries
	writer    *writer
	committer *committer
	coords    coordinators
}

// launch runs j, unless its shard was launched before: then it returns that.
func (f *flusher) launch(j *save) *save {
	j.ctx, j.quit = context.WithCancelCause(f.life.ctx)
	j.waits, j.stopWaiting = context.WithCancelCause(j.ctx)
	if earlier := f.saves.add(j); earlier != nil {
		j.quit(nil)
		return earlier
	}
	f.life.wg.Go(func() { f.run(j) })
	return j
}

// run takes one shard from memory to a committed step.
func (f *flusher) run(j *save) {
	defer j.quit(nil)
	defer j.releaseSegment() // after finish has recorded its end
	ctx, cancel := context.WithTimeoutCause(j.ctx, j.timeout(),
		fmt.Errorf("not committed within its save timeout of %s", j.timeout()))
	defer cancel()
	stop := f.progress(j)
	defer stop()
	if time.Since(j.saved) > lookFirst && f.storage.outdated(j) { // an earlier daemon should have written it
		f.abort(j, errOutdated)
		f.finish(j, failed, errOutdated)
		return
	}
	if f.storage.has(j) { // an earlier daemon committed it, and may not have reported it
		if j.meta.Shard == 0 {
			_, _ = f.coords.forSave(j.meta).Post(ctx, reportOf(j, coordinator.Published, commit.Entry{}))
		}
		f.finish(j, committed, nil)
		return
	}
	err := f.flush(ctx, j)
	if j.seg != nil && f.storage.gone(ctx, j, err) {
		j.entry, j.resumed = nil, false
		j.releaseSegment()
		err = f.flush(ctx, j)
	}
	switch {
	case f.life.ctx.Err() != nil && err != nil: // the next daemon continues
	case err == nil, errors.Is(err, coordinator.ErrCommitted), f.storage.has(j):
		f.finish(j, committed, nil)
	case errors.Is(err, errSuperseded), errors.Is(err, commit.ErrSuperseded):
		f.abort(j, err)
		f.finish(j, superseded, err)
	default:
		if cause := context.Cause(ctx); cause != nil && ctx.Err() != nil {
			err = fmt.Errorf("%w; last: %w", cause, err)
		}
		f.abort(j, err)
		f.finish(j, failed, err)
	}
}

// flush makes the shard durable, releases its segment, and commits it.
func (f *flusher) flush(ctx context.Context, j *save) error {
	if j.entry == nil {
		var entry commit.Entry
		err := f.retries.do(ctx, j, func() (err error) { entry, j.release, err = f.writer.prepare(ctx, j); return err })
		if err != nil {
			return err
		}
		j.entry = &entry
		f.markDurable(j)
	}
	f.saves.setPhase(j, prepared)
	defer f.watchStorage(j)()
	return f.committer.commit(ctx, j, *j.entry)
}

// markDurable records that the shard is prepared, and only then releases its segment. A worker that had it earlier
// would find a save that the disk still wants, save over it and report the step as dropped, while we commit it. A
// segment without a record is kept until the save is over.
func (f *flusher) markDurable(j *save) {
	if err := f.records.keep(j, *j.entry); err != nil {
		f.log.Debug("a segment stays in use until its save is committed", "err", err)
		return
	}
	j.seg.seg.SetReleased(j.seq)
	j.releaseSegment()
}

// watchStorage ends a wait for other shards when storage shows that it is of no use: others may have completed the
// save, or continued without it, and be dead.
func (f *flusher) watchStorage(j *save) (stop func()) {
	ctx, cancel := context.WithCancel(j.ctx)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for pause := (retry.Backoff{First: lookFirst, Most: lookMost}); pause.Wait(ctx); {
			f.checkStorage(j)
		}
	}()
	return func() { cancel(); <-gone }
}

func (f *flusher) checkStorage(j *save) {
	m, ok := f.storage.committedAt(j.meta.Dir, j.meta.Step)
	if ok && m.ID == j.meta.Save {
		j.quit(errElsewhere)
	}
	if f.storage.outdated(j) {
		j.drop(errOutdated)
	}
	f.saves.setStuck(j)
}

// abort reports to the other shards that this save will not be complete, and removes our files. When the leader may be
// past its intent, the files stay: recovery completes the save.
func (f *flusher) abort(j *save, cause error) {
	if errors.Is(cause, coordinator.ErrStalled) {
		return
	}
	ctx, cancel := context.WithTimeout(f.life.ctx, refuseBudget)
	defer cancel()
	report := reportOf(j, coordinator.Failed, commit.Entry{})
	report.Error = cause.Error()
	if _, err := f.coords.forSave(j.meta).Post(ctx, report); err != nil && !errors.Is(err, coordinator.ErrAborted) {
		f.log.Debug("a failed save stays for recovery", "step", j.meta.Step, "err", err)
		return
	}
	if _, err := bounded(ctx, func() (any, error) {
		return nil, f.storage.store.Abort(saveOf(j), j.meta.Shard)
	}); err != nil {
		f.log.Debug("clean up after a failed save", "step", j.meta.Step, "err", err)
	}
}

// finish records the end of a save and releases its segment.
func (f *flusher) finish(j *save, to phase, err error) {
	count := func(n *Counters) { n.Failures++ }
	switch to {
	case committed:
		count = func(n *Counters) { n.Commits++ }
		if j.seg != nil {
			j.seg.seg.SetDurable(j.seq)
		}
	case superseded:
		count = func(n *Counters) { n.Superseded++ }
		f.logOnce(j, slog.LevelWarn, "a checkpoint was not written: a newer one came first", "err", err)
	case failed:
		f.logOnce(j, slog.LevelError, "a checkpoint was not committed", "err", err)
	}
	if j.seg != nil {
		j.seg.seg.SetReleased(j.seq)
	}
	f.records.drop(j)
	f.count.add(count)
	if to == committed {
		f.mounts.use(j.meta.Dir, j.mountIdentity())
	}
	f.saves.end(j, to, err)
}

// logOnce logs the reason of an abort, in one line for all shards of the save on this node.
func (f *flusher) logOnce(j *save, level slog.Level, text string, more ...any) {
	if !f.saves.firstLog(j) {
		level = slog.LevelDebug
	}
	f.log.Log(f.life.ctx, level, text, append([]any{"step", j.meta.Step, "shard", j.meta.Shard, "dir", j.meta.Dir},
		more...)...)
}

// progress logs a long write from time to time, and less often while nothing moves.
func (f *flusher) progress(j *save) (stop func()) {
	ctx, cancel := context.WithCancel(j.ctx)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		last, pause := int64(-1), retry.Backoff{First: progressEvery}
		for pause.Wait(ctx) {
			if done := f.logProgress(j); done > last {
				last = done
				pause.Reset()
			}
		}
	}()
	return func() { cancel(); <-gone }
}

// logProgress logs how far the shards of j's save on this node have come, if j is the first that is under way.
func (f *flusher) logProgress(j *save) (done int64) {
	shards := f.saves.shardsUnderWay(j.meta.Save)
	all := int64(0)
	for _, o := range shards {
		done += o.done.Load()
		all += o.bytes
	}
	if len(shards) == 0 || shards[0] != j {
		return done
	}
	last := slices.MinFunc(shards, func(a, b *save) int { return cmp.Compare(a.done.Load(), b.done.Load()) })
	ph, _ := f.saves.state(last)
	f.log.Info("checkpoint under way", "step", j.meta.Step, "shards", len(shards), "phase", string(ph), "percent",
		100*done/max(all, 1), "bytes", done, "of", all, "for", time.Since(j.begun).Round(time.Second).String())
	return done
}
