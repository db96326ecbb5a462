// Package pytree puts trees of Python packages, which a program embeds, on disk for the processes that it starts.
package pytree

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"syscall"

	"dlrover-run/internal/openfile"
)

// Source is a tree of Python packages within this program.
type Source struct {
	// Name distinguishes the trees of a program. It is part of a directory's name.
	Name string
	// Files are the packages; their root is for PYTHONPATH.
	Files fs.FS
}

// Sum returns the SHA-256 of the names and contents of all files, in hexadecimal.
func (s Source) Sum() string {
	h := sha256.New()
	_ = s.each(func(name string, size int64) error {
		data, err := fs.ReadFile(s.Files, name)
		fmt.Fprintf(h, "%s %d\n", name, size)
		h.Write(data)
		return err
	})
	return hex.EncodeToString(h.Sum(nil))
}

// Extract writes the tree below dir, which is for PYTHONPATH. Directories have mode 0700, files 0600. It creates dir
// if needed, but not its parent.
//
// Each file appears whole or not at all, so several processes may extract the same tree at the same time. A
// directory that is a link, or that another user owns, is an error; nothing is written through it.
func (s Source) Extract(dir string) error {
	if err := s.extract(dir); err != nil {
		return fmt.Errorf("extract %s: %w", s.Name, err)
	}
	return nil
}

func (s Source) extract(dir string) error {
	if err := mkdir(dir); err != nil {
		return err
	}
	return s.each(func(name string, _ int64) error {
		for parent := range parents(name) {
			if err := mkdir(filepath.Join(dir, parent)); err != nil {
				return err
			}
		}
		data, err := fs.ReadFile(s.Files, name)
		if err != nil {
			return err
		}
		return write(filepath.Join(dir, name), data)
	})
}

// each calls f with every file, in the order of their names.
func (s Source) each(f func(name string, size int64) error) error {
	return fs.WalkDir(s.Files, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return fmt.Errorf("embedded file: %w", err)
		}
		return f(name, info.Size())
	})
}

// parents yields the directories above name, the outermost first.
func parents(name string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		dir := path.Dir(name)
		for i := range len(dir) {
			if dir[i] == '/' && !yield(dir[:i]) {
				return
			}
		}
		yield(dir)
	}
}

// errGone is the error if a directory was removed meanwhile.
var errGone = errors.New("is being removed")

// mkdir makes a directory for us alone, or checks that it is one.
func mkdir(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s %w", dir, errGone)
	}
	if err != nil {
		return err
	}
	owner := int(info.Sys().(*syscall.Stat_t).Uid)
	if !info.IsDir() || owner != os.Geteuid() {
		return fmt.Errorf("%s is not a directory of ours (mode %v, owner %d): remove it", dir, info.Mode(), owner)
	}
	if info.Mode().Perm() == 0o700 {
		return nil
	}
	return os.Chmod(dir, 0o700)
}

// write gives the file its name when it is whole. A rename replaces a link instead of following it.
func write(name string, data []byte) error {
	if same(name, data) {
		return nil
	}
	if err := openfile.Replace(name, data, 0o600); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// same reports whether name is a file as we would write it. Python's compiled files stay valid then.
func same(name string, data []byte) bool {
	info, err := os.Lstat(name)
	if err != nil || info.Mode() != 0o600 || info.Size() != int64(len(data)) {
		return false
	}
	old, err := openfile.Read(name, int64(len(data)))
	return err == nil && bytes.Equal(old, data)
}
