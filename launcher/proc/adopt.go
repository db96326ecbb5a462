package proc

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"dlrover-run/launcher/proc/family"
)

// forkPatience bounds how long the sweeps of a new Supervisor wait for forks that are on their way: milliseconds do.
const forkPatience = 200 * time.Millisecond

// Forking announces that a helper forks a child for Adopt, and returns a function to call once the child is there or
// will not be. A sweep waits for it: an unknown child looks like a process that workers have left. It waits for a
// sweep. done reports whether a sweep did not wait for long enough, and may have killed the child.
func (s *Supervisor) Forking() (done func() (swept bool)) {
	s.forking.RLock()
	before := s.hasty.Load()
	return sync.OnceValue(func() bool {
		s.forking.RUnlock()
		return s.hasty.Load() != before
	})
}

// noForks waits until no fork is on its way, and keeps others from beginning until done is called.
func (s *Supervisor) noForks() (done func()) {
	for end := time.Now().Add(s.forkPatience); !s.forking.TryLock(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			s.hasty.Add(1)
			return func() {}
		}
	}
	return s.forking.Unlock
}

// Adopt takes in a child that the kernel has handed to this process, a subreaper, because its parent has ended. It is a
// helper until Employ. A process that has been collected already, or is not a child of this process, is an error.
func (s *Supervisor) Adopt(pid int) (*Process, error) {
	s.mu.Lock() // the reaper collects none meanwhile
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	st, err := family.ReadStat(pid)
	switch {
	case err != nil:
		return nil, fmt.Errorf("adopt process %d: %w", pid, err)
	case st.Parent != os.Getpid():
		return nil, fmt.Errorf("adopt process %d: it is a child of %d, not of this process", pid, st.Parent)
	case s.children[pid] != nil:
		return nil, fmt.Errorf("adopt process %d: it is known already", pid)
	case s.swept[pid]:
		return nil, fmt.Errorf("adopt process %d: it was taken for what workers have left, and killed", pid)
	}
	p := &Process{pid: pid, helper: true, adopted: true, done: make(chan struct{})}
	if p.os, err = os.FindProcess(pid); err != nil {
		return nil, fmt.Errorf("adopt process %d: %w", pid, err)
	}
	s.children[pid] = p
	s.waiters.Go(func() { s.wait(p) })
	return p, nil
}

// Employ makes a worker of a helper: from now on Sweep kills it.
//
// It joins the workers' cgroup a moment later: the kernel takes up to 15 ms to move a process between cgroups. Children
// forked in that time are not in the cgroup yet. Sweep finds them as well, unless they belong to another user.
func (s *Supervisor) Employ(p *Process) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return ErrClosed
	case s.children[p.pid] != p:
		return os.ErrProcessDone
	}
	p.helper = false
	if s.cgroup != nil {
		procs := filepath.Join(s.cgroup.dir.Name(), "cgroup.procs") // of these workers: the next ones have another
		s.waiters.Go(func() { s.move(p, procs) })
	}
	return nil
}

// move holds mu of p: until then its pid is not given to another process.
func (s *Supervisor) move(p *Process, procs string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.collected {
		return
	}
	if err := os.WriteFile(procs, fmt.Append(nil, p.pid), 0); err != nil {
		s.log.Debug("a worker gets no cgroup of its own", "pid", p.pid, "reason", err)
	}
}
