package proc

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/launcher/proc/family"
)

// ErrClosed is returned by Start after Close.
var ErrClosed = errors.New("proc: supervisor is closed")

// Config configures a Supervisor. The zero value is usable.
type Config struct {
	// RegisterSurvivors, if not nil, sets the guard's work for the death of this process: kill and remove the cgroup ("":
	// none), and leave the processes that survive it alone.
	RegisterSurvivors func(cgroup string, survivors []int)
	// Logger receives problems outside of a call: lost exit statuses, a cgroup that turned out unusable. Default:
	// slog.Default().
	Logger *slog.Logger
	// NoCgroup leaves the workers in the launcher's own cgroup.
	NoCgroup bool
}

// Supervisor starts and ends the children of this process. There must be at
// most one in a process: it changes process-wide state (child subreaper) and
// reaps every child that it does not know. Its methods may be called from any
// goroutine.
//
// Process.mu is a leaf.
type Supervisor struct {
	cfg    Config
	log    *slog.Logger
	null   *os.File
	thread *thread
	wake   chan struct{} // asks the reaper for another pass
	quit   chan struct{} // closed once all workers are gone

	// mu is held from fork to registration, and by readers of the list of children, so that none of them sees a child that
	// is not registered yet.
	mu        sync.Mutex
	closed    bool
	abandoned bool          // no more events are reported
	cgroup    *cgroup       // nil: none
	memory    *memoryCgroup // nil: unknown
	children  map[int]*Process
	swept     map[int]bool // processes that the newest sweep did not spare, and that are not collected yet

	forking      sync.RWMutex // held for reading while a fork is on its way, and by sweeps
	forkPatience time.Duration
	hasty        atomic.Int64 // sweeps that have not waited for a fork

	services sync.WaitGroup // the reaper
	waiters  sync.WaitGroup // one for each child
	close    sync.Once
	closeErr error
}

// New makes this process the supervisor of its children.
func New(cfg Config) (*Supervisor, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("proc: become child subreaper: %w", err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("proc: %w", err)
	}
	hideInheritedFiles()
	s := &Supervisor{
		cfg:          cfg,
		log:          cfg.Logger,
		null:         null,
		wake:         make(chan struct{}, 1),
		quit:         make(chan struct{}),
		children:     map[int]*Process{},
		forkPatience: forkPatience,
	}
	s.prepare()
	chld := make(chan os.Signal, 1)
	signal.Notify(chld, unix.SIGCHLD)
	s.services.Go(func() { s.reapLoop(chld) })
	return s, nil
}

// prepare starts the thread, and the slow kernel work for the first worker in it. The thread has mu until then, so that
// the functions of s wait for it.
func (s *Supervisor) prepare() {
	s.mu.Lock()
	s.thread = newThread(func() {
		defer s.mu.Unlock()
		tryPidfd()
		s.openCgroups()
		s.registerSurvivors()
	})
}

// openCgroups finds this process's place, and makes a directory for the workers.
func (s *Supervisor) openCgroups() {
	own, err := ownCgroups("", "")
	if err == nil {
		s.memory, _ = own.memory() // without one, memory is not reported
	}
	if s.cfg.NoCgroup {
		return
	}
	if err == nil {
		s.cgroup, err = newCgroup(own, randomID())
	}
	if err != nil {
		s.log.Debug("workers get no cgroup of their own", "reason", err)
	}
}

// tryPidfd has package os find out now, with a child of its own, whether the kernel has pidfds, and not with the first
// worker.
func tryPidfd() {
	if p, err := os.FindProcess(os.Getpid()); err == nil {
		_ = p.Release()
	}
}

// Memory returns the memory cgroup of this process and of its workers; nil if there is none or it cannot be found.
func (s *Supervisor) Memory() *memoryCgroup {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.memory
}

// registerSurvivors updates the guard's work. mu is held, or s is not shared yet.
func (s *Supervisor) registerSurvivors() {
	if s.cfg.RegisterSurvivors == nil {
		return
	}
	var survivors []int
	for pid, p := range s.children {
		if p.survives {
			survivors = append(survivors, pid)
		}
	}
	path := ""
	if s.cgroup != nil {
		path = s.cgroup.path
	}
	s.cfg.RegisterSurvivors(path, survivors)
}

// unregisterSurvivor is called before p is collected and its pid may be given to another.
func (s *Supervisor) unregisterSurvivor(p *Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.survives = false
	s.registerSurvivors()
}

// dropCgroup continues without one. mu is held.
func (s *Supervisor) dropCgroup() {
	s.cgroup.destroy()
	s.cgroup = nil
	s.registerSurvivors()
}

// Abandon is for a launcher that has to end at once, as if it were killed: it kills all processes that do not survive
// the launcher, and removes the cgroup. The ends of the workers are not reported, and Start does not return any more,
// so that the rest of the launcher does not take the last moments for a failure of the job.
func (s *Supervisor) Abandon() error {
	s.mu.Lock()
	s.closed, s.abandoned = true, true
	s.mu.Unlock()
	_, err := s.sweep(func(p *Process) bool { return p.survives })
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cgroup != nil {
		err = errors.Join(err, s.cgroup.destroy())
	}
	return err
}

func (s *Supervisor) isAbandoned() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.abandoned
}

// Close kills all children, helpers included, removes the
// cgroup and stops the goroutines. Its error names processes that could not be
// killed; their goroutines are abandoned. Start fails from then on.
func (s *Supervisor) Close() error {
	s.close.Do(func() { s.closeErr = s.shutdown() })
	return s.closeErr
}

func (s *Supervisor) shutdown() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	_, err := s.sweep(func(*Process) bool { return false })
	close(s.quit)
	s.services.Wait()
	s.thread.stop()
	if err == nil {
		s.waiters.Wait()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cgroup != nil {
		err = errors.Join(err, s.cgroup.destroy())
		s.cgroup = nil
	}
	s.registerSurvivors()
	return errors.Join(err, s.null.Close())
}

// hideInheritedFiles marks every open file above stderr close-on-exec. Go does so for the files that it opens itself;
// this is for files that the launcher inherited. Python's subprocess, which starts torchrun's workers, closes them as
// well.
func hideInheritedFiles() {
	if unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC) == nil {
		return
	}
	for _, fd := range family.Numbers("/proc/self/fd") { // Linux < 5.11
		if fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
}

func randomID() string {
	var b [8]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

// thread runs functions on one OS thread. The kernel sends the parent death signal when the thread that forked ends,
// not the process (prctl(2), PR_SET_PDEATHSIG), and Go ends threads as it sees fit. Hence all children are forked by
// this one.
type thread struct {
	jobs chan func()
	quit chan struct{}
	done chan struct{}
}

func newThread(first func()) *thread {
	t := &thread{jobs: make(chan func()), quit: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(t.done)
		runtime.LockOSThread() // not unlocked: the thread ends with the goroutine
		first()
		for {
			select {
			case f := <-t.jobs:
				f()
			case <-t.quit:
				return
			}
		}
	}()
	return t
}

// do runs f on the thread and reports false if the thread has been stopped.
func (t *thread) do(f func()) bool {
	done := make(chan struct{})
	select {
	case t.jobs <- func() { defer close(done); f() }:
		<-done
		return true
	case <-t.quit:
		return false
	}
}

func (t *thread) stop() {
	close(t.quit)
	<-t.done
}
