package commit

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"dlrover-run/internal/stable"
)

// Manifests returns the committed steps of a directory, the newest commit first. Damaged manifests are left out: Newest
// names them. A directory that does not exist has none.
func (t Store) Manifests(dir string) ([]Manifest, error) {
	d, err := t.at(dir)
	if err != nil {
		return nil, err
	}
	ms, _, err := d.steps.manifests()
	return ms, err
}

// Committed returns the manifest of a step. A damaged one counts as none.
func (t Store) Committed(dir string, step int64) (Manifest, bool) {
	d, err := t.at(dir)
	if err != nil {
		return Manifest{}, false
	}
	return d.steps.committed(step)
}

// Tracked returns the step that dlrover_latest.txt names; ok is false when it names none.
func (t Store) Tracked(dir string) (step int64, ok bool) {
	d, err := t.at(dir)
	if err != nil {
		return 0, false
	}
	return d.steps.tracked()
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
	ms, wrong, err := d.steps.manifests()
	if err != nil {
		return nil, err
	}
	step, err := d.steps.tracker()
	if errors.Is(err, fs.ErrNotExist) {
		missing, err := d.untracked(ms)
		return append(wrong, missing...), err
	}
	if err != nil {
		return append(wrong, Skipped{NoStep, err.Error()}), nil
	}
	has := func(s Skipped) bool { return s.Step == step }
	if !slices.ContainsFunc(ms, func(m Manifest) bool { return m.Step == step }) && !slices.ContainsFunc(wrong, has) {
		wrong = append(wrong, Skipped{step, d.storage.manifest(step) + " is missing"})
	}
	return wrong, nil
}

// Newest returns the step to load: the tracked one if its files are good, else the newest commit whose files are good.
// The files of the given shards (nil: all) are read; of the other files only the size is checked. skipped has the
// reasons why other steps, tracked or newer, cannot be used. ErrNone: there is no usable step.
func (t Store) Newest(ctx context.Context, dir string, shards []int) (m Manifest, skipped []Skipped, err error) {
	d, err := t.at(dir)
	if err != nil {
		return Manifest{}, nil, err
	}
	ms, skipped, err := d.steps.manifests()
	if err != nil {
		return Manifest{}, nil, err
	}
	if step, ok := d.steps.tracked(); ok {
		stable.Sort(ms, func(a, b Manifest) int { return first(b.Step == step) - first(a.Step == step) })
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
