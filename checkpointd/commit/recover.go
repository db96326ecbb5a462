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
	"time"

	"dlrover-run/checkpointd/fsx"
)

var errAside = errors.New("it can never be completed")

// orphanAge is how long a save without an intent may be quiet before it counts as dead.
const orphanAge = time.Hour

// Recover cleans up after crashed processes in a directory: it completes the saves whose commit had begun, and removes
// aborted ones. It skips the saves for which live returns true; nil means none. It may run on several nodes at once,
// and continues after an error: the rest stays for the next time.
func (t Store) Recover(ctx context.Context, dir string, live func(save string) bool) (Recovered, error) {
	var r Recovered
	d, err := t.at(dir)
	if err != nil {
		return r, fmt.Errorf("recover: %w", err)
	}
	if live == nil {
		live = func(string) bool { return false }
	}
	intents, err := t.intents(d)
	errs := []error{err}
	for _, m := range intents {
		if live(m.ID) {
			continue
		}
		err := ctx.Err()
		if err == nil {
			done := t.turn(d)
			err = t.rollForward(d, m)
			done()
		}
		if err != nil && d.storage.missing(d.storage.intent(m.ID)) {
			continue // another recovery was faster, or it is set aside
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("complete save %s of step %d: %w", m.ID, m.Step, err))
		} else {
			r.Forward = append(r.Forward, m.ID)
		}
	}
	r.Removed, err = t.orphans(ctx, d, live)
	errs = append(errs, err, t.sweep(ctx, d))
	if err := errors.Join(errs...); err != nil {
		return r, fmt.Errorf("recover %s: %w", dir, err)
	}
	return r, nil
}

// intents returns the saves that can only be completed. Saves with damaged intents are set aside.
func (t Store) intents(d directory) ([]Manifest, error) {
	ms, bad, err := d.stages.intents()
	for _, id := range slices.Sorted(maps.Keys(bad)) {
		err = errors.Join(err, t.setAside(d, d.storage.stage(id), bad[id]))
	}
	return ms, err
}

// asideExt is the extension of names that were set aside: they are no longer a stage or a step.
const asideExt = ".damaged"

// setAside renames an entry that cannot be processed, and keeps all that may help a person: the stage of a save that
// can never be completed, or the list of files of a removed step.
func (t Store) setAside(d directory, path string, why error) error {
	to := path + asideExt
	err := d.storage.fs.Rename(path, to)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // another recovery was faster
	}
	if err == nil {
		err = d.storage.fs.SyncDir(filepath.Dir(path))
	}
	if err != nil {
		return fmt.Errorf("set %s aside (%w): %w", path, why, err)
	}
	if t.OnDamaged != nil {
		t.OnDamaged(to, why)
	}
	return nil
}

// rollForward completes a save whose intent is visible. It makes the intent durable first: its writer may have died
// just before. Without the intent, half of the files would destroy the older save of the step. A save that can never be
// completed is set aside.
func (t Store) rollForward(d directory, m Manifest) error {
	if err := d.storage.syncDirs([]string{d.storage.intent(m.ID)}); err != nil {
		return err
	}
	if why := d.stages.lost(m); why != nil {
		return cmp.Or(t.setAside(d, d.storage.stage(m.ID), why), errAside)
	}
	if err := d.storage.place(m.Files, m.ID); err != nil {
		return err
	}
	_, err := t.complete(d, m, true)
	return err
}

// orphans removes the saves that no writer will commit.
func (t Store) orphans(ctx context.Context, d directory, live func(string) bool) (removed []string, err error) {
	stages, err := d.storage.list(d.storage.stages())
	if err != nil || len(stages) == 0 {
		return nil, err
	}
	metas, err := d.storage.list(d.storage.meta())
	if err != nil {
		return nil, err
	}
	last := lastCommit(metas)
	var errs []error
	for _, e := range stages {
		if !e.Dir || checkID(e.Name) != nil || live(e.Name) || ctx.Err() != nil {
			continue
		}
		dead, err := t.orphan(d, e, last)
		if err == nil && dead {
			err = d.stages.discard(e.Name)
		}
		if err == nil && dead {
			removed = append(removed, e.Name)
		}
		errs = append(errs, err)
	}
	return removed, errors.Join(append(errs, ctx.Err())...)
}

// lastCommit is the time of the newest manifest, by the clock that stamps the files.
func lastCommit(metas []fsx.Entry) (last time.Time) {
	for _, e := range metas {
		if _, ok := numbered(e, ".json"); ok && e.ModTime.After(last) {
			last = e.ModTime
		}
	}
	return last
}

// orphan reports whether a stage has no intent and has been quiet since the last commit, or for an hour.
func (t Store) orphan(d directory, stage fsx.Entry, last time.Time) (bool, error) {
	es, err := d.storage.list(d.storage.stage(stage.Name))
	if err != nil {
		return false, err
	}
	var active time.Time
	for _, e := range es {
		if e.Name == "intent" {
			return false, nil
		}
		if e.ModTime.After(active) {
			active = e.ModTime
		}
	}
	if len(es) == 0 {
		active = stage.ModTime
	}
	return active.Before(last) || t.Now().Sub(active) > orphanAge, nil
}

// sweep finishes the removal of steps, and removes leftovers of WriteFile.
func (t Store) sweep(ctx context.Context, d directory) error {
	metas, err := d.storage.list(d.storage.meta())
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range metas {
		step, ok := numbered(e, ".gone")
		if !ok || ctx.Err() != nil {
			continue
		}
		m, found, err := d.storage.read(d.storage.gone(step))
		if err == nil && found && m.Step != step {
			err = fmt.Errorf("%s: %w: is of step %d", d.storage.gone(step), errDamaged, m.Step)
		}
		switch {
		case damaged(err):
			err = t.setAside(d, d.storage.gone(step), err)
		case err == nil && found:
			err = d.removeStep(m)
		}
		errs = append(errs, err)
	}
	for _, dir := range []string{d.storage.root, d.storage.meta()} {
		errs = append(errs, t.sweepDir(d, dir, lastCommit(metas)))
	}
	return errors.Join(append(errs, ctx.Err())...)
}

// sweepDir removes the temporary files of small ones that are older than the last commit: a writer that is only slow
// begins again.
func (t Store) sweepDir(d directory, dir string, last time.Time) error {
	es, err := d.storage.list(dir)
	if err != nil {
		return err
	}
	for _, e := range es {
		if fsx.Temporary(e.Name) && !e.Dir && (e.ModTime.Before(last) || t.Now().Sub(e.ModTime) > orphanAge) {
			if err := d.storage.fs.Remove(filepath.Join(dir, e.Name)); err != nil {
				return err
			}
		}
	}
	return nil
}
