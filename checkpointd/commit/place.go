package commit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/checkpointd/fsx"
)

// place is one checkpoint directory.
type place struct {
	fs    fsx.FS
	root  string // without links
	cache *Cache
}

func (t Store) at(dir string) (place, error) {
	root, err := t.FS.Resolve(dir)
	return place{fs: t.FS, root: root, cache: t.Cache}, err
}

func (p place) meta() string           { return filepath.Join(p.root, metaDir) }
func (p place) stages() string         { return filepath.Join(p.meta(), "stage") }
func (p place) stage(id string) string { return StageDir(p.root, id) }
func (p place) intent(id string) string {
	return filepath.Join(p.stage(id), "intent")
}

// marker is a file by which the writer of a shard tells of a phase: "plan", "prepared" or "placed".
func (p place) marker(id string, shard int, phase string) string {
	return filepath.Join(p.stage(id), "shard-"+strconv.Itoa(shard)+"."+phase)
}

// manifest is where the manifest of a step is; gone is where it is while the files of the step are being removed.
func (p place) manifest(step int64) string { return p.numbered(step, ".json") }
func (p place) gone(step int64) string     { return p.numbered(step, ".gone") }
func (p place) numbered(step int64, ext string) string {
	return filepath.Join(p.meta(), strconv.FormatInt(step, 10)+ext)
}

// relative returns the path by which this package knows a file that a save has named: relative when it lies in the
// directory, however it was named.
func (p place) relative(path string) (string, error) {
	if filepath.IsAbs(path) {
		real, err := p.real(filepath.Clean(path))
		if err != nil {
			return "", err
		}
		path = real
		if rel, err := filepath.Rel(p.root, real); err == nil && filepath.IsLocal(rel) {
			path = rel
		}
	}
	return path, checkPath(path)
}

// real returns where the file of a checked path is. The directory of an absolute path was named by a person, so it may
// be reached through links.
func (p place) real(path string) (string, error) {
	if !filepath.IsAbs(path) {
		return filepath.Join(p.root, path), nil
	}
	dir, err := p.fs.Resolve(filepath.Dir(path))
	return filepath.Join(dir, filepath.Base(path)), err
}

// realFiles returns where files are, and their temporary names.
func (p place) realFiles(files []FileEntry, save string) (finals, tmps []string, err error) {
	for _, f := range files {
		real, err := p.real(f.Path)
		if err != nil {
			return nil, nil, err
		}
		finals, tmps = append(finals, real), append(tmps, temporary(real, save))
	}
	return finals, tmps, nil
}

// expect fails unless all files have the size that their entries name.
func (p place) expect(paths []string, files []FileEntry) error {
	for i, path := range paths {
		size, err := p.fs.Size(path)
		if err != nil {
			return err
		}
		if size != files[i].Size {
			return fmt.Errorf("%s has %d bytes instead of %d", path, size, files[i].Size)
		}
	}
	return nil
}

// syncDirs makes the names of files durable, and those of the directories that lead to them from the root. Whoever made
// such a directory may have died before its name was durable.
func (p place) syncDirs(files []string) error {
	done := map[string]bool{}
	for _, file := range files {
		for dir := filepath.Dir(file); !done[dir]; dir = filepath.Dir(dir) {
			done[dir] = true
			if err := p.fs.SyncDir(dir); err != nil {
				return err
			}
			if dir == p.root || !strings.HasPrefix(dir, p.root+"/") {
				break
			}
		}
	}
	return nil
}

// put writes a small JSON file.
func (p place) put(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return p.fs.WriteFile(path, b)
}

// exists takes an unreadable file for an error.
func (p place) exists(path string) (bool, error) {
	_, err := p.fs.Size(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// list returns nothing for a directory that does not exist.
func (p place) list(dir string) ([]fsx.Entry, error) {
	es, err := p.fs.List(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return es, err
}

// read returns the manifest in a file; found is false when there is none.
func (p place) read(path string) (m Manifest, found bool, err error) {
	b, err := p.fs.ReadFile(path, readLimit)
	if errors.Is(err, fs.ErrNotExist) {
		return Manifest{}, false, nil
	}
	if err != nil {
		return Manifest{}, false, err
	}
	m, err = ParseManifest(b)
	m.Dir = p.root
	if err != nil {
		return m, true, fmt.Errorf("%s: %w", path, err)
	}
	return m, true, nil
}

// committed returns the manifest of a step. A damaged one counts as none.
func (p place) committed(step int64) (Manifest, bool) {
	m, found, err := p.read(p.manifest(step))
	return m, found && err == nil && m.Step == step
}

// intents returns the saves that can only be completed, in the order in which they were saved.
func (p place) intents() ([]Manifest, error) {
	stages, err := p.list(p.stages())
	if err != nil {
		return nil, err
	}
	var ms []Manifest
	for _, e := range stages {
		if !e.Dir || checkID(e.Name) != nil {
			continue
		}
		m, found, rerr := p.read(p.intent(e.Name))
		if rerr == nil && found && m.ID != e.Name {
			rerr = fmt.Errorf("%s: is of save %s", p.intent(e.Name), m.ID)
		}
		if rerr != nil {
			err = errors.Join(err, rerr)
		} else if found {
			ms = append(ms, m)
		}
	}
	slices.SortStableFunc(ms, func(a, b Manifest) int { return a.Saved.Compare(b.Saved) })
	return ms, err
}

// tracked reads dlrover_latest.txt.
func (p place) tracked() (int64, bool) {
	b, err := p.fs.ReadFile(filepath.Join(p.root, Latest), trackerLimit)
	if err != nil {
		return 0, false
	}
	return parseStep(b)
}

// trackedSave returns the manifest of the step that dlrover_latest.txt names.
func (p place) trackedSave() (Manifest, bool) {
	step, ok := p.tracked()
	if !ok {
		return Manifest{}, false
	}
	return p.committed(step)
}
