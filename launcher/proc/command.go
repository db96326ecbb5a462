package proc

import "os/exec"

// Command starts a command for other code, which ends it by itself. Sweep spares it and its descendants, as a helper,
// and its exit status is left for wait, which must be called.
func (s *Supervisor) Command(cmd *exec.Cmd) (wait func() error, err error) {
	return s.command(&Process{helper: true}, cmd)
}

// LastCommand is Command for a process that CloseButLast spares.
func (s *Supervisor) LastCommand(cmd *exec.Cmd) (wait func() error, err error) {
	return s.command(&Process{helper: true, last: true}, cmd)
}

// CloseButLast kills all children but those of LastCommand. Start fails from then on; Close must still be called.
func (s *Supervisor) CloseButLast() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	_, err := s.sweep(func(p *Process) bool { return p.last })
	return err
}

func (s *Supervisor) command(p *Process, cmd *exec.Cmd) (wait func() error, err error) {
	if !s.thread.do(func() { err = s.startCommand(p, cmd) }) {
		return nil, ErrClosed
	}
	if err != nil {
		return nil, err
	}
	return func() error {
		err := cmd.Wait()
		s.forget(p)
		return err
	}, nil
}

func (s *Supervisor) startCommand(p *Process, cmd *exec.Cmd) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p.pid = cmd.Process.Pid
	s.children[p.pid] = p
	return nil
}

// forget takes a collected command out of the list, unless the kernel has given its pid to another child already.
func (s *Supervisor) forget(p *Process) {
	s.mu.Lock()
	if s.children[p.pid] == p {
		delete(s.children, p.pid)
	}
	s.mu.Unlock()
	s.wakeReaper() // orphans may have hidden behind it in the kernel's list
}
