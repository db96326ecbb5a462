package commit

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"dlrover-run/internal/stable"
)

// Remove removes a committed step. It refuses (ErrKept) a step that a tracker names, the only one, and one that is
// being saved again. The manifest is removed first, so that an interrupted removal leaves no step that looks complete;
// Recover finishes it. Files outside of the directory, and files of other steps, stay.
func (t Store) Remove(ctx context.Context, dir string, step int64) error {
	d, err := t.at(dir)
	if err != nil {
		return err
	}
	bs, err := d.steps.briefs()
	if err != nil {
		return err
	}
	m, ok := d.steps.committed(step)
	if !ok {
		return fmt.Errorf("remove step %d from %s: %w", step, dir, ErrNone)
	}
	intents, _, err := d.stages.intents()
	if err == nil {
		err = ctx.Err()
	}
	again := slices.ContainsFunc(intents, func(m Manifest) bool { return m.Step == step })
	others := slices.ContainsFunc(bs, func(b *brief) bool { return b.Step != step })
	if err == nil && (again || !others || d.steps.named(m)) {
		err = ErrKept
	}
	if err == nil {
		err = d.remove(m)
	}
	if err != nil {
		return fmt.Errorf("remove step %d from %s: %w", step, dir, err)
	}
	return nil
}

func (d directory) remove(m Manifest) error {
	if err := d.storage.fs.Rename(d.storage.manifest(m.Step), d.storage.gone(m.Step)); err != nil {
		return err
	}
	if err := d.storage.fs.SyncDir(d.storage.meta()); err != nil {
		return err
	}
	return d.removeStep(m)
}

// removeStep removes the files of a step whose manifest is gone, and then the record of the removal.
func (d directory) removeStep(m Manifest) error {
	// The renaming may be that of a process that died before it was durable.
	if err := d.storage.fs.SyncDir(d.storage.meta()); err != nil {
		return err
	}
	if err := d.removeOthers(m, Manifest{}); err != nil {
		return err
	}
	if err := d.storage.fs.Remove(d.storage.gone(m.Step)); err != nil {
		return err
	}
	return d.storage.fs.SyncDir(d.storage.meta())
}

// removeOthers removes the files of old that belong to nothing else: neither to its successor m, nor to another step,
// nor to a save whose commit has begun.
func (d directory) removeOthers(old, m Manifest) error {
	intents, _, err := d.stages.intents()
	if err != nil {
		return err
	}
	bs, err := d.steps.briefs()
	if err != nil {
		return err
	}
	kept := paths(m.Files)
	for _, other := range intents {
		if other.ID != old.ID {
			maps.Copy(kept, paths(other.Files))
		}
	}
	of := briefOf(old)
	bs = slices.DeleteFunc(bs, func(b *brief) bool { return b.ID == old.ID || !b.meets(of) })
	var files []string
	for _, f := range old.Files {
		sum := pathSum(f.Path)
		shared := kept[f.Path] || slices.ContainsFunc(bs, func(b *brief) bool { return b.has(sum) })
		if !shared && !filepath.IsAbs(f.Path) {
			files = append(files, filepath.Join(d.storage.root, f.Path))
		}
	}
	return d.storage.removeFiles(files)
}

// Retain removes the steps that the policy of the newest commit does not keep, and returns them. Before only one step
// is left, it reads that step's files. If several are left it checks their sizes, so that storage is not read after
// each save. If a step that would stay is damaged, nothing is removed and the error has the reason.
func (t Store) Retain(ctx context.Context, dir string) (removed []int64, err error) {
	d, err := t.at(dir)
	if err != nil {
		return nil, err
	}
	bs, err := d.steps.briefs()
	if err != nil || len(bs) == 0 || bs[0].Retention == nil {
		return nil, err
	}
	return t.retain(ctx, d, bs, stepsToRemove(manifestsOf(bs), *bs[0].Retention, d.steps.trackedOf(bs)))
}

func manifestsOf(bs []*brief) []Manifest {
	ms := make([]Manifest, len(bs))
	for i, b := range bs {
		ms[i] = b.Manifest
	}
	return ms
}

// retain removes steps if the remaining ones are good.
func (t Store) retain(ctx context.Context, d directory, bs []*brief, remove []int64) (removed []int64, err error) {
	remove = slices.DeleteFunc(remove, func(step int64) bool {
		m, ok := d.steps.committed(step)
		return ok && d.steps.named(m)
	})
	if len(remove) == 0 {
		return nil, nil
	}
	bs = slices.DeleteFunc(bs, func(b *brief) bool { return slices.Contains(remove, b.Step) })
	if err := d.good(ctx, bs); err != nil {
		return nil, fmt.Errorf("old checkpoints stay in %s: %w", d.storage.root, err)
	}
	for _, step := range remove {
		err := t.Remove(ctx, d.storage.root, step)
		if errors.Is(err, ErrKept) || errors.Is(err, ErrNone) {
			continue
		}
		if err != nil {
			return removed, err
		}
		removed = append(removed, step)
	}
	return removed, nil
}

// good fails when none of the steps can be relied on.
func (d directory) good(ctx context.Context, keep []*brief) error {
	shards := []int{} // measure only
	if len(keep) == 1 {
		shards = nil
	}
	var errs []error
	for _, b := range keep {
		err := errors.New("its manifest is damaged or gone")
		if m, ok := d.steps.committed(b.Step); ok {
			err = d.verify(ctx, m, shards)
		}
		if err == nil {
			return nil
		}
		errs = append(errs, fmt.Errorf("step %d: %w", b.Step, err))
	}
	return errors.Join(errs...)
}

// stepsToRemove returns the steps that a policy removes, oldest commit first, given the committed ones. A step that
// either half of the policy keeps stays; so do the tracked step and the newest commit.
func stepsToRemove(ms []Manifest, r Retention, tracked int64) (remove []int64) {
	ms = stable.Sorted(slices.Values(ms), newestFirst)
	for i, m := range ms {
		stays := i == 0 || m.Step == tracked || i < r.KeepLatest || r.KeepInterval > 0 && m.Step%r.KeepInterval == 0
		if !stays && (r.KeepLatest > 0 || r.KeepInterval > 0) {
			remove = append(remove, m.Step)
		}
	}
	slices.Reverse(remove)
	return remove
}
