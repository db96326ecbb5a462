package proc

import (
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"dlrover-run/launcher/proc/family"
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

// reapOrphan collects one ended child that is not ours. wait4(-1) would take the statuses of our own as well, so it
// looks first (WNOWAIT) which child has ended. One of ours at the head of the list hides the rest until its own
// goroutine has collected it and wakes the reaper again.
func (s *Supervisor) reapOrphan() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	pid := family.Ended()
	if pid == 0 || s.children[pid] != nil {
		return false
	}
	got, _ := unix.Wait4(pid, nil, unix.WNOHANG, nil)
	delete(s.swept, pid) // its number may be another's from now on
	return got == pid
}
