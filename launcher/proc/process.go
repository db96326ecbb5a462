package proc

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/launcher/proc/family"
	"dlrover-run/launcher/proc/guard"
)

// maxCPUs bounds the CPU numbers of an affinity mask; the kernel's own limit.
const maxCPUs = 8192

// Spec describes a process to start. Nil files are /dev/null.
type Spec struct {
	Path string   // program; without a slash it is searched in PATH of Env
	Args []string // whole argument vector, Args[0] included. Default: {Path}
	Env  []string // Default: the launcher's environment
	Dir  string   // working directory. Default: the launcher's

	Stdin, Stdout, Stderr *os.File

	// CPUs the process may run on. Default: the launcher's own CPUs.
	CPUs []int
	// Memory is its memory policy. Default: that of the launcher.
	Memory *MemoryPolicy
	// Helper marks a process that serves the launcher and is not a worker: it
	// stays out of the workers' cgroup and Sweep spares it and its children.
	Helper bool
	// Survives marks a helper that lives on when the launcher is killed, to end
	// its work by itself. Close kills it like any other.
	Survives bool
	// Sheltered starts the program below one more process: /proc/self/exe under the name guard.ShelterName. It takes in
	// the program's orphans, ends like the program, and kills the remaining processes before.
	Sheltered bool
}

// Exit is the end of a process.
type Exit struct {
	Code     int            // exit code, or the negated signal as torchrun reports it
	Signal   syscall.Signal // that killed the process; 0 if it exited
	CoreDump bool
	At       time.Time // when the launcher saw it
	// MaxRSS is the peak resident size in bytes. The kernel counts the moment
	// between fork and exec too, so it is never below the launcher's own peak.
	MaxRSS            int64
	UserTime, SysTime time.Duration
}

// Process is a started child.
type Process struct {
	pid      int
	os       *os.Process
	helper   bool // the Supervisor's mu guards it
	survives bool // the launcher
	last     bool // CloseButLast spares it
	adopted  bool // it may not lead a group yet
	done     chan struct{}
	exit     Exit // written before done is closed

	mu        sync.Mutex
	collected bool // from here on the kernel may give pid to another process
}

// Start starts a process in a session of its own. It is killed when the launcher dies, unless it is to survive. The
// error text names the path and the problem with it.
func (s *Supervisor) Start(spec Spec) (*Process, error) {
	if spec.Env == nil {
		spec.Env = os.Environ()
	}
	path, err := lookPath(spec.Path, spec.Env)
	if err != nil {
		return nil, err
	}
	if spec.Args == nil {
		spec.Args = []string{spec.Path}
	}
	if spec.Sheltered {
		path, spec.Args = "/proc/self/exe", append([]string{guard.ShelterName, path}, spec.Args...)
	}
	attr := &os.ProcAttr{
		Dir:   spec.Dir,
		Env:   unique(spec.Env),
		Files: s.files(spec.Stdin, spec.Stdout, spec.Stderr),
		Sys:   &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL},
	}
	if spec.Survives {
		attr.Sys.Pdeathsig = 0
	}
	p := &Process{helper: spec.Helper || spec.Survives, survives: spec.Survives}
	if !s.thread.do(func() { err = s.startOn(spec, p, path, attr) }) {
		return nil, ErrClosed
	}
	if err == ErrClosed && s.isAbandoned() {
		select {} // the process ends
	}
	if err != nil {
		return nil, explainStart(err, path, spec.Args, attr)
	}
	return p, nil
}

// startOn runs on the spawning thread; the child inherits its CPU mask and memory policy.
func (s *Supervisor) startOn(spec Spec, p *Process, path string, attr *os.ProcAttr) error {
	if len(spec.CPUs) > 0 {
		restore, err := pinThread(spec.CPUs)
		if err != nil {
			return err
		}
		defer restore()
	}
	if spec.Memory != nil {
		restore, err := spec.Memory.ofThread()
		if err != nil {
			return err
		}
		defer restore()
	}
	return s.spawn(p, path, spec.Args, attr)
}

// spawn forks, registers and watches p.
func (s *Supervisor) spawn(p *Process, path string, args []string, attr *os.ProcAttr) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	var err error
	if p.os, err = s.fork(p, path, args, attr); err != nil {
		return err
	}
	p.pid, p.done = p.os.Pid, make(chan struct{})
	s.children[p.pid] = p
	if p.survives {
		s.registerSurvivors() // a launcher that is killed between the fork and here takes p with it
	}
	s.waiters.Go(func() { s.wait(p) })
	return nil
}

// fork starts the process inside the cgroup. Whether the kernel allows that
// shows only here (seccomp without clone3, threaded cgroup, missing rights): if
// it works without, there is no cgroup from then on.
func (s *Supervisor) fork(p *Process, path string, args []string, attr *os.ProcAttr) (*os.Process, error) {
	if s.cgroup == nil || p.helper {
		return os.StartProcess(path, args, attr)
	}
	attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, int(s.cgroup.dir.Fd())
	op, err := os.StartProcess(path, args, attr)
	if err == nil && !s.cgroup.proven && stillborn(op.Pid) {
		op.Kill()
		op.Wait()
		err = fmt.Errorf("worker killed before it ran: %w", unix.EPERM)
	}
	if err == nil || !cgroupMayCause(err) {
		s.cgroup.proven = true
		return op, err
	}
	attr.Sys.UseCgroupFD = false
	op, retryErr := os.StartProcess(path, args, attr)
	if retryErr == nil {
		s.log.Debug("workers get no cgroup of their own", "reason", err)
		s.dropCgroup()
	}
	return op, retryErr
}

// stillborn reports whether a started process has died without having executed
// its program, which os.StartProcess takes for success. It happens in a cgroup if
// the launcher's own one was once killed through cgroup.kill; see cgroup.
func stillborn(pid int) bool {
	const forkedNoExec = 0x40 // PF_FORKNOEXEC, include/linux/sched.h
	st, err := family.ReadStat(pid)
	return err == nil && st.Flags&forkedNoExec != 0
}

func cgroupMayCause(err error) bool {
	return slices.ContainsFunc([]error{unix.EBADF, unix.ENOSYS, unix.EPERM, unix.EACCES, unix.EBUSY,
		unix.EINVAL, unix.EOPNOTSUPP, unix.ENODEV}, func(e error) bool { return errors.Is(err, e) })
}

// files fills the gaps with /dev/null; a closed descriptor 0, 1 or 2 would be
// taken by the first file that the program opens.
func (s *Supervisor) files(fs ...*os.File) []*os.File {
	for i, f := range fs {
		if f == nil {
			fs[i] = s.null
		}
	}
	return fs
}

// unique returns env with the last of each variable that is given twice, as
// os/exec does; libc would take the first.
func unique(env []string) []string {
	out := make([]string, 0, len(env))
	index := make(map[string]int, len(env))
	for _, kv := range env {
		name, _, _ := strings.Cut(kv, "=")
		if i, twice := index[name]; twice {
			out[i] = kv
			continue
		}
		index[name] = len(out)
		out = append(out, kv)
	}
	return out
}

// pinThread limits the calling thread to cpus until restore is called.
func pinThread(cpus []int) (restore func(), err error) {
	old, want := unix.NewCPUSet(maxCPUs), unix.NewCPUSet(maxCPUs)
	for _, c := range cpus {
		if c < 0 || c >= maxCPUs {
			return nil, fmt.Errorf("CPU %d: must be 0 to %d", c, maxCPUs-1)
		}
		want.Set(c)
	}
	if err := unix.SchedGetaffinityDynamic(0, old); err != nil {
		return nil, fmt.Errorf("read CPU affinity: %w", err)
	}
	if err := unix.SchedSetaffinityDynamic(0, want); err != nil {
		return nil, fmt.Errorf("set CPU affinity %v (does this machine or cpuset have these CPUs?): %w", cpus, err)
	}
	return func() { unix.SchedSetaffinityDynamic(0, old) }, nil
}

// wait collects p once it has ended.
func (s *Supervisor) wait(p *Process) {
	if !parkUntilExit(p.os) {
		blockUntilExit(p.pid) // no pidfd: costs one OS thread
	}
	at := time.Now()
	if p.survives {
		s.unregisterSurvivor(p)
	}
	p.mu.Lock()
	st, err := p.os.Wait() // does not block
	p.collected = true
	p.mu.Unlock()
	p.exit = exitOf(st, at)
	if err != nil {
		s.log.Error("exit status lost: other code in this process waited for the child", "pid", p.pid, "err", err)
	}
	s.mu.Lock()
	delete(s.children, p.pid)
	delete(s.swept, p.pid)
	abandoned := s.abandoned
	s.mu.Unlock()
	s.wakeReaper() // orphans may have hidden behind p in the kernel's list
	if !abandoned {
		close(p.done)
	}
}

// parkUntilExit returns true once p has ended. It waits for the pidfd in the
// runtime's poller, which takes no thread; false means that it cannot.
func parkUntilExit(p *os.Process) bool {
	fd := -1
	err := p.WithHandle(func(h uintptr) { fd, _ = unix.FcntlInt(h, unix.F_DUPFD_CLOEXEC, 3) })
	if err != nil || fd < 0 {
		return false
	}
	unix.SetNonblock(fd, true) // os.NewFile gives only such files to the poller
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	rc, err := f.SyscallConn()
	if err != nil {
		return false
	}
	return rc.Read(func(fd uintptr) bool {
		n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0
	}) == nil
}

func blockUntilExit(pid int) {
	for unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
	}
}

// exitOf reads the wait status. A lost status (nil) counts as exit code 255.
func exitOf(st *os.ProcessState, at time.Time) Exit {
	e := Exit{Code: 255, At: at}
	if st == nil {
		return e
	}
	ws := st.Sys().(syscall.WaitStatus)
	if e.Code = ws.ExitStatus(); ws.Signaled() {
		e.Signal, e.CoreDump = ws.Signal(), ws.CoreDump()
		e.Code = -int(e.Signal)
	}
	if ru, ok := st.SysUsage().(*syscall.Rusage); ok {
		e.MaxRSS = ru.Maxrss * 1024 // reported in KiB
	}
	e.UserTime, e.SysTime = st.UserTime(), st.SystemTime()
	return e
}

// PID returns the process id, which is also the id of its session and group.
func (p *Process) PID() int { return p.pid }

// Done is closed once the process has ended and Exit is valid.
func (p *Process) Done() <-chan struct{} { return p.done }

// Exit returns how the process ended. It must not be called before Done is closed.
func (p *Process) Exit() Exit { return p.exit }

// Signal sends sig to the whole process group, as torchrun 2.14 does. It returns os.ErrProcessDone once the process
// itself has ended; Sweep handles its remaining children.
func (p *Process) Signal(sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.collected {
		return os.ErrProcessDone
	}
	err := unix.Kill(-p.pid, sig)
	if p.adopted && errors.Is(err, unix.ESRCH) {
		err = unix.Kill(p.pid, sig)
	}
	if err != nil {
		return fmt.Errorf("send %s to process group %d: %w", SignalName(sig), p.pid, err)
	}
	return nil
}

// SignalOnly sends sig to the process alone. It returns os.ErrProcessDone once
// the process has ended.
func (p *Process) SignalOnly(sig syscall.Signal) error { return p.os.Signal(sig) }
