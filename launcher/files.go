package launcher

import (
	"errors"
	"fmt"
	"syscall"
	"time"
)

// How long a start waits for file descriptors, and how often it looks: the shortage may pass.
const (
	filesPatience = 2 * time.Second
	filesPause    = 20 * time.Millisecond
)

// outOfFiles reports whether err is a lack of descriptors: the launcher's own trouble, not a worker's. EBADF is the
// kernel's word for a number at the limit, onto which a child would move a descriptor before exec.
func outOfFiles(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.EBADF)
}

// withFiles repeats f until end while there is no descriptor for it.
func withFiles(end time.Time, f func() error) error {
	for {
		err := f()
		if !outOfFiles(err) || now().After(end) {
			return err
		}
		time.Sleep(filesPause)
	}
}

// noFiles explains the way out.
func noFiles(err error) error {
	var lim syscall.Rlimit
	_ = syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim) // 0 is as good as an error here
	return fmt.Errorf("cannot start the workers: the launcher has no file descriptor left (limit %d, "+
		"ulimit -Hn) and none became free within %s: %w", lim.Cur, filesPatience, err)
}
