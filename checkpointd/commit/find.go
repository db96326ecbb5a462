package commit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/checkpointd/fsx"
)

// Manifests returns the committed steps of a directory, the newest commit first. Damaged manifests are left out: Newest
// names them. A directory that does not exist has none.
func (t Store) Manifests(dir string) ([]Manifest, error) {
	d, err := t.at(dir)
	if err != nil {
		return nil, err
	}
	ms, _, err := d.manifests()
	return ms, err
}

func (d directory) manifests() (ms []Manifest, damaged []Skipped, err error) {
	es, err := d.list(d.meta())
	if err != nil {
		return nil, nil, fmt.Errorf("list the checkpoints: %w", err)
	}
	for _, e := range es {
		step, ok := numbered(e, ".json")
		if !ok {
			continue
		}
		m, found, err := d.read(d.manifest(step))
		if err == nil && found && m.Step != step {
			err = fmt.Errorf("%s: is of step %d", d.manifest(step), m.Step)
		}
		if err != nil {
			damaged = append(damaged, Skipped{Step: step, Reason: err.Error()})
		} else if found {
			ms = append(ms, m)
		}
	}
	slices.SortStableFunc(ms, newestFirst)
	return ms, damaged, nil
}

// newestFirst orders committed steps. Several that were overtaken by one have the same time of commit.
func newestFirst(a, b Manifest) int {
	return cmp.Or(b.Committed.Compare(a.Committed), b.Saved.Compare(a.Saved), cmp.Compare(b.Step, a.Step))
}

// numbered returns the step in the name of a manifest.
func numbered(e fsx.Entry, ext string) (int64, bool) {
	name, ok := strings.CutSuffix(e.Name, ext)
	if !ok || e.Dir {
		return 0, false
	}
	step, err := strconv.ParseInt(name, 10, 64)
	return step, err == nil && step >= 0 && strconv.FormatInt(step, 10) == name
}

// Committed returns the manifest of a step. A damaged one counts as none.
func (t Store) Committed(dir string, step int64) (Manifest, bool) {
	d, err := t.at(dir)
	if err != nil {
		return Manifest{}, false
	}
	return d.committed(step)
}

// Tracked returns the step that dlrover_latest.txt names; ok is false when it names none.
func (t Store) Tracked(dir string) (step int64, ok bool) {
	d, err := t.at(dir)
	if err != nil {
		return 0, false
	}
	return d.tracked()
}

// NoStep is the Step of a Skipped that is about the tracker itself.
const NoStep = -1

// Untrue returns the inconsistencies of a directory: damaged manifests, a tracker that cannot be read or is missing
// although steps are committed, and a tracker that names a step without a manifest.
func (t Store) Untrue(dir string) (wrong []Skipped, err error) {
	d, err := t.at(dir)
	if err != nil {
		return nil, err
	}
	ms, wrong, err := d.manifests()
	if err != nil {
		return nil, err
	}
	step, err := d.tracker()
	if errors.Is(err, fs.ErrNotExist) {
		missing, err := d.untracked(ms)
		return append(wrong, missing...), err
	}
	if err != nil {
		return append(wrong, Skipped{NoStep, err.Error()}), nil
	}
	has := func(s Skipped) bool { return s.Step == step }
	if !slices.ContainsFunc(ms, func(m Manifest) bool { return m.Step == step }) && !slices.ContainsFunc(wrong, has) {
		wrong = append(wrong, Skipped{step, d.manifest(step) + " is missing"})
	}
	return wrong, nil
}

// untracked reports a missing tracker. Every commit writes it after the manifest and before it removes its intent. So
// it may be missing while there is an intent, which can be the first one.
func (d directory) untracked(ms []Manifest) ([]Skipped, error) {
	if len(ms) == 0 {
		return nil, nil
	}
	intents, _, err := d.intents()
	if err != nil || len(intents) > 0 {
		return nil, err
	}
	if _, err := d.tracker(); !errors.Is(err, fs.ErrNotExist) { // the first commit has just ended
		return nil, nil
	}
	return []Skipped{{NoStep, "it is missing, though steps are committed; a load takes the newest commit"}}, nil
}

// Newest returns the step to load: the tracked one if its files are good, else the newest commit whose files are good.
// The files of the given shards (nil: all) are read; of the other files only the size is checked. skipped has the
// reasons why other steps, tracked or newer, cannot be used. ErrNone: there is no usable step.
func (t Store) Newest(ctx context.Context, dir string, shards []int) (m Manifest, skipped []Skipped, err error) {
	d, err := t.at(dir)
	if err != nil {
		return Manifest{}, nil, err
	}
	ms, skipped, err := d.manifests()
	if err != nil {
		return Manifest{}, nil, err
	}
	if step, ok := d.tracked(); ok {
		slices.SortStableFunc(ms, func(a, b Manifest) int { return first(b.Step == step) - first(a.Step == step) })
	}
	for _, m := range ms {
		err := d.verify(ctx, m, shards)
		if err == nil {
			return m, skipped, nil
		}
		if ctx.Err() != nil {
			return Manifest{}, skipped, err
		}
		skipped = append(skipped, Skipped{Step: m.Step, Reason: err.Error()})
	}
	return Manifest{}, skipped, fmt.Errorf("%s: %w", dir, ErrNone)
}

func first(yes bool) int {
	if yes {
		return 1
	}
	return 0
}

// Verify checks the files of a committed step in dir: the sizes of all, and the content of the given shards' files
// (nil: all).
func (t Store) Verify(ctx context.Context, dir string, m Manifest, shards []int) error {
	d, err := t.at(dir)
	if err != nil {
		return err
	}
	return d.verify(ctx, m, shards)
}

func (d directory) verify(ctx context.Context, m Manifest, shards []int) error {
	finals, _, err := d.realFiles(m.Files, m.ID)
	if err != nil {
		return err
	}
	if err := d.expect(finals, m.Files); err != nil {
		return err
	}
	for i, f := range m.Files {
		if shards != nil && !slices.Contains(shards, f.Shard) {
			continue
		}
		crc, _, err := d.fs.Checksum(ctx, finals[i])
		if err != nil {
			return err
		}
		if crc != f.CRC {
			return fmt.Errorf("%s is damaged: its checksum is %08x instead of %08x", finals[i], crc, f.CRC)
		}
	}
	return ctx.Err()
}

// named reports whether a tracker names this save.
func (d directory) named(m Manifest) bool {
	return slices.ContainsFunc(withLatest(m.Trackers, m.Step), func(tr Tracker) bool {
		b, err := d.fs.ReadFile(filepath.Join(d.root, tr.Path), trackerLimit)
		return err == nil && strings.TrimSpace(string(b)) == strings.TrimSpace(tr.Text)
	})
}

// Remove removes a committed step. It refuses (ErrKept) a step that a tracker names, the only one, and one that is
// being saved again. The manifest is removed first, so that an interrupted removal leaves no step that looks complete;
// Recover finishes it. Files outside of the directory, and files of other steps, stay.
func (t Store) Remove(ctx context.Context, dir string, step int64) error {
	d, err := t.at(dir)
	if err != nil {
		return err
	}
	bs, err := d.briefs()
	if err != nil {
		return err
	}
	m, ok := d.committed(step)
	if !ok {
		return fmt.Errorf("remove step %d from %s: %w", step, dir, ErrNone)
	}
	intents, _, err := d.intents()
	if err == nil {
		err = ctx.Err()
	}
	again := slices.ContainsFunc(intents, func(m Manifest) bool { return m.Step == step })
	others := slices.ContainsFunc(bs, func(b *brief) bool { return b.Step != step })
	if err == nil && (again || !others || d.named(m)) {
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
	if err := d.fs.Rename(d.manifest(m.Step), d.gone(m.Step)); err != nil {
		return err
	}
	if err := d.fs.SyncDir(d.meta()); err != nil {
		return err
	}
	return d.removeStep(m)
}

// removeStep removes the files of a step whose manifest is gone, and then the record of the removal.
func (d directory) removeStep(m Manifest) error {
	// The renaming may be that of a process that died before it was durable.
	if err := d.fs.SyncDir(d.meta()); err != nil {
		return err
	}
	if err := d.removeOthers(m, Manifest{}); err != nil {
		return err
	}
	if err := d.fs.Remove(d.gone(m.Step)); err != nil {
		return err
	}
	return d.fs.SyncDir(d.meta())
}

// removeOthers removes the files of old that belong to nothing else: neither to its successor m, nor to another step,
// nor to a save whose commit has begun.
func (d directory) removeOthers(old, m Manifest) error {
	intents, _, err := d.intents()
	if err != nil {
		return err
	}
	bs, err := d.briefs()
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
			files = append(files, filepath.Join(d.root, f.Path))
		}
	}
	return d.removeFiles(files)
}

// Retain removes the steps that the policy of the newest commit does not keep, and returns them. Before only one step
// is left, it reads that step's files. If several are left it checks their sizes, so that storage is not read after
// each save. If a step that would stay is damaged, nothing is removed and the error has the reason.
func (t Store) Retain(ctx context.Context, dir string) (removed []int64, err error) {
	d, err := t.at(dir)
	if err != nil {
		return nil, err
	}
	bs, err := d.briefs()
	if err != nil || len(bs) == 0 || bs[0].Retention == nil {
		return nil, err
	}
	return t.retain(ctx, d, bs, stepsToRemove(manifestsOf(bs), *bs[0].Retention, d.trackedOf(bs)))
}

func manifestsOf(bs []*brief) []Manifest {
	ms := make([]Manifest, len(bs))
	for i, b := range bs {
		ms[i] = b.Manifest
	}
	return ms
}

// trackedOf returns the step that the tracker names, or else the newest.
func (d directory) trackedOf(bs []*brief) int64 {
	if step, ok := d.tracked(); ok {
		return step
	}
	return bs[0].Step
}

// retain removes steps if the remaining ones are good.
func (t Store) retain(ctx context.Context, d directory, bs []*brief, remove []int64) (removed []int64, err error) {
	remove = slices.DeleteFunc(remove, func(step int64) bool {
		m, ok := d.committed(step)
		return ok && d.named(m)
	})
	if len(remove) == 0 {
		return nil, nil
	}
	bs = slices.DeleteFunc(bs, func(b *brief) bool { return slices.Contains(remove, b.Step) })
	if err := d.good(ctx, bs); err != nil {
		return nil, fmt.Errorf("old checkpoints stay in %s: %w", d.root, err)
	}
	for _, step := range remove {
		err := t.Remove(ctx, d.root, step)
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
		if m, ok := d.committed(b.Step); ok {
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
	ms = slices.SortedStableFunc(slices.Values(ms), newestFirst)
	for i, m := range ms {
		stays := i == 0 || m.Step == tracked || i < r.KeepLatest || r.KeepInterval > 0 && m.Step%r.KeepInterval == 0
		if !stays && (r.KeepLatest > 0 || r.KeepInterval > 0) {
			remove = append(remove, m.Step)
		}
	}
	slices.Reverse(remove)
	return remove
}
