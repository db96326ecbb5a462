// Package background does work at a low priority, beside trainers. The rest of the process keeps its priority.
package background

import (
	"runtime"

	"golang.org/x/sys/unix"
)

const niceness = 10

// Run calls f with niceness 10, or that of the process if it is higher.
func Run(f func() error) error {
	done := make(chan error)
	go func() {
		Enter()
		done <- f()
	}()
	return <-done
}

// Enter gives the calling goroutine that niceness, and a thread of its own until it ends: niceness is the thread's
// (https://man7.org/linux/man-pages/man2/setpriority.2.html), and not every process may lower it again.
func Enter() {
	runtime.LockOSThread()
	left, err := unix.Getpriority(unix.PRIO_PROCESS, 0) // to 20
	if err == nil && 20-left < niceness {
		_ = unix.Setpriority(unix.PRIO_PROCESS, 0, niceness)
	}
}
