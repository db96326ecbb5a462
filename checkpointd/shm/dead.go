package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/openfile"
)

// justMade is how long a directory that nobody has signed may wait for its owner.
const justMade = time.Minute

// foreignAge is how long a plain run of another PID namespace may be without a worker: its processes cannot be seen
// from here.
const foreignAge = time.Hour

// plainKey reads the key of a run that has no launcher, t<pid>-<started>-<namespace>: the process that started the
// workers, when it started, in clock ticks since the boot, and its PID namespace.
func plainKey(key string) (pid, started, namespace string, ok bool) {
	key, t := strings.CutPrefix(key, "t")
	p := strings.Split(key, "-")
	if !t || len(p) != 3 || slices.ContainsFunc(p, func(s string) bool { return !digits(s, len(s)) }) {
		return "", "", "", false
	}
	return p[0], p[1], p[2], true
}

// Dead returns the runtime directories of this user below base whose run has ended. It skips entries that do not look
// like a runtime directory, or are not ours.
func Dead(base string) ([]*Dir, error) {
	top := userDir(base)
	if err := private(top); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(top)
	if err != nil {
		return nil, fmt.Errorf("list runtime directories: %w", err)
	}
	var dead []*Dir
	for _, e := range entries {
		d := &Dir{path: filepath.Join(top, e.Name())}
		if ValidKey(e.Name()) && private(d.path) == nil && d.dead() {
			dead = append(dead, d)
		}
	}
	return dead, nil
}

func (d *Dir) dead() bool {
	if pid, started, namespace, ok := plainKey(filepath.Base(d.path)); ok {
		if namespace != pidNamespace() {
			return d.vacant() && d.Age() > foreignAge
		}
		if startTime(pid) == started {
			return false
		}
	} else if !d.signed() && d.Age() <= justMade {
		return false
	}
	return d.unowned()
}

// signed reports whether the directory has had an owner. One that is just made gets its lock file a moment before the
// lock.
func (d *Dir) signed() bool {
	fi, err := os.Lstat(filepath.Join(d.path, ownerFile))
	return err == nil && fi.Size() > 0
}

// startTime is the start time of a process in clock ticks, "" if there is none.
func startTime(pid string) string {
	b, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return ""
	}
	const started = 19
	fields := statFields(string(b))
	if len(fields) <= started {
		return ""
	}
	return fields[started]
}

// pidNamespace names ours as the client does.
func pidNamespace() string {
	var st unix.Stat_t
	if unix.Stat("/proc/self/ns/pid", &st) != nil {
		return "0"
	}
	return strconv.FormatUint(st.Ino, 10)
}

// vacant reports whether no plain worker has the directory open: each holds a shared lock on it.
func (d *Dir) vacant() bool {
	fd, err := unix.Open(d.path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) == nil
}

// unowned reports whether no process holds the lock. It takes it for a moment: there is no other way to ask.
func (d *Dir) unowned() bool {
	f, err := openfile.Open(filepath.Join(d.path, ownerFile), os.O_RDONLY, 0)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	defer f.Close()
	return unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) == nil
}

// Age is the time since the directory was last used: owned, changed, or saved into.
func (d *Dir) Age() time.Duration {
	var last time.Time
	_ = filepath.WalkDir(d.path, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil // it is being removed
		}
		if fi, err := e.Info(); err == nil && fi.ModTime().After(last) {
			last = fi.ModTime()
		}
		if saved := savedAt(path, e); saved.After(last) {
			last = saved
		}
		return nil
	})
	return max(0, time.Since(last))
}

// savedAt is the time of the last save in a segment. Writing to mapped memory leaves no other trace.
func savedAt(path string, e fs.DirEntry) time.Time {
	if !e.Type().IsRegular() || !strings.HasSuffix(path, ".seg") {
		return time.Time{}
	}
	f, err := openfile.Open(path, os.O_RDONLY, 0)
	if err != nil {
		return time.Time{}
	}
	defer f.Close()
	var b [8]byte
	if _, err := f.ReadAt(b[:], offSaved); err != nil {
		return time.Time{}
	}
	saved := time.Unix(0, int64(binary.LittleEndian.Uint64(b[:])))
	if saved.After(time.Now()) {
		return time.Time{}
	}
	return saved
}
