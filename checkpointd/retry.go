package checkpointd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"sync"
	"syscall"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/fsx"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/retry"
)

// retries repeats steps on storage until they work. It knows the directories whose storage does not work now.
type retries struct {
	life    *lifetime
	log     *slog.Logger
	count   *counters
	saves   *saves
	storage *storage

	mu     sync.Mutex
	causes map[string]string // of the present troubles, by directory
	newest string            // the newest trouble of them; "" without any
}

// onStorage is do for a step on storage, which may hang.
func (r *retries) onStorage(ctx context.Context, j *save, step func() error) error {
	return r.do(ctx, j, func() error {
		_, err := bounded(ctx, func() (any, error) { return nil, step() })
		return err
	})
}

// do repeats a step until it works or the save's time is over.
func (r *retries) do(ctx context.Context, j *save, step func() error) error {
	pause := retry.Backoff{First: retryFirst, Most: retryMost}
	for {
		err := step()
		if err == nil {
			r.clear(j)
			return nil
		}
		if errors.Is(err, errSuperseded) || errors.Is(err, shm.ErrDamaged) || permanent(err) || ctx.Err() != nil ||
			r.storage.gone(ctx, j, err) {
			return err
		}
		step, ok := r.overtaken(j)
		if !ok {
			r.record(ctx, j, err)
			step, ok = r.rest(ctx, j, pause.Next())
		}
		if ok {
			r.clear(j)
			return fmt.Errorf("%w: step %d; %w", commit.ErrSuperseded, step, err)
		}
		if ctx.Err() != nil {
			return err
		}
	}
}

// rest waits before the next try of j, at most until a later save is committed: its step.
func (r *retries) rest(ctx context.Context, j *save, pause time.Duration) (step int64, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, pause)
	defer cancel()
	_ = r.life.until(ctx, func() bool { // after the pause the next try follows
		step, ok = r.saves.later(j)
		return ok
	})
	return step, ok
}

// overtaken returns the step of a later save of j's directory, of this daemon or on storage. Durable files of j are not
// overtaken.
func (r *retries) overtaken(j *save) (step int64, ok bool) {
	if step, ok = r.saves.later(j); ok || j.entry != nil {
		return step, ok
	}
	return r.storage.overtaken(j)
}

// permanent reports errors that waiting does not repair. A device that is gone may come back.
func permanent(err error) bool {
	return slices.ContainsFunc([]error{
		commit.ErrSuperseded, commit.ErrBegun, errLost, fsx.ErrNotRegular, fsx.ErrTooLong, fs.ErrPermission,
		fs.ErrInvalid, syscall.EINVAL,
		syscall.EISDIR, syscall.ENOTDIR, syscall.ENAMETOOLONG, syscall.ELOOP, syscall.EROFS, syscall.EFBIG,
	}, func(e error) bool { return errors.Is(err, e) })
}

// record notes a failed write, and makes room when the storage is full.
func (r *retries) record(ctx context.Context, j *save, err error) {
	text := "storage: " + err.Error()
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		text = "storage is full: " + err.Error()
		if removed, err := r.storage.store.Retain(ctx, j.meta.Dir); err == nil && len(removed) > 0 {
			r.log.Info("removed old checkpoints to make room", "dir", j.meta.Dir, "steps", removed)
		}
	}
	if r.isNew(j, err, text) {
		r.log.Warn("cannot write a checkpoint, trying again", "step", j.meta.Step, "shard", j.meta.Shard, "err", err)
	}
	r.count.add(func(n *Counters) { n.Retries++ })
	j.done.Store(0)
}

// isNew records the error of j's storage, and reports whether it is new: all saves of a directory have the same
// error, and each of them many times.
func (r *retries) isNew(j *save, err error, text string) bool {
	cause := err.Error()
	if no, ok := errors.AsType[syscall.Errno](err); ok {
		cause = no.Error()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.causes[j.meta.Dir] == cause {
		return false
	}
	r.causes[j.meta.Dir], r.newest = cause, text
	return true
}

// clear records that the storage of j works, or that no save waits for it.
func (r *retries) clear(j *save) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.causes, j.meta.Dir)
	if len(r.causes) == 0 {
		r.newest = ""
	}
}

// trouble is the newest trouble that is not over, "" without any.
func (r *retries) trouble() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.newest
}
