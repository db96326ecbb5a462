package commit

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"dlrover-run/internal/stable"
)

// staging has the saves of a checkpoint directory that are not committed yet.
type staging struct{ storage storage }

// intents returns the saves that can only be completed, in the order in which they were saved, and the errors of
// damaged intents by id.
func (g staging) intents() (ms []Manifest, bad map[string]error, err error) {
	stages, err := g.storage.list(g.storage.stages())
	if err != nil {
		return nil, nil, err
	}
	bad = map[string]error{}
	for _, e := range stages {
		if !e.Dir || checkID(e.Name) != nil {
			continue
		}
		m, found, rerr := g.storage.read(g.storage.intent(e.Name))
		if rerr == nil && found && m.ID != e.Name {
			rerr = fmt.Errorf("%s: %w: is of save %s", g.storage.intent(e.Name), errDamaged, m.ID)
		}
		switch {
		case damaged(rerr):
			bad[e.Name] = rerr
		case rerr != nil:
			err = errors.Join(err, rerr)
		case found:
			ms = append(ms, m)
		}
	}
	stable.Sort(ms, func(a, b Manifest) int { return a.Saved.Compare(b.Saved) })
	return ms, bad, err
}

// lost returns the reason why a save with an intent can never be completed: a file of it is under neither of its names.
// Files outside of the directory do not count: their storage may only be unmounted.
func (g staging) lost(m Manifest) error {
	for _, f := range m.Files {
		final := filepath.Join(g.storage.root, f.Path)
		if filepath.IsAbs(f.Path) || g.storage.whole(temporary(final, m.ID), f) || g.storage.whole(final, f) {
			continue
		}
		// A network file system may remember that there was no such name until the directory is opened.
		if err := g.storage.fs.SyncDir(filepath.Dir(final)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		wrong := g.storage.expect([]string{final}, []FileEntry{f})
		if wrong == nil || g.storage.whole(temporary(final, m.ID), f) || g.storage.missing(g.storage.intent(m.ID)) {
			continue
		}
		if errors.Is(wrong, fs.ErrNotExist) || damaged(wrong) {
			return fmt.Errorf("a file of save %s of step %d is lost: %w", m.ID, m.Step, wrong)
		}
	}
	return nil
}

// plan writes a plan, durably up to the root: it is how the files are found that take up the space. Then it makes the
// directories of the files.
func (g staging) plan(marker string, tmps, finals []string) error {
	if err := g.storage.fs.MkdirAll(filepath.Dir(marker)); err != nil {
		return err
	}
	if err := g.storage.put(marker, tmps); err != nil {
		return err
	}
	if err := g.storage.syncDirs([]string{marker}); err != nil {
		return err
	}
	for _, final := range finals {
		if err := g.storage.fs.MkdirAll(filepath.Dir(final)); err != nil {
			return err
		}
	}
	return nil
}

// begun reports whether a save has an intent: it can only be completed.
func (g staging) begun(save string) (bool, error) { return g.storage.exists(g.storage.intent(save)) }

func (g staging) notBegun(save string) error {
	begun, err := g.begun(save)
	if begun {
		err = ErrBegun
	}
	return err
}

// abort removes the marker of a prepared shard, then its files, then the plan by which they are found.
func (g staging) abort(save string, shard int) error {
	plan := g.storage.marker(save, shard, "plan")
	known, err := g.storage.exists(plan)
	if err != nil || !known {
		return err
	}
	if err := g.storage.fs.Remove(g.storage.marker(save, shard, "prepared")); err != nil {
		return err
	}
	if err := g.storage.fs.SyncDir(g.storage.stage(save)); err != nil {
		return err
	}
	if err := g.removePlanned(plan, save); err != nil {
		return err
	}
	if err := g.storage.fs.Remove(plan); err != nil {
		return err
	}
	_ = g.storage.fs.Remove(g.storage.stage(save)) // if this was the last shard
	return nil
}

// discard removes a save with its temporary files.
func (g staging) discard(save string) error {
	es, err := g.storage.list(g.storage.stage(save))
	if err != nil {
		return err
	}
	for _, e := range es {
		if strings.HasSuffix(e.Name, ".prepared") { // before the files go
			if err := g.storage.fs.Remove(filepath.Join(g.storage.stage(save), e.Name)); err != nil {
				return err
			}
		}
	}
	for _, e := range es {
		if strings.HasSuffix(e.Name, ".plan") {
			if err := g.removePlanned(filepath.Join(g.storage.stage(save), e.Name), save); err != nil {
				return err
			}
		}
	}
	return g.clear(save)
}

// removePlanned removes the files that a plan names, and the directories that are empty without them. A plan that
// cannot be understood names none.
func (g staging) removePlanned(plan, save string) error {
	b, err := g.storage.fs.ReadFile(plan, readLimit)
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
		if tmps[i], err = g.storage.real(tmp); err != nil {
			return err
		}
	}
	return g.storage.removeFiles(tmps)
}

// clear removes the markers of a finished save. The intent is removed first and durably: if it reappeared after a later
// save of the step, it would claim the files of that save.
func (g staging) clear(save string) error {
	dir := g.storage.stage(save)
	es, err := g.storage.list(dir)
	if err != nil {
		return err
	}
	if err := g.storage.fs.Remove(g.storage.intent(save)); err != nil {
		return err
	}
	if err := g.storage.fs.SyncDir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range es {
		if err := g.storage.fs.Remove(filepath.Join(dir, e.Name)); err != nil {
			return err
		}
	}
	if err := g.storage.fs.Remove(dir); err != nil {
		return err
	}
	if err := g.storage.fs.SyncDir(g.storage.stages()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
