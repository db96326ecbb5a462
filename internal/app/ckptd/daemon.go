package ckptd

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd"
	"dlrover-run/internal/console"
)

// supervise runs daemons one after the other.
func (s *Supervisor) supervise() {
	names, _ := s.dir.Names()
	needed := len(names) > 0 // memory of a dead launcher may wait for the disk
	for pause := startPause; ; pause = min(2*pause, startPauses) {
		if !needed && !s.dir.awaitCall() {
			return
		}
		s.mu.Lock()
		s.started = true
		s.mu.Unlock()
		begun := time.Now()
		if !s.runDaemon() {
			return
		}
		if time.Since(begun) > startPauses {
			pause = startPause
		}
		needed = true
		if !s.wait(pause) {
			return
		}
	}
}

// wait waits; false when the job is over.
func (s *Supervisor) wait(pause time.Duration) bool {
	select {
	case <-time.After(pause):
		return true
	case <-s.quit:
		return false
	}
}

// runDaemon runs one daemon until it dies; false when the job is over.
func (s *Supervisor) runDaemon() bool {
	p, err := s.cfg.Start(s.command())
	if errors.Is(err, ErrClosed) {
		return false
	}
	if err != nil {
		s.log.Warn("cannot start the checkpoint daemon, trying again", "err", err)
		return true
	}
	for ended := false; !ended; {
		s.connect(p)
		select {
		case <-p.Done():
			ended = true
		case <-s.lost:
		case <-s.quit:
			return false // the process is ended by its starter
		}
	}
	s.disconnect(nil)
	select {
	case <-s.lost: // the connection to this one, not to the next
	default:
	}
	s.log.Warn("the checkpoint daemon died, starting another; nothing in memory is lost", "pid", p.PID(), "code", p.Code())
	return true
}

func (s *Supervisor) command() Command {
	s.mu.Lock()
	w, n := s.world, s.net
	s.mu.Unlock()
	c := &s.cfg
	return Command{
		Args:  daemonArgs(s.dir.Path(), n.Master, c.Run, c.Replicas, n.Addr, c.WriteRate, w),
		Env:   s.environ(),
		Stdin: s.dir.socket,
	}
}

// environ is the daemon's environment; the memory limit keeps the heap small.
func (s *Supervisor) environ() []string {
	env := []string{"GOMEMLIMIT=64MiB", console.FormatVariable + "=" + string(s.cfg.LogFormat)}
	for _, name := range []string{"PATH", "TZ", "LOGLEVEL"} {
		env = append(env, name+"="+os.Getenv(name))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.net.File != "" && unix.Access(s.net.File, unix.R_OK) == nil: // it may be gone, or hidden, since the start
		env = append(env, "DLROVER_TOKEN_FILE="+s.net.File)
	case s.net.Token != "":
		env = append(env, "DLROVER_TOKEN="+s.net.Token)
	}
	return append(env, s.net.TLS.Environ()...)
}

// connect makes the launcher known to the daemon p. It takes as long as p needs to serve: the daemon of a launcher that
// was killed may still be saving.
func (s *Supervisor) connect(p Process) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	late := time.AfterFunc(OrderBudget, func() { s.log.Warn("the checkpoint daemon does not answer yet", "pid", p.PID()) })
	defer late.Stop()
	go func() {
		select {
		case <-p.Done(): // it never answers
		case <-s.quit:
		case <-ctx.Done():
		}
		cancel()
	}()
	if err := s.register(ctx); err != nil && ctx.Err() == nil {
		s.log.Warn("the checkpoint daemon cannot be reached", "err", err)
	}
}

// register makes this connection the launcher's at the daemon behind the socket, and sends the present state.
func (s *Supervisor) register(ctx context.Context) error {
	c, err := checkpointd.Dial(ctx, s.dir.socketPath())
	if err != nil {
		return err
	}
	if err := c.Lead(ctx, s.name); err != nil {
		return errors.Join(err, c.Close())
	}
	s.mu.Lock()
	w, again := s.world, s.pendingBreakpoint() // later requests wait for control
	s.started = true
	n, moved := s.net, s.moved && s.cfg.Sidecar == ""
	s.mu.Unlock()
	if moved { // while it started, or before, if it is an earlier launcher's
		err = c.Meet(ctx, n.Master)
	}
	if err == nil {
		err = c.World(ctx, w)
	}
	if err == nil && again != nil {
		err = again(ctx, c)
	}
	s.mu.Lock()
	s.control = c // after an error, too: the next request finds out whether it is broken
	s.mu.Unlock()
	return err
}

// disconnect closes the connection c, or the present one if c is nil.
func (s *Supervisor) disconnect(c *checkpointd.Control) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.control == nil || c != nil && c != s.control {
		return
	}
	_ = s.control.Close()
	s.control = nil
	select {
	case s.lost <- struct{}{}:
	default:
	}
}

// watchSidecar keeps the connection to a sidecar's daemon.
func (s *Supervisor) watchSidecar() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	late := time.AfterFunc(OrderBudget, func() {
		s.log.Warn("the sidecar of --ckpt-sidecar is not there: workers save by themselves until a checkpointd --job="+
			s.cfg.Sidecar+" serves the socket", "socket", s.dir.socketPath())
	})
	defer late.Stop()
	go func() { <-s.quit; cancel() }()
	for {
		if s.register(ctx) == nil {
			late.Stop()
			select {
			case <-s.lost:
			case <-s.quit:
				return
			}
		}
		if !s.wait(startPause) {
			return
		}
	}
}
