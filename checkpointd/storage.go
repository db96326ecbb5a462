package checkpointd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"syscall"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/fsx"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/retry"
)

// committedAt is the manifest of a step; none when storage does not answer.
func (d *Daemon) committedAt(dir string, step int64) (commit.Manifest, bool) {
	ctx, cancel := context.WithTimeout(d.ctx, refuseBudget)
	defer cancel()
	m, err := bounded(ctx, func() (commit.Manifest, error) {
		if m, ok := d.store.Committed(dir, step); ok {
			return m, nil
		}
		return commit.Manifest{}, commit.ErrNone
	})
	return m, err == nil
}

// tracked is the manifest of the step that the tracker names.
func (d *Daemon) tracked(dir string) (commit.Manifest, bool) {
	ctx, cancel := context.WithTimeout(d.ctx, refuseBudget)
	defer cancel()
	step, err := bounded(ctx, func() (int64, error) {
		if step, ok := d.store.Tracked(dir); ok {
			return step, nil
		}
		return 0, commit.ErrNone
	})
	if err != nil {
		return commit.Manifest{}, false
	}
	return d.committedAt(dir, step)
}

// retryStorage is retry for a step on storage, which may hang.
func (d *Daemon) retryStorage(ctx context.Context, j *save, step func() error) error {
	return d.retry(ctx, j, func() error {
		_, err := bounded(ctx, func() (any, error) { return nil, step() })
		return err
	})
}

// retry repeats a step until it works or the save's time is over.
func (d *Daemon) retry(ctx context.Context, j *save, step func() error) error {
	pause := retry.Backoff{First: retryFirst, Most: retryMost}
	for {
		err := step()
		if err == nil {
			d.clearTrouble(j)
			return nil
		}
		if errors.Is(err, errSuperseded) || errors.Is(err, shm.ErrDamaged) || permanent(err) || ctx.Err() != nil ||
			d.gone(ctx, j, err) {
			return err
		}
		step, ok := d.overtaken(j)
		if !ok {
			d.recordTrouble(ctx, j, err)
			step, ok = d.rest(ctx, j, pause.Next())
		}
		if ok {
			d.clearTrouble(j)
			return fmt.Errorf("%w: step %d; %w", commit.ErrSuperseded, step, err)
		}
		if ctx.Err() != nil {
			return err
		}
	}
}

// rest waits before the next try of j, at most until a later save is committed: its step.
func (d *Daemon) rest(ctx context.Context, j *save, pause time.Duration) (step int64, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, pause)
	defer cancel()
	_ = d.until(ctx, func() bool { // after the pause the next try follows
		step, ok = d.laterLocked(j)
		return ok
	})
	return step, ok
}

// laterLocked returns the step of a committed save of the same shard and directory that was made after j; false if
// files of j are durable. Later is by the clock of one node: steps may go back.
func (d *Daemon) laterLocked(j *save) (step int64, ok bool) {
	if j.entry != nil {
		return 0, false
	}
	i := slices.IndexFunc(d.saves, func(o *save) bool {
		return o.phase == committed && o.meta.Dir == j.meta.Dir && o.meta.Shard == j.meta.Shard &&
			o.saved.After(j.saved)
	})
	if i < 0 {
		return 0, false
	}
	return d.saves[i].meta.Step, true
}

// overtaken is laterLocked with the disk included. Clocks of several nodes may differ, so in one epoch the step must be
// a later one as well.
func (d *Daemon) overtaken(j *save) (step int64, ok bool) {
	d.mu.Lock()
	step, ok = d.laterLocked(j)
	d.mu.Unlock()
	if ok || j.entry != nil {
		return step, ok
	}
	m, ok := d.tracked(j.meta.Dir)
	return m.Step, ok && m.Saved.After(j.saved) && (m.Epoch != j.meta.Epoch || m.Step > j.meta.Step)
}

// permanent reports errors that waiting does not repair. A device that is gone may come back.
func permanent(err error) bool {
	return slices.ContainsFunc([]error{
		commit.ErrSuperseded, commit.ErrBegun, errLost, fsx.ErrNotRegular, fsx.ErrTooLong, fs.ErrPermission,
		fs.ErrInvalid, syscall.EINVAL,
		syscall.EISDIR, syscall.ENOTDIR, syscall.ENAMETOOLONG, syscall.ELOOP, syscall.EROFS, syscall.EFBIG,
	}, func(e error) bool { return errors.Is(err, e) })
}

// recordTrouble records a failed write, and makes room when the storage is full.
func (d *Daemon) recordTrouble(ctx context.Context, j *save, err error) {
	text := "storage: " + err.Error()
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		text = "storage is full: " + err.Error()
		if removed, err := d.store.Retain(ctx, j.meta.Dir); err == nil && len(removed) > 0 {
			d.log.Info("removed old checkpoints to make room", "dir", j.meta.Dir, "steps", removed)
		}
	}
	if d.isNewTrouble(j, err, text) {
		d.log.Warn("cannot write a checkpoint, trying again", "step", j.meta.Step, "shard", j.meta.Shard, "err", err)
	}
	d.mu.Lock()
	d.count.Retries++
	j.done = 0
	d.mu.Unlock()
}

// isNewTrouble records the error of j's storage, and reports whether it is new: all saves of a directory have the same
// error, and each of them many times.
func (d *Daemon) isNewTrouble(j *save, err error, text string) bool {
	cause := err.Error()
	if no, ok := errors.AsType[syscall.Errno](err); ok {
		cause = no.Error()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.troubles[j.meta.Dir] == cause {
		return false
	}
	d.troubles[j.meta.Dir], d.storageTrouble = cause, text
	return true
}

// clearTrouble records that the storage of j works, or that no save waits for it.
func (d *Daemon) clearTrouble(j *save) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.troubles, j.meta.Dir)
	if len(d.troubles) == 0 {
		d.storageTrouble = ""
	}
}

// bounded runs a step on storage. When its time is over and storage does not answer, the step is left to itself: a call
// that hangs in the kernel cannot be ended, and must not keep saves to other storage waiting.
func bounded[T any](ctx context.Context, step func() (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	go func() {
		v, err := step()
		done <- result{v, err}
	}()
	select {
	case r := <-done:
		return r.v, r.err
	case <-ctx.Done():
	}
	select {
	case r := <-done:
		return r.v, r.err
	case <-time.After(stuckGrace):
		var none T
		return none, fmt.Errorf("storage does not answer: %w", context.Cause(ctx))
	}
}
