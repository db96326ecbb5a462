// Package python holds the checkpoint client that training processes import, and puts it on disk.
package python

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"syscall"
)

// The patterns name files, not directories: a directory would leave out __init__.py and take in what lies beside it.
//
//go:embed dlrover/*.py dlrover/*/*.py dlrover/*/*/*.py dlrover/*/*/*/*.py dlrover_ckpt/*.py
var files embed.FS

// Sum returns the SHA-256 of the names and contents of all files, in hexadecimal.
func Sum() string {
	h := sha256.New()
	_ = each(func(name string, size int64) error {
		data, err := files.ReadFile(name)
		fmt.Fprintf(h, "%s %d\n", name, size)
		h.Write(data)
		return err
	})
	return hex.EncodeToString(h.Sum(nil))
}

// Extract writes the client below dir, which goes on PYTHONPATH. Directories have mode 0700, files 0600. dir is made
// if need be, its parent is not.
//
// Each file appears whole or not at all, so several processes may extract the same client at the same time. A
// directory that is a link, or that another user owns, is an error; nothing is written through it.
func Extract(dir string) error {
	if err := mkdir(dir); err != nil {
		return err
	}
	return each(func(name string, _ int64) error {
		for parent := range parents(name) {
			if err := mkdir(filepath.Join(dir, parent)); err != nil {
				return err
			}
		}
		data, err := files.ReadFile(name)
		if err != nil {
			return fmt.Errorf("embedded file: %w", err)
		}
		return write(filepath.Join(dir, name), data)
	})
}

// each calls f with every file, in the order of their names.
func each(f func(name string, size int64) error) error {
	return fs.WalkDir(files, ".", func(name string, d fs.DirEntry, err error) error {
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

// mkdir makes a directory for us alone, or checks that it is one.
func mkdir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("extract checkpoint client: %w", err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("extract checkpoint client: %w", err)
	}
	owner := int(info.Sys().(*syscall.Stat_t).Uid)
	if !info.IsDir() || owner != os.Geteuid() {
		return fmt.Errorf("extract checkpoint client: %s is not a directory of ours (mode %v, owner %d): remove it",
			dir, info.Mode(), owner)
	}
	if info.Mode().Perm() == 0o700 {
		return nil
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return fmt.Errorf("extract checkpoint client: %w", err)
	}
	return nil
}

// write gives the file its name when it is whole. A rename replaces a link instead of following it.
func write(name string, data []byte) (err error) {
	if same(name, data) {
		return nil
	}
	f, err := os.CreateTemp(filepath.Dir(name), ".*.tmp") // mode 0600
	if err != nil {
		return fmt.Errorf("extract checkpoint client: %w", err)
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("extract checkpoint client: write %s: %w", name, err)
	}
	return nil
}

// same reports whether name is a file as we would write it. Python's compiled files stay valid then.
func same(name string, data []byte) bool {
	info, err := os.Lstat(name)
	if err != nil || info.Mode() != 0o600 || info.Size() != int64(len(data)) {
		return false
	}
	old, err := os.ReadFile(name)
	return err == nil && bytes.Equal(old, data)
}
