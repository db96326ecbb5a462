package proc

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/launcher/proc/family"
)

// cgroup is a v2 directory of the launcher with one directory in it for the present workers. It needs no controller:
// its purpose is cgroup.kill (Linux 5.14), which ends all members at once, regardless of their sessions and however
// fast they fork.
//
// A killed directory is used up: Linux 6.18 kills every process that is later cloned into it (clone3 compares the kill
// count of the target with the parent's). Hence a new one after each kill.
type cgroup struct {
	path   string
	lock   *os.File // path, locked: not stale as long as the launcher lives
	number int
	dir    *os.File // of the present workers
	proven bool     // a worker has started in dir
	used   bool     // dir has been killed
}

// cgroupPrefix starts the name of every launcher's directory.
const cgroupPrefix = "dlrover-"

// newCgroup makes a directory for the job id below this process's own v2 cgroup.
func newCgroup(own cgroups, id string) (*cgroup, error) {
	dirs := own.dirs(unified)
	if len(dirs) == 0 {
		return nil, errors.New("no cgroup v2 hierarchy shows this process")
	}
	removeStale(dirs[0])
	c := &cgroup{path: filepath.Join(dirs[0], cgroupPrefix+id)}
	err := os.Mkdir(c.path, 0o755)
	if err != nil {
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

// removeStale ends processes of launchers that were killed together with their guards, and removes their directories; a
// directory with processes that are still ending is removed the next time.
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
			family.KillCgroup(dir.Name())
			family.RemoveCgroupTree(dir.Name())
		}
		dir.Close()
	}
}

// renew replaces the workers' directory. One that cannot be removed, because a
// process survives in it, stays for destroy.
func (c *cgroup) renew() error {
	if c.dir != nil {
		c.dir.Close()
		family.RemoveCgroupTree(c.dir.Name())
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

// kill kills the workers and returns their pids.
func (c *cgroup) kill() []int {
	pids := family.Members(c.dir.Name())
	family.KillCgroup(c.dir.Name())
	c.used = true
	return pids
}

// destroy kills the remaining processes and removes the directory.
func (c *cgroup) destroy() error {
	c.dir.Close() // nil is fine
	c.lock.Close()
	family.KillCgroup(c.path)
	return family.RemoveCgroup(c.path, time.Second)
}
