// Package guard divides a program into two processes, a guard and the launcher,
// so that nothing of a job outlives either (Linux).
//
// The process that is executed becomes the guard. It makes itself child subreaper, starts its own program again as the
// launcher, passes signals on, waits, and ends as the launcher ended. The guard kills all processes that the launcher
// leaves behind. It recognises them by parenthood alone: environment, session, name, namespaces and dumpability of a
// descendant make no difference. When the guard itself is killed, the launcher sees the end of a pipe, kills its
// descendants and ends.
//
// The two share a memfd and a pipe; a worker never has either:
//   - the memfd's first page is the shared state: which cgroup to kill, whom to spare. The job token and the
//     arguments follow, so that /proc shows neither of the launcher, and `pkill -f` with a word of the job's does not
//     kill both at once. Once the launcher has read them, the death notice takes their place. The survivor of the two
//     sends it to the rendezvous, so that it need not wait for a dead node.
//   - in the pipe the guard writes a byte for each signal. A terminal signals only the guard's process group, systemd
//     every process of the unit: the launcher can distinguish the same signal sent to both from two.
//
// The guard runs before most packages of the program are initialised (see internal/app/guarded). Therefore this one
// imports os, os/signal, syscall and their dependencies: strings or x/sys/unix would double the time until the launcher
// is started.
package guard

import (
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

// processName is argv[0] and the command name of the launcher below a guard.
const processName = "launcher"

// maxProcs is how many CPUs the Go runtime uses; its threads follow from that.
const maxProcs = "GOMAXPROCS"

// lastSignal is SIGRTMAX.
const lastSignal = syscall.Signal(64)

// Numbers that package syscall lacks.
const (
	prSetDumpable       = 4
	prSetName           = 15
	prSetChildSubreaper = 36
	pAll                = 0 // waitid
	wNoWait             = 0x1000000
)

// Watch is the guard's side.
type Watch struct {
	// Status of the launcher, once Divide has returned.
	Status syscall.WaitStatus
	// Cgroup has the workers; "": there is none.
	Cgroup string
	// Spared are children that are no orphans of the launcher: children that the process had when it was executed, such as
	// a shell's before its exec, and the launcher's Survivors.
	Spared map[int]bool
	// Survivors outlive the launcher, which has registered them.
	Survivors map[int]bool
	// Signals for the job arrive here, Child when a child may have ended.
	Signals, Child chan os.Signal

	state    int // descriptor
	pipe     int // write end
	launcher int // pid
	ended    bool
}

// Divide returns in the launcher, with its link to the guard and its arguments in
// os.Args. It has to be called by the main thread before the program starts anything.
//
// In the guard it returns when the launcher has ended. Its remaining processes are then to be killed, if there are any
// [Watch.Leftovers], before the guard ends by [Watch.Follow].
//
// With neither, no launcher could be started below a guard, for the reason given; the program may go on without, unless
// that is [ErrNoRoom]. warn receives limits under which the launcher may die without a message of its own.
func Divide(warn func(string)) (*Link, *Watch, error) {
	if link := inherited(os.Args); link != nil {
		return link, nil, nil
	}
	Conceal()
	thrifty, err := limits(warn)
	if err != nil {
		return nil, nil, err
	}
	runtime.GOMAXPROCS(1) // two threads fewer
	w := &Watch{}
	w.noteChildren()
	if err := prctl(prSetChildSubreaper, 1); err != nil {
		return nil, nil, os.NewSyscallError("become child subreaper", err)
	}
	if err := w.start(os.Args, thrifty); err != nil {
		return nil, nil, err
	}
	w.watch()
	return nil, w, nil
}

// noteChildren finds the children that the process has already. All belong to the
// main thread, the only one that an exec leaves.
func (w *Watch) noteChildren() {
	w.Spared = map[int]bool{}
	if !anyChild() {
		return
	}
	text, _ := os.ReadFile("/proc/thread-self/children")
	for _, pid := range numbers(text) {
		w.Spared[pid] = true
	}
}

// anyChild reports whether there is a child, ended or not.
func anyChild() bool {
	_, _, errno := syscall.Syscall6(syscall.SYS_WAITID, pAll, 0, 0, syscall.WEXITED|syscall.WNOHANG|wNoWait, 0, 0)
	return errno != syscall.ECHILD
}

// start starts the launcher in a session of its own, so that a terminal signals the
// guard alone. If the guard dies, SIGCONT sees to it that even a stopped launcher
// notices.
func (w *Watch) start(args []string, thrifty bool) (err error) {
	env, token := withoutToken(os.Environ())
	if _, given := os.LookupEnv(maxProcs); thrifty && !given {
		env = append(env, maxProcs+"=1")
	} else {
		thrifty = false
	}
	if w.state, err = newState(args, token, thrifty); err != nil {
		return err
	}
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
		syscall.Close(w.state)
		return os.NewSyscallError("pipe", err)
	}
	defer syscall.Close(p[0])
	setCloseOnExec(p[0], false)
	w.pipe = p[1]
	w.catchDeadly()
	words := []string{processName, strconv.Itoa(w.state) + "," + strconv.Itoa(p[0])}
	w.launcher, err = syscall.ForkExec("/proc/self/exe", words, &syscall.ProcAttr{
		Env: env, Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGCONT}})
	if err != nil {
		signal.Reset()
		syscall.Close(w.pipe)
		syscall.Close(w.state)
		if err == syscall.EAGAIN || err == syscall.ENOMEM {
			return &noRoom{"cannot start the launcher: " + err.Error() +
				": a limit on processes (ulimit -u, or pids.max of the cgroup) or on memory is reached"}
		}
		return os.NewSyscallError("start the launcher", err)
	}
	setCloseOnExec(w.state, true)
	return nil
}

func withoutToken(env []string) (rest []string, token string) {
	for _, kv := range env {
		if hasToken(kv) {
			token = kv[len(tokenHead):]
		} else {
			rest = append(rest, kv)
		}
	}
	return rest, token
}

// catchDeadly takes the signals that would end the guard and not the launcher. A hangup
// that was ignored when the program was executed (nohup) stays ignored.
func (w *Watch) catchDeadly() {
	w.Signals = make(chan os.Signal, 256)
	signal.Notify(w.Signals, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) {
		signal.Notify(w.Signals, syscall.SIGHUP)
	}
}

// catchOthers takes all others that can be caught; the Go runtime drops them until then. SIGTSTP, SIGTTIN and SIGTTOU
// stop the guard, and the job continues. SIGURG is the runtime's own.
func (w *Watch) catchOthers() {
	for s := syscall.Signal(1); s <= lastSignal; s++ {
		switch s {
		case syscall.SIGKILL, syscall.SIGSTOP, syscall.SIGCHLD, syscall.SIGURG, syscall.SIGTSTP, syscall.SIGTTIN,
			syscall.SIGTTOU, syscall.SIGHUP:
		default:
			signal.Notify(w.Signals, s)
		}
	}
}

// settled is when the signals are caught that a starting job does not get: it takes half a millisecond, which the
// launcher needs then.
const settled = time.Second

// watch passes signals on until the launcher has ended. As PID 1 of a container it
// reaps all orphans meanwhile.
func (w *Watch) watch() {
	w.Child = make(chan os.Signal, 1)
	signal.Notify(w.Child, syscall.SIGCHLD)
	signal.Notify(w.Signals, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH)
	later := time.NewTimer(settled)
	for w.Reap(); !w.ended; {
		select {
		case <-w.Child:
			w.Reap()
		case s := <-w.Signals:
			w.pass(s.(syscall.Signal))
		case <-later.C:
			w.catchOthers()
		}
	}
	sendNotice(readNotice(w.state))
	w.Cgroup, w.Survivors = readState(w.state)
	for pid := range w.Survivors {
		w.Spared[pid] = true
	}
}

// pass notifies the launcher of a signal. A pipe that is full belongs to one that has been stopped for long.
func (w *Watch) pass(s syscall.Signal) {
	if s == syscall.SIGCONT {
		_ = syscall.Kill(w.launcher, s) // a stopped one does not read
		return
	}
	_, _ = syscall.Write(w.pipe, []byte{byte(s)})
}

// Reap collects all children that have ended.
func (w *Watch) Reap() {
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if pid <= 0 {
			return
		}
		delete(w.Spared, pid)
		delete(w.Survivors, pid)
		if pid == w.launcher {
			w.Status, w.ended = ws, true
		}
	}
}

// Leftovers reports whether the launcher may have left anything.
func (w *Watch) Leftovers() bool { return w.Cgroup != "" || anyChild() }

// Follow ends the process as the launcher ended: it dies of the same signal, or returns the
// status with which to exit. It leaves no core: it was not the guard that failed. PID 1 cannot be
// killed by a signal of its own.
func (w *Watch) Follow() (code int) {
	if !w.Status.Signaled() {
		return w.Status.ExitStatus()
	}
	s := w.Status.Signal()
	if os.Getpid() != 1 {
		_ = prctl(prSetDumpable, 0)
		var none [16]uint64 // struct sigaction with SIG_DFL, or no signal blocked
		_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(s), uintptr(unsafe.Pointer(&none)), 0, 8, 0, 0)
		const set = 2 // SIG_SETMASK
		_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, set, uintptr(unsafe.Pointer(&none)), 0, 8, 0, 0)
		_ = syscall.Kill(os.Getpid(), s)
	}
	return 128 + int(s)
}

func prctl(option int, value uintptr) error {
	if _, _, errno := syscall.RawSyscall6(syscall.SYS_PRCTL, uintptr(option), value, 0, 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

func setCloseOnExec(fd int, on bool) {
	flags := uintptr(0)
	if on {
		flags = syscall.FD_CLOEXEC
	}
	_, _, _ = syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_SETFD, flags) // of a good descriptor
}
