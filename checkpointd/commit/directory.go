package commit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"dlrover-run/checkpointd/fsx"
)

// directory is one checkpoint directory.
type directory struct {
	fs    fsx.FS
	root  string // without links
	cache *Cache
}

func (t Store) at(dir string) (directory, error) {
	root, err := t.FS.Resolve(dir)
	return directory{fs: t.FS, root: root, cache: t.Cache}, err
}

func (d directory) meta() string           { return filepath.Join(d.root, metaDir) }
func (d directory) stages() string         { return filepath.Join(d.meta(), "stage") }
func (d directory) stage(id string) string { return StageDir(d.root, id) }
func (d directory) intent(id string) string {
	return filepath.Join(d.stage(id), "intent")
}

// marker is a file by which the writer of a shard marks a phase: "plan", "prepared" or "placed".
func (d directory) marker(id string, shard int, phase string) string {
	return filepath.Join(d.stage(id), "shard-"+strconv.Itoa(shard)+"."+phase)
}

// manifest is where the manifest of a step is; gone is where it is while the files of the step are being removed.
func (d directory) manifest(step int64) string { return d.numbered(step, ".json") }
func (d directory) gone(step int64) string     { return d.numbered(step, ".gone") }
func (d directory) numbered(step int64, ext string) string {
	return filepath.Join(d.meta(), strconv.FormatInt(step, 10)+ext)
}

// relative returns the path by which this package knows a file that a save has named: relative when it is in the
// directory, however it was named.
func (d directory) relative(path string) (string, error) {
	if filepath.IsAbs(path) {
		real, err := d.real(filepath.Clean(path))
		if err != nil {
			return "", err
		}
		path = real
		if rel, err := filepath.Rel(d.root, real); err == nil && filepath.IsLocal(rel) {
			path = rel
		}
	}
	return path, checkPath(path)
}

// real returns where the file of a checked path is. The directory of an absolute path was named by a person, so it may
// be reached through links.
func (d directory) real(path string) (string, error) {
	if !filepath.IsAbs(path) {
		return filepath.Join(d.root, path), nil
	}
	dir, err := d.fs.Resolve(filepath.Dir(path))
	return filepath.Join(dir, filepath.Base(path)), err
}

// realFiles returns where files are, and their temporary names.
func (d directory) realFiles(files []FileEntry, save string) (finals, tmps []string, err error) {
	for _, f := range files {
		real, err := d.real(f.Path)
		if err != nil {
			return nil, nil, err
		}
		finals, tmps = append(finals, real), append(tmps, temporary(real, save))
	}
	return finals, tmps, nil
}

// expect fails unless all files have the size that their entries name.
func (d directory) expect(paths []string, files []FileEntry) error {
	for i, path := range paths {
		size, err := d.fs.Size(path)
		if err != nil {
			return err
		}
		if size != files[i].Size {
			return fmt.Errorf("%s: %w: %d bytes instead of %d", path, errDamaged, size, files[i].Size)
		}
	}
	return nil
}

// syncDirs makes the names of files durable, and the names of the directories from the root to them. The process that
// made such a directory may have died before its name was durable.
func (d directory) syncDirs(files []string) error {
	done := map[string]bool{}
	for _, file := range files {
		for dir := filepath.Dir(file); !done[dir]; dir = filepath.Dir(dir) {
			done[dir] = true
			if err := d.fs.SyncDir(dir); err != nil {
				return err
			}
			if dir == d.root || !strings.HasPrefix(dir, d.root+"/") {
				break
			}
		}
	}
	return nil
}

// put writes a small JSON file.
func (d directory) put(path string, v any) error {
	b, err := json.Marshal(v)
	if err == nil && len(b) > readLimit {
		err = fmt.Errorf("%w: %d bytes, at most %d are read again: save in fewer files", fsx.ErrTooLong, len(b),
			readLimit)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return d.fs.WriteFile(path, b)
}

// exists takes an unreadable file for an error.
func (d directory) exists(path string) (bool, error) {
	_, err := d.fs.Size(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// list returns nothing for a directory that does not exist.
func (d directory) list(dir string) ([]fsx.Entry, error) {
	es, err := d.fs.List(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return es, err
}

// read returns the manifest in a file; found is false when there is none.
func (d directory) read(path string) (m Manifest, found bool, err error) {
	b, err := d.fs.ReadFile(path, readLimit)
	if errors.Is(err, fs.ErrNotExist) {
		return Manifest{}, false, nil
	}
	if err != nil {
		return Manifest{}, false, err
	}
	m, err = parseManifest(b)
	m.Dir = d.root
	if err != nil {
		return m, true, fmt.Errorf("%s: %w", path, err)
	}
	return m, true, nil
}

// damaged distinguishes errors of a file from errors of the storage, which may be repaired.
func damaged(err error) bool {
	return slices.ContainsFunc([]error{errDamaged, fsx.ErrNotRegular, fsx.ErrTooLong, syscall.ELOOP},
		func(e error) bool { return errors.Is(err, e) })
}

// committed returns the manifest of a step. A damaged one counts as none.
func (d directory) committed(step int64) (Manifest, bool) {
	m, found, err := d.read(d.manifest(step))
	return m, found && err == nil && m.Step == step
}

// intents returns the saves that can only be completed, in the order in which they were saved, and the errors of
// damaged intents by id.
func (d directory) intents() (ms []Manifest, bad map[string]error, err error) {
	stages, err := d.list(d.stages())
	if err != nil {
		return nil, nil, err
	}
	bad = map[string]error{}
	for _, e := range stages {
		if !e.Dir || checkID(e.Name) != nil {
			continue
		}
		m, found, rerr := d.read(d.intent(e.Name))
		if rerr == nil && found && m.ID != e.Name {
			rerr = fmt.Errorf("%s: %w: is of save %s", d.intent(e.Name), errDamaged, m.ID)
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
	slices.SortStableFunc(ms, func(a, b Manifest) int { return a.Saved.Compare(b.Saved) })
	return ms, bad, err
}

// intents returns the saves that can only be completed. Saves with damaged intents are set aside.
func (t Store) intents(d directory) ([]Manifest, error) {
	ms, bad, err := d.intents()
	for _, id := range slices.Sorted(maps.Keys(bad)) {
		err = errors.Join(err, t.setAside(d, d.stage(id), bad[id]))
	}
	return ms, err
}

// asideExt is the extension of names that were set aside: they are no longer a stage or a step.
const asideExt = ".damaged"

// setAside renames an entry that cannot be processed, and keeps all that may help a person: the stage of a save that
// can never be completed, or the list of files of a removed step.
func (t Store) setAside(d directory, path string, why error) error {
	to := path + asideExt
	err := d.fs.Rename(path, to)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // another recovery was faster
	}
	if err == nil {
		err = d.fs.SyncDir(filepath.Dir(path))
	}
	if err != nil {
		return fmt.Errorf("set %s aside (%w): %w", path, why, err)
	}
	if t.OnDamaged != nil {
		t.OnDamaged(to, why)
	}
	return nil
}

// lost returns the reason why a save with an intent can never be completed: a file of it is under neither of its names.
// Files outside of the directory do not count: their storage may only be unmounted.
func (d directory) lost(m Manifest) error {
	for _, f := range m.Files {
		final := filepath.Join(d.root, f.Path)
		if filepath.IsAbs(f.Path) || d.whole(temporary(final, m.ID), f) || d.whole(final, f) {
			continue
		}
		// A network file system may remember that there was no such name until the directory is opened.
		if err := d.fs.SyncDir(filepath.Dir(final)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		wrong := d.expect([]string{final}, []FileEntry{f})
		if wrong == nil || d.whole(temporary(final, m.ID), f) || d.missing(d.intent(m.ID)) {
			continue
		}
		if errors.Is(wrong, fs.ErrNotExist) || damaged(wrong) {
			return fmt.Errorf("a file of save %s of step %d is lost: %w", m.ID, m.Step, wrong)
		}
	}
	return nil
}

func (d directory) whole(path string, f FileEntry) bool {
	return d.expect([]string{path}, []FileEntry{f}) == nil
}

// free fails when something that a save is to write is a directory, over which nothing can be renamed.
func (d directory) free(paths []string) error {
	for _, path := range paths {
		if _, err := d.fs.List(path); err == nil {
			return &fs.PathError{Op: "save to", Path: path, Err: syscall.EISDIR}
		}
	}
	return nil
}

// tracked reads dlrover_latest.txt.
func (d directory) tracked() (int64, bool) {
	step, err := d.tracker()
	return step, err == nil
}

// tracker returns the reason why dlrover_latest.txt names no step.
func (d directory) tracker() (int64, error) {
	b, err := d.fs.ReadFile(filepath.Join(d.root, Latest), trackerLimit)
	if err != nil {
		return 0, err
	}
	step, ok := parseStep(b)
	if !ok {
		return 0, fmt.Errorf("%.20q is no step", b)
	}
	return step, nil
}

// trackedSave returns the manifest of the step that dlrover_latest.txt names.
func (d directory) trackedSave() (Manifest, bool) {
	step, ok := d.tracked()
	if !ok {
		return Manifest{}, false
	}
	return d.committed(step)
}
