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

// Recover ends what crashed processes have left in a directory: it completes the saves whose commit had begun, and
// removes those that were given up. The saves for which live returns true are left alone; nil means none. It may run on
// several nodes at once, and it goes on after an error: what could not be ended stays for the next time.
func (t Store) Recover(ctx context.Context, dir string, live func(save string) bool) (Recovered, error) {
	var r Recovered
	p, err := t.at(dir)
	if err != nil {
		return r, fmt.Errorf("recover: %w", err)
	}
	if live == nil {
		live = func(string) bool { return false }
	}
	intents, err := t.intents(p)
	errs := []error{err}
	for _, m := range intents {
		if live(m.ID) {
			continue
		}
		err := ctx.Err()
		if err == nil {
			err = t.forward(p, m)
		}
		if err != nil && p.missing(p.intent(m.ID)) {
			continue // another recovery was faster, or it is set aside
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("complete save %s of step %d: %w", m.ID, m.Step, err))
		} else {
			r.Forward = append(r.Forward, m.ID)
		}
	}
	r.Removed, err = t.orphans(ctx, p, live)
	errs = append(errs, err, t.sweep(ctx, p))
	if err := errors.Join(errs...); err != nil {
		return r, fmt.Errorf("recover %s: %w", dir, err)
	}
	return r, nil
}

func (p place) missing(file string) bool {
	_, err := p.fs.Size(file)
	return errors.Is(err, fs.ErrNotExist)
}

// forward completes a save whose intent can be seen. It makes the intent durable first: who wrote it may have died just
// before, and half of its files without it would destroy the older save of the step. One that can never be completed is
// set aside.
func (t Store) forward(p place, m Manifest) error {
	if err := p.syncDirs([]string{p.intent(m.ID)}); err != nil {
		return err
	}
	if why := p.lost(m); why != nil {
		return cmp.Or(t.setAside(p, p.stage(m.ID), why), errAside)
	}
	if err := p.place(m.Files, m.ID); err != nil {
		return err
	}
	_, err := t.complete(p, m, true)
	return err
}

// orphans removes the saves that nobody will commit.
func (t Store) orphans(ctx context.Context, p place, live func(string) bool) (removed []string, err error) {
	stages, err := p.list(p.stages())
	if err != nil || len(stages) == 0 {
		return nil, err
	}
	metas, err := p.list(p.meta())
	if err != nil {
		return nil, err
	}
	last := lastCommit(metas)
	var errs []error
	for _, e := range stages {
		if !e.Dir || checkID(e.Name) != nil || live(e.Name) || ctx.Err() != nil {
			continue
		}
		dead, err := t.orphan(p, e, last)
		if err == nil && dead {
			err = p.discard(e.Name)
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
func (t Store) orphan(p place, stage fsx.Entry, last time.Time) (bool, error) {
	es, err := p.list(p.stage(stage.Name))
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
func (p place) discard(save string) error {
	es, err := p.list(p.stage(save))
	if err != nil {
		return err
	}
	for _, e := range es {
		if strings.HasSuffix(e.Name, ".prepared") { // before the files go
			if err := p.fs.Remove(filepath.Join(p.stage(save), e.Name)); err != nil {
				return err
			}
		}
	}
	for _, e := range es {
		if strings.HasSuffix(e.Name, ".plan") {
			if err := p.removePlanned(filepath.Join(p.stage(save), e.Name), save); err != nil {
				return err
			}
		}
	}
	return p.clear(save)
}

// removePlanned removes the files that a plan names, and the directories that are empty without them. A plan that
// cannot be understood names none.
func (p place) removePlanned(plan, save string) error {
	b, err := p.fs.ReadFile(plan, readLimit)
	if errors.Is(err, fs.ErrNotExist) || damaged(err) {
		return nil
	}
	if err != nil {
		return err
	}
	tmps, err := ParsePlan(b, save)
	if err != nil {
		return nil
	}
	for i, tmp := range tmps {
		if tmps[i], err = p.real(tmp); err != nil {
			return err
		}
	}
	return p.removeFiles(tmps)
}

// clear removes the markers of a save that is over. The intent goes first and durably: were it found again after a
// later save of the step, it would claim that one's files.
func (p place) clear(save string) error {
	dir := p.stage(save)
	es, err := p.list(dir)
	if err != nil {
		return err
	}
	if err := p.fs.Remove(p.intent(save)); err != nil {
		return err
	}
	if err := p.fs.SyncDir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range es {
		if err := p.fs.Remove(filepath.Join(dir, e.Name)); err != nil {
			return err
		}
	}
	if err := p.fs.Remove(dir); err != nil {
		return err
	}
	if err := p.fs.SyncDir(p.stages()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// removeFiles removes files, then the directories below the root that are empty without them, durably.
func (p place) removeFiles(files []string) error {
	dirs := map[string]bool{}
	for _, file := range files {
		if err := p.fs.Remove(file); err != nil {
			return err
		}
		dirs[filepath.Dir(file)] = true
	}
	for _, dir := range slices.Sorted(maps.Keys(dirs)) {
		for strings.HasPrefix(dir, p.root+"/") && p.fs.Remove(dir) == nil {
			dir = filepath.Dir(dir)
		}
		if err := p.fs.SyncDir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// sweep ends the removal of steps, and removes what WriteFile has left behind.
func (t Store) sweep(ctx context.Context, p place) error {
	metas, err := p.list(p.meta())
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range metas {
		step, ok := numbered(e, ".gone")
		if !ok || ctx.Err() != nil {
			continue
		}
		m, found, err := p.read(p.gone(step))
		if err == nil && found && m.Step != step {
			err = fmt.Errorf("%s: %w: is of step %d", p.gone(step), ErrDamaged, m.Step)
		}
		switch {
		case damaged(err):
			err = t.setAside(p, p.gone(step), err)
		case err == nil && found:
			err = p.removeStep(m)
		}
		errs = append(errs, err)
	}
	for _, dir := range []string{p.root, p.meta()} {
		errs = append(errs, t.sweepDir(p, dir, lastCommit(metas)))
	}
	return errors.Join(append(errs, ctx.Err())...)
}

// sweepDir removes the temporary files of small ones that are older than the last commit:
// a writer that is only slow begins again.
func (t Store) sweepDir(p place, dir string, last time.Time) error {
	es, err := p.list(dir)
	if err != nil {
		return err
	}
	for _, e := range es {
		if fsx.Temporary(e.Name) && !e.Dir && (e.ModTime.Before(last) || t.Now().Sub(e.ModTime) > orphanAge) {
			if err := p.fs.Remove(filepath.Join(dir, e.Name)); err != nil {
				return err
			}
		}
	}
	return nil
}
