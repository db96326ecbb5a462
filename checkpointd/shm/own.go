package shm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/openfile"
)

// How often the lock of a directory is tried, and the time between.
const (
	ownPause   = 10 * time.Millisecond
	ownTries   = 10  // another process holds it briefly, or its owner cannot be seen from here
	dyingTries = 200 // its owner is dying: then its memory is ours
)

// lockOwner takes the lock of a directory. ErrOwned is returned at once when its owner lives.
func lockOwner(dir string) (*os.File, error) {
	path := filepath.Join(dir, ownerFile)
	tries := ownTries
	for try := 1; ; try++ {
		f, err := openfile.Open(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil && sameFile(f, path) {
			writeOwner(f)
			return f, nil
		}
		state := unknown
		if err != nil && unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) != nil { // else it was only looked at, shared
			state = readOwner(f)
		}
		_ = f.Close()
		switch {
		case err != nil && !errors.Is(err, unix.EWOULDBLOCK):
			return nil, fmt.Errorf("lock %s: %w", path, err)
		case state == alive || try >= tries:
			return nil, ErrOwned
		case state == dying:
			tries = dyingTries
		}
		time.Sleep(ownPause)
	}
}

// sameFile reports whether path still names the file: the directory may have been removed before the lock was ours.
func sameFile(f *os.File, path string) bool {
	a, errA := f.Stat()
	b, errB := os.Lstat(path)
	return errA == nil && errB == nil && os.SameFile(a, b)
}

// writeOwner writes the owner of the lock into the file, for readOwner, and the time, for Age. It is only a hint.
func writeOwner(f *os.File) {
	_ = f.Truncate(0)
	_, _ = f.WriteAt(fmt.Appendf(nil, "%d %s\n", os.Getpid(), pidNamespace()), 0)
}

type ownerState int

const (
	unknown ownerState = iota
	alive
	dying
)

// readOwner looks at the process that has signed the lock file and holds the lock. One that was killed a moment ago may
// still hold it.
func readOwner(f *os.File) ownerState {
	b := make([]byte, 64)
	n, _ := f.ReadAt(b, 0)
	var pid int
	var namespace string
	if _, err := fmt.Sscan(string(b[:n]), &pid, &namespace); err != nil || namespace != pidNamespace() {
		return unknown
	}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	switch {
	case errors.Is(err, os.ErrNotExist) || err == nil && ending(string(stat)):
		return dying
	case err != nil:
		return unknown
	}
	return alive
}

// ending reports whether the process of a /proc/<pid>/stat is on its way out: a zombie, exiting, or with SIGKILL
// pending.
func ending(stat string) bool {
	const (
		state, flags, pending = 0, 6, 28
		exiting               = 0x4 // PF_EXITING
	)
	f := statFields(stat)
	if len(f) <= pending {
		return false
	}
	fl, _ := strconv.ParseUint(f[flags], 10, 64)
	sig, _ := strconv.ParseUint(f[pending], 10, 64)
	return f[state] == "Z" || f[state] == "X" || fl&exiting != 0 || sig&(1<<(unix.SIGKILL-1)) != 0
}

// statFields are the fields of a /proc/<pid>/stat behind the name, which may hold anything.
func statFields(stat string) []string {
	return strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
}
