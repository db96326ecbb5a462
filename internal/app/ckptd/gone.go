package ckptd

import (
	"log/slog"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	closeTimeout = 10 * time.Second // for a daemon that has done its work, or got a signal
	parentPoll   = time.Second      // where the kernel does not report a parent's death
)

// parentDeath is closed when the launcher, the parent of this process, has died. There is no other certain sign: its
// end of a socket may have been inherited by others, and the one that serves the daemon may not be read.
func parentDeath(launcher int) <-chan struct{} {
	dead := make(chan struct{})
	go func() { // as long as this process
		defer close(dead)
		fd, err := unix.PidfdOpen(launcher, 0) // its number may be another's by now, hence the look after it
		for err == nil && os.Getppid() == launcher {
			_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
			if err == unix.EINTR {
				err = nil
			}
		}
		for os.Getppid() == launcher {
			time.Sleep(parentPoll)
		}
	}()
	return dead
}

// exitAfter ends this process if it has not ended by then: a call that hangs in storage must
// not keep it, and the memory of a job that is over.
func exitAfter(patience time.Duration, log *slog.Logger) {
	time.AfterFunc(patience, func() {
		log.Error("giving up what does not end, storage that does not answer perhaps", "after", patience.String())
		os.Exit(1)
	})
}
