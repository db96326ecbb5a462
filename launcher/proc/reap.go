package proc

import (
	"os"
	"os/signal"
	"unsafe"

	"golang.org/x/sys/unix"
)

// reapLoop collects orphans, the children of dead workers that the kernel hands
// to the subreaper, so that they do not stay zombies.
func (s *Supervisor) reapLoop(chld chan os.Signal) {
	defer signal.Stop(chld)
	for {
		s.reapOrphans()
		select {
		case <-chld:
		case <-s.wake:
		case <-s.quit:
			return
		}
	}
}

func (s *Supervisor) wakeReaper() {
	select {
	case s.wake <- struct{}{}:
	default: // a pass is already due
	}
}

func (s *Supervisor) reapOrphans() {
	for s.reapOrphan() {
	}
}

// reapOrphan collects one ended child that is not ours. wait4(-1) would take
// the statuses of our own as well, so it looks first (WNOWAIT) who has ended. One
// of ours at the head of the list hides the rest until its own goroutine has
// collected it and wakes the reaper again.
func (s *Supervisor) reapOrphan() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	pid := endedChild()
	if pid == 0 || s.children[pid] != nil {
		return false
	}
	got, _ := unix.Wait4(pid, nil, unix.WNOHANG, nil)
	return got == pid
}

// endedChild returns the pid of an ended child and leaves its status in place;
// 0 means none.
func endedChild() int {
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

// siginfoPID reads si_pid, which x/sys does not export: offset 16 of siginfo_t
// on every 64-bit Linux.
func siginfoPID(si *unix.Siginfo) int {
	return int(*(*int32)(unsafe.Add(unsafe.Pointer(si), 16)))
}
