package family

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Members returns the processes of a v2 cgroup, including its nested cgroups. A cgroup that disappears has none.
func Members(path string) (pids []int) {
	text, _ := os.ReadFile(path + "/cgroup.procs")
	pids = numbers(string(text))
	entries, _ := os.ReadDir(path)
	for _, e := range entries {
		if e.IsDir() {
			pids = append(pids, Members(path+"/"+e.Name())...)
		}
	}
	return pids
}

// KillCgroup kills all members at once, nested cgroups included.
func KillCgroup(path string) error {
	f, err := os.OpenFile(path+"/cgroup.kill", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString("1")
	return errors.Join(err, f.Close())
}

// RemoveCgroup removes a cgroup and the ones that workers made in it. The kernel
// refuses while a member is still exiting, so it tries again until bound.
func RemoveCgroup(path string, bound time.Duration) error {
	deadline := time.Now().Add(bound)
	for {
		err := RemoveCgroupTree(path)
		if _, gone := os.Stat(path); err == nil || gone != nil {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return fmt.Errorf("remove cgroup %s: %w", path, err)
		}
		time.Sleep(time.Millisecond)
	}
}

// RemoveCgroupTree tries once.
func RemoveCgroupTree(path string) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := RemoveCgroupTree(path + "/" + e.Name()); err != nil {
				return err
			}
		}
	}
	return unix.Rmdir(path)
}
