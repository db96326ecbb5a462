package pytree

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	treePrefix = ".python-"  // no runtime directory has such a name
	touchAfter = time.Minute // the mtime of a tree is within a minute of its last use
	treeTries  = 100         // of a tree that is being removed
	treePause  = time.Millisecond
)

// Tree is a directory with the packages of a Source that this process uses.
type Tree struct {
	dir  string
	lock *os.File // shared, on the directory: no process removes it
}

// Take puts the tree into a directory below base that all processes of this program share, unless it is there
// already. base must be a directory of this user that no other user may enter. The tree stays for the next process,
// with the files that Python has compiled in it. Tidy removes it when another version has taken its place.
func (s Source) Take(base string) (*Tree, error) {
	dir := filepath.Join(base, s.treeName())
	for range treeTries {
		lock, err := take(dir)
		if err != nil {
			return nil, fmt.Errorf("extract %s: %w", s.Name, err)
		}
		if lock == nil {
			time.Sleep(treePause) // a removal takes microseconds
			continue
		}
		t := &Tree{dir: dir, lock: lock}
		if s.whole(dir) {
			return t, t.touch()
		}
		if err := s.Extract(dir); err != nil {
			return nil, errors.Join(err, lock.Close(), discard(dir)) // the tree is incomplete
		}
		return t, nil
	}
	return nil, fmt.Errorf("extract %s: %s is being removed all the time", s.Name, dir)
}

func (s Source) treeName() string { return treePrefix + s.Name + "-" + s.version() }

// Dir is the tree's directory, for PYTHONPATH.
func (t *Tree) Dir() string { return t.dir }

// Release leaves the tree to others. A process that still has it on a path may lose it.
func (t *Tree) Release() error { return t.lock.Close() }

func (t *Tree) touch() error {
	info, err := t.lock.Stat()
	if err == nil && time.Since(info.ModTime()) > touchAfter {
		_ = os.Chtimes(t.dir, time.Time{}, time.Now()) // it is only a hint
	}
	return err
}

// take makes the directory and locks it; nil: it is being removed.
func take(dir string) (*os.File, error) {
	err := mkdir(dir)
	if errors.Is(err, errGone) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return lock(dir, unix.LOCK_SH)
}

// lock returns nil when another process has a lock that excludes this one, or has removed the directory.
func lock(dir string, how int) (*os.File, error) {
	f, err := os.OpenFile(dir, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
	if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	a, errA := f.Stat()
	b, errB := os.Lstat(dir)
	if err != nil || errA != nil || errB != nil || !os.SameFile(a, b) {
		return nil, f.Close()
	}
	return f, nil
}

// whole reports whether all files are there. Each got its name when it was complete, and the directory's name
// contains a digest of the content. The sizes are for file systems that lose content in a crash, and for people who
// edit.
func (s Source) whole(dir string) bool {
	return s.each(func(name string, size int64) error {
		info, err := os.Lstat(filepath.Join(dir, name))
		if err == nil && (info.Mode() != 0o600 || info.Size() != size) {
			err = fs.ErrInvalid
		}
		return err
	}) == nil
}

// Tidy removes the trees of other versions below base that no process uses and that were last taken longer than age
// ago.
func Tidy(base string, age time.Duration) error {
	trees, err := filepath.Glob(filepath.Join(base, treePrefix+"*"))
	for _, dir := range trees {
		info, e := os.Lstat(dir)
		if e != nil || time.Since(info.ModTime()) < age || strings.HasSuffix(dir, "-"+programID()) {
			continue
		}
		err = errors.Join(err, discard(dir))
	}
	return err
}

// discard removes a tree that no process uses.
func discard(dir string) error {
	f, err := lock(dir, unix.LOCK_EX)
	if f == nil {
		return err
	}
	gone := dir + ".gone-" + rand.Text()
	err = errors.Join(os.Rename(dir, gone), f.Close()) // a process that takes the tree from now on makes another
	return errors.Join(err, os.RemoveAll(gone))
}

// version identifies the content. It is the linker's id of the program that the content is a part of, because to
// read all of it takes as long as to write it.
func (s Source) version() string {
	if id := programID(); id != "" {
		return id
	}
	return s.Sum()[:16]
}

// programID is a digest of buildID; "" if there is none.
var programID = sync.OnceValue(func() string {
	id := buildID()
	if id == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(id))
	return hex.EncodeToString(sum[:8])
})

// buildID is the note that Go's linker puts into the first page of a program; "" if there is none.
func buildID() string {
	f, err := os.Open("/proc/self/exe")
	if err != nil {
		return ""
	}
	defer f.Close()
	page := make([]byte, 4096)
	n, _ := f.ReadAt(page, 0)
	const typeAndName = "\x04\x00\x00\x00Go\x00\x00"
	i := bytes.Index(page[:n], []byte(typeAndName))
	if i < 4 {
		return ""
	}
	size, from := int(binary.LittleEndian.Uint32(page[i-4:])), i+len(typeAndName)
	if size > n-from {
		return ""
	}
	return string(page[from : from+size])
}
