package shm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	ownerFile = "owner"
	ownDir    = "seg"
	peerDir   = "peer"
)

// ValidKey reports whether key can be the name of a runtime directory: 1 to 128 letters, digits and ._- that begin with
// a letter, a digit or _.
func ValidKey(key string) bool {
	if key == "" || len(key) > 128 || key[0] == '.' || key[0] == '-' {
		return false
	}
	for _, c := range []byte(key) {
		if !('0' <= c && c <= '9' || 'A' <= c && c <= 'Z' || 'a' <= c && c <= 'z' || c == '.' || c == '_' || c == '-') {
			return false
		}
	}
	return true
}

// validName reports whether name is that of a segment: seg/l<rank>-<k>.seg or peer/r<rank>-<k>.seg.
func validName(name string) bool {
	rest, ok := strings.CutPrefix(name, ownDir+"/l")
	if !ok {
		rest, ok = strings.CutPrefix(name, peerDir+"/r")
	}
	rest, seg := strings.CutSuffix(rest, ".seg")
	rank, k, both := strings.Cut(rest, "-")
	return ok && seg && both && digits(rank, 9) && digits(k, 9)
}

// digits reports whether s is 1 to most decimal digits.
func digits(s string, most int) bool {
	return s != "" && len(s) <= most && strings.Trim(s, "0123456789") == ""
}

// Dir is the runtime directory of one run: its segments, and the lock that shows that the run is alive. Its methods may
// be called from several goroutines.
type Dir struct {
	path string

	mu    sync.Mutex
	owner *os.File // the lock that Own took; nil: not owned through this Dir

	watching sync.Mutex // before the segments' own
	watched  []*Segment // open ones of workers
}

// Create makes the runtime directory <base>/dlrover-<uid>/<key>, or takes the existing one. It refuses directories that
// are links, belong to another user, or are open to others.
func Create(base, key string) (*Dir, error) {
	if !ValidKey(key) {
		return nil, fmt.Errorf("runtime directory: bad name %q: use letters, digits, and ._-", key)
	}
	top, err := UserDir(base)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(top, key)
	for _, p := range []string{path, filepath.Join(path, ownDir), filepath.Join(path, peerDir)} {
		if err := makePrivate(p); err != nil {
			return nil, err
		}
	}
	return &Dir{path: path}, nil
}

// UserDir makes <base>/dlrover-<uid>, which has the runtime directories of this user, or takes the existing one, with
// the checks of Create.
func UserDir(base string) (string, error) {
	top := userDir(base)
	return top, makePrivate(top)
}

func makePrivate(path string) error {
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make the runtime directory: %w", err)
	}
	return private(path)
}

// OpenDir opens a runtime directory that exists, with the checks of Create.
func OpenDir(path string) (*Dir, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("runtime directory: %w", err)
	}
	for _, p := range []string{filepath.Dir(path), path} {
		if err := private(p); err != nil {
			return nil, err
		}
	}
	return &Dir{path: path}, nil
}

func userDir(base string) string { return filepath.Join(base, fmt.Sprintf("dlrover-%d", os.Getuid())) }

// private checks that path is a directory of ours that no other user may enter.
func private(path string) error {
	fi, err := os.Lstat(path)
	if err != nil {
		return fmt.Errorf("runtime directory: %w", err)
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	switch {
	case !fi.IsDir():
		return fmt.Errorf("runtime directory: %s is not a directory (links are refused); remove it", path)
	case !ok || int(st.Uid) != os.Getuid():
		return fmt.Errorf("runtime directory: %s belongs to another user; remove it or choose another directory", path)
	case fi.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("runtime directory: %s has mode %#o, others may enter it; make it 0700", path,
			fi.Mode().Perm())
	}
	return nil
}

// Path returns the directory, absolute if its base was.
func (d *Dir) Path() string { return d.path }

// Own takes the directory for this process until release is called or the process ends. ErrOwned: another process has
// it. Only the owner may receive copies, so half received ones of an earlier owner are removed.
func (d *Dir) Own() (release func() error, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.owner != nil {
		return nil, fmt.Errorf("own %s: %w", d.path, ErrOwned)
	}
	f, err := lockOwner(d.path)
	if err != nil {
		return nil, fmt.Errorf("own %s: %w", d.path, err)
	}
	d.owner = f
	if err := d.removePartial(); err != nil {
		d.owner = nil
		return nil, errors.Join(fmt.Errorf("own %s: %w", d.path, err), f.Close())
	}
	return sync.OnceValue(func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.owner = nil
		return f.Close()
	}), nil
}

// removePartial removes copies that were being received when their receiver died.
func (d *Dir) removePartial() error {
	peers := filepath.Join(d.path, peerDir)
	entries, err := os.ReadDir(peers)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") && strings.HasSuffix(e.Name(), partialSuffix) {
			err = errors.Join(err, os.Remove(filepath.Join(peers, e.Name())))
		}
	}
	return err
}

// Names returns the names of the segments, such as "seg/l0-1.seg", sorted.
func (d *Dir) Names() ([]string, error) {
	var names []string
	for _, sub := range []string{ownDir, peerDir} {
		entries, err := os.ReadDir(filepath.Join(d.path, sub))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("list segments: %w", err)
		}
		for _, e := range entries {
			if name := sub + "/" + e.Name(); e.Type().IsRegular() && validName(name) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names, nil
}

// Remove removes a segment. Processes that have it open keep it. It is no error if there is none.
func (d *Dir) Remove(name string) error {
	return d.at(name, func(dirfd int, base string) error {
		if err := unix.Unlinkat(dirfd, base, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove segment %s: %w", name, err)
		}
		return nil
	})
}

// RemoveAll removes the directory with everything in it. ErrOwned: another process, or another Dir, has it.
func (d *Dir) RemoveAll() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.owner == nil {
		f, err := lockOwner(d.path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("remove %s: %w", d.path, err)
		}
		defer f.Close()
	}
	// A process that makes a directory of this name from now on gets a new one, and never loses parts of it to us.
	gone := fmt.Sprintf("%s.gone-%d-%d", d.path, os.Getpid(), time.Now().UnixNano())
	if err := os.Rename(d.path, gone); err != nil {
		return fmt.Errorf("remove %s: %w", d.path, err)
	}
	if err := os.RemoveAll(gone); err != nil {
		return fmt.Errorf("remove %s: %w", d.path, err)
	}
	return nil
}

// at runs f with the open directory of the segment of that name. No link is followed below the runtime directory.
func (d *Dir) at(name string, f func(dirfd int, base string) error) error {
	if !validName(name) {
		return fmt.Errorf("segment: bad name %q", name)
	}
	sub, base, _ := strings.Cut(name, "/")
	top, err := openat(unix.AT_FDCWD, d.path, unix.O_DIRECTORY|unix.O_RDONLY)
	if err != nil {
		return fmt.Errorf("open runtime directory %s: %w", d.path, err)
	}
	defer unix.Close(top)
	fd, err := openat(top, sub, unix.O_DIRECTORY|unix.O_RDONLY)
	if err != nil {
		return fmt.Errorf("open %s of runtime directory %s: %w", sub, d.path, err)
	}
	defer unix.Close(fd)
	return f(fd, base)
}

// openat opens without following a link and without waiting for a pipe's other end.
func openat(dirfd int, name string, flags int) (int, error) {
	for {
		fd, err := unix.Openat(dirfd, name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0o600)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}
