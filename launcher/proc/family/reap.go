package family

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Ended returns the pid of an ended child and leaves its status in place; 0 means
// none.
func Ended() int {
	var si unix.Siginfo
	for {
		switch unix.Waitid(unix.P_ALL, 0, &si, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil) {
		case nil:
			return siginfoPID(&si)
		case unix.EINTR:
		default:
			return 0
		}
	}
}

// anyChild reports whether this process has a child of any kind, ended or not.
func anyChild() bool {
	for {
		err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT|unix.WALL, nil)
		if err != unix.EINTR {
			return err != unix.ECHILD
		}
	}
}

// hasEnded reports whether the child pid is a zombie.
func hasEnded(pid int) bool {
	var si unix.Siginfo
	err := unix.Waitid(unix.P_PID, pid, &si, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	return err == nil && siginfoPID(&si) == pid
}

// siginfoPID reads si_pid, which x/sys does not export: offset 16 of siginfo_t
// on every 64-bit Linux.
func siginfoPID(si *unix.Siginfo) int {
	return int(*(*int32)(unsafe.Add(unsafe.Pointer(si), 16)))
}
