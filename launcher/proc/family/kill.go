package family

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Patience is how long killed processes may take to disappear. To give back
// hundreds of GB of pinned memory can take the kernel many seconds; a process in
// an uninterruptible wait (D state) may never end.
const Patience = 30 * time.Second

// Between two looks at the remaining processes.
const (
	minPause = 100 * time.Microsecond
	maxPause = 20 * time.Millisecond
)

// Sweep is one removal of descendants.
type Sweep struct {
	// Spared descendants and their own descendants are left alone.
	Spared func(pid int) bool
	// Cgroup kills the members of the workers' cgroup and returns their pids. With one (ok), processes of other users can
	// be killed, too.
	Cgroup func() (members []int, ok bool)
	// Reap collects children that have ended.
	Reap func()
	// Lock is held while children are looked at and killed; nil: none. It covers Spared
	// and Cgroup.
	Lock sync.Locker

	passes       int
	allMine      bool // all are in reach of this user
	sent, denied map[int]bool
}

// Run kills every descendant but the spared and returns once none is left, or patience has passed: running and stopped
// ones, double forks, sessions of their own. The error names the remaining processes.
func (s *Sweep) Run(patience time.Duration) (killed int, err error) {
	s.sent, s.denied = map[int]bool{}, map[int]bool{}
	deadline := time.Now().Add(patience)
	clean := 0
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		s.Reap()
		if s.childless() {
			return len(s.sent), nil
		}
		before := len(s.sent)
		left := s.pass()
		if len(s.sent) > before {
			pause = minPause // they still fork
		}
		if len(left) > 0 {
			clean = 0
		} else if clean++; clean == 2 { // the kernel's list of children may miss one while others end
			return len(s.sent), nil
		} else {
			continue
		}
		if s.hopeless(left) || time.Now().After(deadline) {
			return len(s.sent), s.survivors(left)
		}
		time.Sleep(pause)
	}
}

// childless asks the kernel, as its lists take long to read, and may miss a child.
func (s *Sweep) childless() bool {
	if s.Lock != nil {
		s.Lock.Lock()
		defer s.Lock.Unlock()
	}
	return !anyChild()
}

// pass kills the descendants and returns the children that were there. Every descendant is below one of them: when its
// parent dies it becomes a child itself. So children alone would do, layer by layer, and they are killed first, which
// stops them from forking; to look for the others takes longer.
func (s *Sweep) pass() (left []int) {
	if s.Lock != nil {
		s.Lock.Lock()
		defer s.Lock.Unlock()
	}
	for _, pid := range Children() {
		if s.Spared(pid) {
			continue
		}
		left = append(left, pid)
		if !hasEnded(pid) {
			s.kill(pid)
		}
	}
	if len(left) == 0 {
		return nil
	}
	members, ok := s.Cgroup()
	s.allMine = ok
	for _, pid := range members {
		s.kill(pid)
	}
	if s.passes++; s.passes > 1 {
		for _, pid := range below(os.Getpid(), s.Spared) {
			s.kill(pid)
		}
	}
	return left
}

func (s *Sweep) kill(pid int) {
	if errors.Is(unix.Kill(pid, unix.SIGKILL), unix.EPERM) {
		s.denied[pid] = true
		return
	}
	s.sent[pid] = true // ESRCH: the cgroup was faster
}

// hopeless: only processes of other users are left, which nothing but a cgroup can end.
func (s *Sweep) hopeless(left []int) bool {
	if s.allMine || s.passes < 3 {
		return false
	}
	for _, pid := range left {
		if !s.denied[pid] {
			return false
		}
	}
	return true
}

func (s *Sweep) survivors(pids []int) error {
	var b strings.Builder
	for i, pid := range pids {
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(Describe(pid))
		if s.denied[pid] {
			b.WriteString(", belongs to another user")
		} else {
			b.WriteString(", survived SIGKILL")
		}
	}
	return fmt.Errorf("%d processes are left: %s", len(pids), b.String())
}

// Describe names a process and the kernel function that it waits in.
func Describe(pid int) string {
	st, err := ReadStat(pid)
	if err != nil {
		return fmt.Sprintf("pid %d (hidden by /proc)", pid)
	}
	wchan, _ := os.ReadFile(fmt.Sprintf("/proc/%d/wchan", pid))
	text := fmt.Sprintf("pid %d (%s), state %c", pid, st.Comm, st.State)
	if w := string(wchan); w != "" && w != "0" {
		text += ", waits in " + w
	}
	return text
}
