package commit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"dlrover-run/checkpointd/fsx"
)

// storage reads and writes the files of a checkpoint directory.
type storage struct {
	fs fsx.FS
	layout
}

// relative returns the path by which this package knows a file that a save has named: relative when it is in the
// directory, however it was named.
func (st storage) relative(path string) (string, error) {
	if filepath.IsAbs(path) {
		real, err := st.real(filepath.Clean(path))
		if err != nil {
			return "", err
		}
		path = real
		if rel, err := filepath.Rel(st.root, real); err == nil && filepath.IsLocal(rel) {
			path = rel
		}
	}
	return path, checkPath(path)
}

// real returns where the file of a checked path is. The directory of an absolute path was named by a person, so it may
// be reached through links.
func (st storage) real(path string) (string, error) {
	if !filepath.IsAbs(path) {
		return filepath.Join(st.root, path), nil
	}
	dir, err := st.fs.Resolve(filepath.Dir(path))
	return filepath.Join(dir, filepath.Base(path)), err
}

// realFiles returns where files are, and their temporary names.
func (st storage) realFiles(files []FileEntry, save string) (finals, tmps []string, err error) {
	for _, f := range files {
		real, err := st.real(f.Path)
		if err != nil {
			return nil, nil, err
		}
		finals, tmps = append(finals, real), append(tmps, temporary(real, save))
	}
	return finals, tmps, nil
}

// entry returns e with the paths by which this package knows the files.
func (st storage) entry(e Entry) (Entry, error) {
	files := slices.Clone(e.Files)
	for i, f := range files {
		rel, err := st.relative(f.Path)
		if err != nil {
			return Entry{}, err
		}
		files[i].Path, files[i].Shard, files[i].Tmp = rel, e.Shard, ""
	}
	return Entry{Shard: e.Shard, Files: files}, checkFiles(files, e.Shard+1)
}

// expect fails unless all files have the size that their entries name.
func (st storage) expect(paths []string, files []FileEntry) error {
	for i, path := range paths {
		size, err := st.fs.Size(path)
		if err != nil {
			return err
		}
		if size != files[i].Size {
			return fmt.Errorf("%s: %w: %d bytes instead of %d", path, errDamaged, size, files[i].Size)
		}
	}
	return nil
}

func (st storage) whole(path string, f FileEntry) bool {
	return st.expect([]string{path}, []FileEntry{f}) == nil
}

func (st storage) missing(file string) bool {
	_, err := st.fs.Size(file)
	return errors.Is(err, fs.ErrNotExist)
}

// exists takes an unreadable file for an error.
func (st storage) exists(path string) (bool, error) {
	_, err := st.fs.Size(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// free fails when something that a save is to write is a directory, over which nothing can be renamed.
func (st storage) free(paths []string) error {
	for _, path := range paths {
		if _, err := st.fs.List(path); err == nil {
			return &fs.PathError{Op: "save to", Path: path, Err: syscall.EISDIR}
		}
	}
	return nil
}

// list returns nothing for a directory that does not exist.
func (st storage) list(dir string) ([]fsx.Entry, error) {
	es, err := st.fs.List(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return es, err
}

// read returns the manifest in a file; found is false when there is none.
func (st storage) read(path string) (m Manifest, found bool, err error) {
	b, err := st.fs.ReadFile(path, readLimit)
	if errors.Is(err, fs.ErrNotExist) {
		return Manifest{}, false, nil
	}
	if err != nil {
		return Manifest{}, false, err
	}
	m, err = parseManifest(b)
	m.Dir = st.root
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

// put writes a small JSON file.
func (st storage) put(path string, v any) error {
	b, err := json.Marshal(v)
	if err == nil && len(b) > readLimit {
		err = fmt.Errorf("%w: %d bytes, at most %d are read again: save in fewer files", fsx.ErrTooLong, len(b),
			readLimit)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return st.fs.WriteFile(path, b)
}

// syncDirs makes the names of files durable, and the names of the directories from the root to them. The process that
// made such a directory may have died before its name was durable.
func (st storage) syncDirs(files []string) error {
	done := map[string]bool{}
	for _, file := range files {
		for dir := filepath.Dir(file); !done[dir]; dir = filepath.Dir(dir) {
			done[dir] = true
			if err := st.fs.SyncDir(dir); err != nil {
				return err
			}
			if dir == st.root || !strings.HasPrefix(dir, st.root+"/") {
				break
			}
		}
	}
	return nil
}

// place renames the files that still have temporary names. Other processes may be doing the same.
func (st storage) place(files []FileEntry, save string) error {
	finals, tmps, err := st.realFiles(files, save)
	if err != nil {
		return err
	}
	for i := range files {
		err := st.fs.Rename(tmps[i], finals[i])
		if errors.Is(err, fs.ErrNotExist) {
			err = st.expect(finals[i:i+1], files[i:i+1])
		}
		if err != nil {
			return err
		}
	}
	return st.syncDirs(finals)
}

func (st storage) track(trackers []Tracker) error {
	for _, tr := range trackers {
		path := filepath.Join(st.root, tr.Path)
		if err := st.fs.MkdirAll(filepath.Dir(path)); err != nil {
			return err
		}
		if err := st.fs.WriteFile(path, []byte(tr.Text)); err != nil {
			return err
		}
		if err := st.syncDirs([]string{path}); err != nil {
			return err
		}
	}
	return nil
}

// removeFiles removes files, then the directories below the root that are empty without them, durably.
func (st storage) removeFiles(files []string) error {
	dirs := map[string]bool{}
	for _, file := range files {
		if err := st.fs.Remove(file); err != nil {
			return err
		}
		dirs[filepath.Dir(file)] = true
	}
	for _, dir := range slices.Sorted(maps.Keys(dirs)) {
		for strings.HasPrefix(dir, st.root+"/") && st.fs.Remove(dir) == nil {
			dir = filepath.Dir(dir)
		}
		if err := st.fs.SyncDir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
