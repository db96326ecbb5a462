package proc

import (
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/launcher/proc/family"
)

// Stop ends the workers ps: it sends sig to their groups (and SIGCONT, so that stopped ones can act on it). It waits
// until all have ended, grace has passed or force is closed, kills the rest and then sweeps. ps has to be all workers
// that run, because Sweep kills every one. On return each of ps is Done and no process of the workers is left, except
// survivors that the error names.
func (s *Supervisor) Stop(ps []*Process, sig syscall.Signal, grace time.Duration, force <-chan struct{}) error {
	// Errors of Signal are not of interest: the worker has ended, or it changed its user and Sweep will report it.
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

// Sweep kills every descendant of this process but helpers, and returns once none is left: running and stopped ones,
// double forks, sessions of their own. Workers that still run are killed as well, so it is for the time between two
// generations of workers. The error names the remaining processes.
func (s *Supervisor) Sweep() (killed int, err error) {
	return s.sweep(func(p *Process) bool { return p.helper })
}

func (s *Supervisor) sweep(spared func(p *Process) bool) (int, error) {
	defer s.noForks()()
	defer s.renewCgroup()
	s.mu.Lock()
	s.swept = map[int]bool{}
	s.mu.Unlock()
	return (&family.Sweep{
		Spared: func(pid int) bool {
			p := s.children[pid]
			s.swept[pid] = p == nil || !spared(p)
			return !s.swept[pid]
		},
		Cgroup: s.killCgroup,
		Reap:   s.reapOrphans,
		Lock:   &s.mu,
	}).Run(family.Patience)
}

func (s *Supervisor) killCgroup() (members []int, ok bool) {
	if s.cgroup == nil {
		return nil, false
	}
	return s.cgroup.kill(), true
}

func (s *Supervisor) renewCgroup() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cgroup == nil || !s.cgroup.used || s.closed {
		return
	}
	if err := s.cgroup.renew(); err != nil {
		s.log.Warn("workers get no cgroup of their own from now on", "err", err)
		s.dropCgroup()
	}
}
