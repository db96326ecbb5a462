package proc

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// GuardName is argv[0] of the guard process.
const GuardName = "dlrover-guard"

// Restart policy of the guard: at once after the first death, then after a
// pause that doubles up to the maximum, and from the start again once one guard
// has lived for the maximum.
const (
	guardPauseMin = time.Second
	guardPauseMax = time.Minute
)

// guard keeps a guard process alive and tells it the sessions of the workers.
//
// The launcher holds the only write end of the guard's pipe. Its lines are
// "+<session>" and "-<session>"; end of file means that the launcher is dead.
// What is written before the guard process runs waits in the pipe, so the
// launcher may die at any moment after the fork.
type guard struct {
	s      *Supervisor
	path   string  // executable
	cgroup *cgroup // nil = none

	mu       sync.Mutex
	sessions map[int]struct{} // that may still have members
	pipe     *os.File         // nil: no guard process
}

func newGuard(s *Supervisor, path string) *guard {
	if path == "" {
		path = "/proc/self/exe" // still there when an upgrade has replaced the file
	}
	return &guard{s: s, path: path, cgroup: s.cgroup, sessions: map[int]struct{}{}}
}

// start runs on the spawning thread. It returns nil if there is no guard now;
// keep tries again.
func (g *guard) start() *Process {
	p := &Process{guard: true}
	err := g.launch(p)
	switch {
	case err == nil:
		return p
	case !errors.Is(err, ErrClosed):
		g.s.log.Warn("the guard did not start: nothing will clean up after a launcher that is killed", "err", err)
	}
	return nil
}

func (g *guard) launch(p *Process) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	// No environment: the guard must not carry a mark by which it would be
	// killed, and one thread is all it needs.
	attr := &os.ProcAttr{
		Dir:   "/",
		Env:   []string{"GOMAXPROCS=1"},
		Files: []*os.File{r, g.s.null, os.Stderr},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	}
	args := []string{GuardName, g.s.id, ""}
	if g.cgroup != nil {
		args[2] = g.cgroup.path
		attr.Files = append(attr.Files, g.cgroup.lock)
	}
	g.adopt(w)
	if err := g.s.spawn(p, g.path, args, attr); err != nil {
		g.drop()
		return explainStart(err, g.path, nil, attr)
	}
	return nil
}

// adopt makes w the pipe and writes what the guard before knew.
func (g *guard) adopt(w *os.File) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pipe = w
	var b strings.Builder
	for sid := range g.sessions {
		fmt.Fprintf(&b, "+%d\n", sid)
	}
	g.writeLocked(b.String())
}

// keep starts the guard again whenever it dies, and ends it on Close.
func (g *guard) keep(p *Process) {
	pause := time.Duration(0)
	for {
		since := time.Now()
		if p != nil && !g.watch(p) {
			return
		}
		if time.Since(since) >= guardPauseMax {
			pause = 0
		}
		select {
		case <-time.After(pause):
		case <-g.s.quit:
			return
		}
		pause = min(max(2*pause, guardPauseMin), guardPauseMax)
		g.s.thread.do(func() { p = g.start() })
	}
}

// watch returns true when the guard p has died by itself and false when Close
// has ended it. The pipe is closed after the guard is gone, or it would take
// the end of file for the launcher's death.
func (g *guard) watch(p *Process) bool {
	died := true
	select {
	case <-p.Done():
		g.s.log.Warn("the guard died, starting another", "pid", p.pid, "code", p.Exit().Code)
	case <-g.s.quit:
		died = false
		p.SignalOnly(unix.SIGKILL)
		<-p.Done()
	}
	g.drop()
	return died
}

func (g *guard) drop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pipe.Close()
	g.pipe = nil
}

func (g *guard) add(sid int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sessions[sid] = struct{}{}
	g.writeLocked(fmt.Sprintf("+%d\n", sid))
}

// forgetEnded drops the sessions of workers that are gone, after a sweep has
// found that these have no members left: the kernel may use their ids again.
func (g *guard) forgetEnded() {
	g.s.mu.Lock()
	defer g.s.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	var b strings.Builder
	for sid := range g.sessions {
		if g.s.children[sid] == nil {
			delete(g.sessions, sid)
			fmt.Fprintf(&b, "-%d\n", sid)
		}
	}
	g.writeLocked(b.String())
}

// writeLocked never blocks for long: a guard that does not read (stopped by
// someone) loses lines and is still covered by the marker and the cgroup.
func (g *guard) writeLocked(lines string) {
	if g.pipe == nil || lines == "" {
		return
	}
	g.pipe.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	if _, err := g.pipe.WriteString(lines); err != nil {
		g.s.log.Debug("the guard was not told of a session", "err", err)
	}
}
