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
	"strings"
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
			err = t.rollForward(d, m)
		}
		if err != nil && d.missing(d.intent(m.ID)) {
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

func (d directory) missing(file string) bool {
	_, err := d.fs.Size(file)
	return errors.Is(err, fs.ErrNotExist)
}

// rollForward completes a save whose intent is visible. It makes the intent durable first: its writer may have died
// just before. Without the intent, half of the files would destroy the older save of the step. A save that can never be
// completed is set aside.
func (t Store) rollForward(d directory, m Manifest) error {
	if err := d.syncDirs([]string{d.intent(m.ID)}); err != nil {
		return err
	}
	if why := d.lost(m); why != nil {
		return cmp.Or(t.setAside(d, d.stage(m.ID), why), errAside)
	}
	if err := d.place(m.Files, m.ID); err != nil {
		return err
	}
	_, err := t.complete(d, m, true)
	return err
}

// orphans removes the saves that no writer will commit.
func (t Store) orphans(ctx context.Context, d directory, live func(string) bool) (removed []string, err error) {
	stages, err := d.list(d.stages())
	if err != nil || len(stages) == 0 {
		return nil, err
	}
	metas, err := d.list(d.meta())
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
			err = d.discard(e.Name)
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
	es, err := d.list(d.stage(stage.Name))
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

// discard removes a save with its temporary files.
func (d directory) discard(save string) error {
	es, err := d.list(d.stage(save))
	if err != nil {
		return err
	}
	for _, e := range es {
		if strings.HasSuffix(e.Name, ".prepared") { // before the files go
			if err := d.fs.Remove(filepath.Join(d.stage(save), e.Name)); err != nil {
				return err
			}
		}
	}
	for _, e := range es {
		if strings.HasSuffix(e.Name, ".plan") {
			if err := d.removePlanned(filepath.Join(d.stage(save), e.Name), save); err != nil {
				return err
			}
		}
	}
	return d.clear(save)
}

// removePlanned removes the files that a plan names, and the directories that are empty without them. A plan that
// cannot be understood names none.
func (d directory) removePlanned(plan, save string) error {
	b, err := d.fs.ReadFile(plan, readLimit)
	if errors.Is(err, fs.ErrNotExist) || damaged(err) {
		return nil
	}
	if err != nil {
		return err
	}
	tmps, err := parsePlan(b, save)
	if err != nil {
		return nil
	}
	for i, tmp := range tmps {
		if tmps[i], err = d.real(tmp); err != nil {
			return err
		}
	}
	return d.removeFiles(tmps)
}

// clear removes the markers of a finished save. The intent is removed first and durably: if it reappeared after a later
// save of the step, it would claim the files of that save.
func (d directory) clear(save string) error {
	dir := d.stage(save)
	es, err := d.list(dir)
	if err != nil {
		return err
	}
	if err := d.fs.Remove(d.intent(save)); err != nil {
		return err
	}
	if err := d.fs.SyncDir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range es {
		if err := d.fs.Remove(filepath.Join(dir, e.Name)); err != nil {
			return err
		}
	}
	if err := d.fs.Remove(dir); err != nil {
		return err
	}
	if err := d.fs.SyncDir(d.stages()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// removeFiles removes files, then the directories below the root that are empty without them, durably.
func (d directory) removeFiles(files []string) error {
	dirs := map[string]bool{}
	for _, file := range files {
		if err := d.fs.Remove(file); err != nil {
			return err
		}
		dirs[filepath.Dir(file)] = true
	}
	for _, dir := range slices.Sorted(maps.Keys(dirs)) {
		for strings.HasPrefix(dir, d.root+"/") && d.fs.Remove(dir) == nil {
			dir = filepath.Dir(dir)
		}
		if err := d.fs.SyncDir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// sweep finishes the removal of steps, and removes leftovers of WriteFile.
func (t Store) sweep(ctx context.Context, d directory) error {
	metas, err := d.list(d.meta())
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range metas {
		step, ok := numbered(e, ".gone")
		if !ok || ctx.Err() != nil {
			continue
		}
		m, found, err := d.read(d.gone(step))
		if err == nil && found && m.Step != step {
			err = fmt.Errorf("%s: %w: is of step %d", d.gone(step), errDamaged, m.Step)
		}
		switch {
		case damaged(err):
			err = t.setAside(d, d.gone(step), err)
		case err == nil && found:
			err = d.removeStep(m)
		}
		errs = append(errs, err)
	}
	for _, dir := range []string{d.root, d.meta()} {
		errs = append(errs, t.sweepDir(d, dir, lastCommit(metas)))
	}
	return errors.Join(append(errs, ctx.Err())...)
}

// sweepDir removes the temporary files of small ones that are older than the last commit: a writer that is only slow
// begins again.
func (t Store) sweepDir(d directory, dir string, last time.Time) error {
	es, err := d.list(dir)
	if err != nil {
		return err
	}
	for _, e := range es {
		if fsx.Temporary(e.Name) && !e.Dir && (e.ModTime.Before(last) || t.Now().Sub(e.ModTime) > orphanAge) {
			if err := d.fs.Remove(filepath.Join(dir, e.Name)); err != nil {
				return err
			}
		}
	}
	return nil
}
