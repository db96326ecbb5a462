package guard

import (
	"errors"
	"os"
	"strconv"
	"syscall"
)

// ErrNoRoom is the error of a start that could not but fail.
var ErrNoRoom = errors.New("no room for the launcher")

// The measured minimum of a job; the Go runtime ends with a trace where it gets less.
const (
	// needThreads of guard and launcher with one CPU each, and of two small workers.
	needThreads = 20
	// fewThreads: below this limit the launcher is started so that it needs no more.
	fewThreads = 1024
	// needSpace is the address space that one of the two reserves, in bytes.
	needSpace = 1300 << 20
)

const rlimitNproc = 6

// limits looks at the limits that were set for the user: thrifty means that the launcher
// should start few threads.
func limits(warn func(string)) (thrifty bool, err error) {
	if n := softLimit(syscall.RLIMIT_AS); n < needSpace {
		warn("the address space is limited to " + strconv.FormatUint(n>>20, 10) + " MiB (ulimit -v); with less than " +
			strconv.Itoa(needSpace>>20) + " MiB the launcher may not start, and what follows here is why: raise the limit")
	}
	n := softLimit(rlimitNproc)
	if n >= fewThreads || os.Geteuid() == 0 {
		return false, nil
	}
	if used := othersThreads(); used+needThreads > n {
		return true, &noRoom{"the limit of " + strconv.FormatUint(n, 10) +
			" processes and threads for this user (ulimit -u) is too small: others take " +
			strconv.FormatUint(used, 10) + ", launcher and guard need " + strconv.Itoa(needThreads) +
			" with two workers, and each further worker its own: raise it"}
	}
	return true, nil
}

type noRoom struct{ text string }

func (e *noRoom) Error() string { return e.text }
func (e *noRoom) Unwrap() error { return ErrNoRoom }

func softLimit(resource int) uint64 {
	var l syscall.Rlimit
	if syscall.Getrlimit(resource, &l) != nil {
		return ^uint64(0)
	}
	return l.Cur
}

// othersThreads counts the threads of the user's processes but this one, as far as /proc shows them.
func othersThreads() (n uint64) {
	dir, err := os.Open("/proc")
	if err != nil {
		return 0
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err != nil || pid == os.Getpid() {
			continue
		}
		var st syscall.Stat_t
		if syscall.Stat("/proc/"+name+"/task", &st) == nil && int(st.Uid) == os.Getuid() && st.Nlink > 2 {
			n += uint64(st.Nlink) - 2 // a directory for each thread
		}
	}
	return n
}
