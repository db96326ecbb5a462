package proc

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// cgroup is a v2 directory of the launcher with one directory in it for the
// present workers. It needs no controller: it is there because cgroup.kill
// (Linux 5.14) ends all members at once, whatever sessions they made and however
// fast they fork.
//
// A killed directory is used up: Linux 6.18 kills whatever is later cloned into
// it (clone3 compares the kill count of the target with the parent's). Hence a
// new one after each kill.
type cgroup struct {
	path   string
	lock   *os.File // path, locked: not stale as long as launcher or guard live
	number int
	dir    *os.File // of the present workers
	proven bool     // a worker has started in dir
	used   bool     // dir has been killed
}

// cgroupPrefix starts the name of every launcher's directory.
const cgroupPrefix = "dlrover-"

// newCgroup makes a directory for the job id below this process's own v2 cgroup.
func newCgroup(procRoot, id string) (*cgroup, error) {
	own, err := ownCgroups(procRoot, "")
	if err != nil {
		return nil, err
	}
	dirs := own.dirs(unified)
	if len(dirs) == 0 {
		return nil, errors.New("no cgroup v2 hierarchy shows this process")
	}
	removeStale(dirs[0])
	c := &cgroup{path: filepath.Join(dirs[0], cgroupPrefix+id)}
	if err := os.Mkdir(c.path, 0o755); err != nil {
		return nil, err
	}
	if _, err = os.Stat(filepath.Join(c.path, "cgroup.kill")); err == nil {
		err = c.renew()
	}
	if err == nil {
		c.lock, err = os.Open(c.path)
	}
	if err == nil {
		err = unix.Flock(int(c.lock.Fd()), unix.LOCK_SH)
	}
	if err != nil {
		return nil, errors.Join(err, c.destroy())
	}
	return c, nil
}

// staleAge keeps launchers that start together from taking each other's new
// directory, not locked yet, for a stale one.
const staleAge = time.Minute

// removeStale removes the empty directories of launchers that were killed
// together with their guards. One with processes in it is left alone.
func removeStale(parent string) {
	entries, _ := os.ReadDir(parent)
	for _, e := range entries {
		fi, err := e.Info()
		if err != nil || !e.IsDir() || !strings.HasPrefix(e.Name(), cgroupPrefix) || time.Since(fi.ModTime()) < staleAge {
			continue
		}
		dir, err := os.Open(filepath.Join(parent, e.Name()))
		if err != nil {
			continue
		}
		if unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			removeCgroupTree(dir.Name())
		}
		dir.Close()
	}
}

// renew replaces the workers' directory. One that cannot be removed, because a
// process survives in it, stays for destroy.
func (c *cgroup) renew() error {
	if c.dir != nil {
		c.dir.Close()
		removeCgroupTree(c.dir.Name())
	}
	c.number++
	path := filepath.Join(c.path, strconv.Itoa(c.number))
	err := os.Mkdir(path, 0o755)
	if err == nil {
		c.dir, err = os.Open(path)
	}
	c.proven, c.used = false, false
	return err
}

// kill kills the workers and returns who they were.
func (c *cgroup) kill() []int {
	pids := cgroupPIDs(c.dir.Name())
	killCgroup(c.dir.Name())
	c.used = true
	return pids
}

// destroy kills what is left and removes the directory.
func (c *cgroup) destroy() error {
	c.dir.Close() // nil is fine
	c.lock.Close()
	killCgroup(c.path)
	return removeCgroup(c.path, time.Second)
}

// cgroupPIDs returns the members, those of nested cgroups included.
func cgroupPIDs(path string) (pids []int) {
	filepath.WalkDir(path, func(file string, e fs.DirEntry, err error) error {
		if err != nil || e.Name() != "cgroup.procs" {
			return nil // a cgroup that disappears has no members
		}
		text, _ := os.ReadFile(file)
		for f := range strings.FieldsSeq(string(text)) {
			if pid, err := strconv.Atoi(f); err == nil {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	return pids
}

// killCgroup kills all members at once, nested cgroups included.
func killCgroup(path string) error {
	f, err := os.OpenFile(filepath.Join(path, "cgroup.kill"), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString("1")
	return errors.Join(err, f.Close())
}

// removeCgroup removes a cgroup and the ones that workers made in it. The kernel
// refuses while a member is still exiting, so it tries again until bound.
func removeCgroup(path string, bound time.Duration) error {
	deadline := time.Now().Add(bound)
	for {
		err := removeCgroupTree(path)
		if err == nil || !exists(path) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return fmt.Errorf("remove cgroup %s: %w", path, err)
		}
		time.Sleep(time.Millisecond)
	}
}

func removeCgroupTree(path string) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeCgroupTree(filepath.Join(path, e.Name())); err != nil {
				return err
			}
		}
	}
	return unix.Rmdir(path)
}
