package proc

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// sweepBound is how long killed processes may take to disappear. To give back
// hundreds of GB of pinned memory can take the kernel many seconds; a process in
// an uninterruptible wait (D state) may never end.
const sweepBound = 30 * time.Second

// Stop ends the workers ps: it sends sig to their groups (and SIGCONT, so that
// stopped ones can act on it), waits until all have ended, grace has passed or
// force is closed, kills what is left and then sweeps. ps has to be all workers
// that run, because Sweep kills every one. On return each of ps is Done and
// nothing of the workers is left, except what the error names.
func (s *Supervisor) Stop(ps []*Process, sig syscall.Signal, grace time.Duration, force <-chan struct{}) error {
	// Errors of Signal are not of interest: the worker has ended, or it
	// changed its user and Sweep will say so.
	for _, p := range ps {
		p.Signal(sig)
		p.Signal(unix.SIGCONT)
	}
	awaitAll(ps, grace, force)
	for _, p := range ps {
		p.Signal(unix.SIGKILL)
	}
	if _, err := s.Sweep(); err != nil {
		return fmt.Errorf("stop workers: %w", err)
	}
	for _, p := range ps {
		<-p.Done()
	}
	return nil
}

func awaitAll(ps []*Process, grace time.Duration, force <-chan struct{}) {
	t := time.NewTimer(grace)
	defer t.Stop()
	for _, p := range ps {
		select {
		case <-p.Done():
		case <-t.C:
			return
		case <-force:
			return
		}
	}
}

// Sweep kills every descendant of this process but helpers and the guard, and
// returns once none is left: running and stopped ones, double forks, sessions
// of their own. Workers that still run are killed as well, so it is for the
// time between two generations of workers. The error names what survived.
func (s *Supervisor) Sweep() (killed int, err error) { return s.sweep(false) }

// sweep spares helpers unless all is set.
func (s *Supervisor) sweep(all bool) (int, error) {
	defer s.renewCgroup()
	k := &killer{killed: map[int]bool{}, denied: map[int]bool{}}
	deadline := time.Now().Add(sweepBound)
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 20*time.Millisecond) {
		s.reapOrphans()
		left := s.killOnce(all, k)
		if len(left) == 0 {
			s.guard.forgetEnded()
			return len(k.killed), nil
		}
		if hopeless := k.allDenied(left) && s.noCgroup(); hopeless || time.Now().After(deadline) {
			return len(k.killed), survivors(left, k)
		}
		time.Sleep(pause)
	}
}

// killOnce kills what is there and returns the direct children that were there.
// Every descendant is below one of them: when its parent dies it becomes a
// direct child itself.
func (s *Supervisor) killOnce(all bool, k *killer) (left []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	spared := func(pid int) bool {
		p := s.children[pid]
		return p != nil && (p.guard || p.helper && !all)
	}
	for _, pid := range directChildren() {
		if !spared(pid) {
			left = append(left, pid)
		}
	}
	if len(left) == 0 {
		return nil
	}
	victims := descendants(os.Getpid(), spared)
	if s.cgroup != nil {
		victims = append(victims, s.cgroup.kill()...)
	}
	k.kill(victims)
	return left
}

func (s *Supervisor) renewCgroup() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cgroup == nil || !s.cgroup.used || s.closed {
		return
	}
	if err := s.cgroup.renew(); err != nil {
		s.log.Warn("workers get no cgroup of their own from now on", "err", err)
		s.cgroup.destroy()
		s.cgroup = nil
	}
}

func (s *Supervisor) noCgroup() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cgroup == nil
}

// killer remembers what it has killed and what it may not kill.
type killer struct{ killed, denied map[int]bool }

func (k *killer) kill(pids []int) {
	for _, pid := range pids {
		switch err := unix.Kill(pid, unix.SIGKILL); {
		case errors.Is(err, unix.EPERM):
			k.denied[pid] = true
		default: // ESRCH: the cgroup was faster
			k.killed[pid] = true
		}
	}
}

// allDenied reports that only processes of other users are left, which nothing
// but cgroup.kill can end.
func (k *killer) allDenied(left []int) bool {
	for _, pid := range left {
		if !k.denied[pid] {
			return false
		}
	}
	return true
}

func survivors(pids []int, k *killer) error {
	var b strings.Builder
	for i, pid := range pids {
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(describe(pid))
		if k.denied[pid] {
			b.WriteString(", belongs to another user")
		}
	}
	return fmt.Errorf("%d processes survived SIGKILL: %s", len(pids), b.String())
}

// describe names a process and what it waits for in the kernel.
func describe(pid int) string {
	st, _ := readStat(pid)
	wchan, _ := os.ReadFile(fmt.Sprintf("/proc/%d/wchan", pid))
	text := fmt.Sprintf("pid %d (%s), state %c", pid, st.comm, max(st.state, '?'))
	if w := string(wchan); w != "" && w != "0" {
		text += ", waits in " + w
	}
	return text
}
