package guard

import (
	"os"
	"os/signal"
	"runtime"
	"syscall"
)

// ShelterName is argv[0] of the process below which a command is executed.
const ShelterName = "dlrover-exec"

// Shelter executes the program args[1] with the arguments args[2:], and returns once it has ended. The process takes in
// the command's orphans, so that everything it has started stays below this one. As after Divide, the remaining
// processes are then to be killed, if there are any [Watch.Leftovers], before the process ends by [Watch.Follow].
// Signals that come meanwhile are for the command, which is in the same process group.
func Shelter(args []string) (w *Watch, err error) {
	runtime.GOMAXPROCS(1)
	w = &Watch{Spared: map[int]bool{}}
	if err := prctl(prSetChildSubreaper, 1); err != nil {
		return nil, os.NewSyscallError("become child subreaper", err)
	}
	w.Child = make(chan os.Signal, 1)
	signal.Notify(w.Child, syscall.SIGCHLD)
	w.catchDeadly()
	w.catchOthers()
	w.launcher, err = syscall.ForkExec(args[1], args[2:], &syscall.ProcAttr{
		Env: os.Environ(), Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}})
	if err != nil {
		return nil, err
	}
	for w.Reap(); !w.ended; {
		select {
		case <-w.Child:
			w.Reap()
		case <-w.Signals:
		}
	}
	return w, nil
}
