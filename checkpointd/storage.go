package checkpointd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/fsx"
)

// storage has the checkpoint directories. Its answers are bounded in time: a storage that hangs has none.
type storage struct {
	ctx   context.Context
	fs    fsx.FS
	store commit.Store
}

// committedAt is the manifest of a step; none when storage does not answer.
func (st *storage) committedAt(dir string, step int64) (commit.Manifest, bool) {
	ctx, cancel := context.WithTimeout(st.ctx, refuseBudget)
	defer cancel()
	m, err := bounded(ctx, func() (commit.Manifest, error) {
		if m, ok := st.store.Committed(dir, step); ok {
			return m, nil
		}
		return commit.Manifest{}, commit.ErrNone
	})
	return m, err == nil
}

// tracked is the manifest of the step that the tracker names.
func (st *storage) tracked(dir string) (commit.Manifest, bool) {
	ctx, cancel := context.WithTimeout(st.ctx, refuseBudget)
	defer cancel()
	step, err := bounded(ctx, func() (int64, error) {
		if step, ok := st.store.Tracked(dir); ok {
			return step, nil
		}
		return 0, commit.ErrNone
	})
	if err != nil {
		return commit.Manifest{}, false
	}
	return st.committedAt(dir, step)
}

// has reports whether an earlier daemon committed this very save.
func (st *storage) has(j *save) bool {
	m, ok := st.committedAt(j.meta.Dir, j.meta.Step)
	return ok && m.ID == j.meta.Save
}

// begun reports whether a save can only be completed.
func (st *storage) begun(j *save) bool {
	begun, err := st.store.Begun(j.meta.Dir, j.meta.Save)
	return begun && err == nil
}

// outdated reports whether workers that were started later have continued from another state, or have saved the same
// step.
func (st *storage) outdated(j *save) bool {
	later := func(m commit.Manifest) bool { return m.Epoch != j.meta.Epoch && m.Overtakes(j.made(), true) }
	if m, ok := st.tracked(j.meta.Dir); ok && later(m) {
		return true
	}
	m, ok := st.committedAt(j.meta.Dir, j.meta.Step)
	return ok && m.ID != j.meta.Save && later(m)
}

// overtaken returns the tracked step of j's directory, if that was saved after j. Clocks of several nodes may differ.
// So in one epoch the step must be a later one as well.
func (st *storage) overtaken(j *save) (step int64, ok bool) {
	m, ok := st.tracked(j.meta.Dir)
	return m.Step, ok && m.Saved.After(j.saved) && (m.Epoch != j.meta.Epoch || m.Step > j.meta.Step)
}

// replaced reports whether the disk has j, or a later save. Other nodes may have completed a save that was aborted
// here. A node that came back writes its own shards; this node only had copies.
func (st *storage) replaced(j *save) bool {
	m, ok := st.tracked(j.meta.Dir)
	return st.has(j) || ok && m.Overtakes(j.made(), true)
}

// reached looks for a step in a directory, or for the tracked one if that is later. id is the save of the step, "" for
// any.
func (st *storage) reached(dir string, step int64, id string) (int64, bool) {
	if m, ok := st.committedAt(dir, step); ok && (id == "" || id == m.ID) {
		return m.Step, true
	}
	m, ok := st.tracked(dir)
	return m.Step, ok && id == "" && m.Step >= step
}

// hasPlanned reports whether storage has the planned save or a later one.
func (st *storage) hasPlanned(plan coordinator.Plan, hs []coordinator.Holding) bool {
	var saved time.Time
	for _, h := range hs {
		if h.Save == plan.Save && h.Saved.After(saved) {
			saved = h.Saved
		}
	}
	if m, ok := st.committedAt(plan.Dir, plan.Step); ok && m.ID == plan.Save {
		return true
	}
	m, ok := st.tracked(plan.Dir)
	return ok && !saved.IsZero() && m.Saved.After(saved)
}

// gone reports whether the written files have been removed, perhaps those of an earlier daemon. Memory may still have
// the shard.
func (st *storage) gone(ctx context.Context, j *save, err error) bool {
	if j.entry == nil || !errors.Is(err, fs.ErrNotExist) {
		return false
	}
	gone, err := bounded(ctx, func() (bool, error) { return st.store.Gone(saveOf(j), *j.entry) || st.deleted(j), nil })
	return gone && err == nil
}

// deleted reports whether the directory of j was deleted since j was written.
func (st *storage) deleted(j *save) bool {
	root, err := st.fs.Resolve(j.meta.Dir)
	return err == nil && !st.store.Used(j.meta.Dir) && j.mountIdentity().matches(root)
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
