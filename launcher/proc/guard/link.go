package guard

import (
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// Link is the launcher's connection to its guard.
type Link struct {
	state  int // descriptor
	pipe   *os.File
	closed atomic.Bool
	done   chan struct{} // nil: no Follow
}

// inherited finds the link in the launcher: the command line is "launcher STATE,PIPE".
func inherited(args []string) *Link {
	if len(args) != 2 || args[0] != processName {
		return nil
	}
	fds := numbers([]byte(args[1]))
	if len(fds) != 2 {
		return nil
	}
	words, err := readArguments(fds[0])
	if err != nil {
		return nil
	}
	for _, fd := range fds {
		setCloseOnExec(fd, true)
	}
	_ = syscall.Ftruncate(fds[0], stateSize)
	comm := append([]byte(processName), 0)
	// The name of the main thread is that of the process; it would read "exe".
	_ = prctl(prSetName, uintptr(unsafe.Pointer(&comm[0])))
	os.Args = words
	_ = syscall.SetNonblock(fds[1], true) // os.NewFile gives only such files to the poller
	return &Link{state: fds[0], pipe: os.NewFile(uintptr(fds[1]), "guard")}
}

// RegisterSurvivors sets the guard's work for the death of the launcher: kill and remove the cgroup ("": none), and
// leave the survivors alone.
func (l *Link) RegisterSurvivors(cgroup string, survivors []int) {
	writeState(l.state, cgroup, survivors)
}

// Follow reads from the guard in a goroutine of its own, until Close. It calls signal for each signal that the guard
// passes on, and orphaned once the guard is dead. It is to be called at most once.
func (l *Link) Follow(signal func(syscall.Signal), orphaned func()) {
	l.done = make(chan struct{})
	go func() {
		defer close(l.done)
		buf := make([]byte, 16)
		for {
			n, err := l.pipe.Read(buf)
			for _, b := range buf[:n] {
				signal(syscall.Signal(b))
			}
			if err == nil {
				continue
			}
			if !l.closed.Load() {
				orphaned()
			}
			return
		}
	}()
}

// Close ends Follow. The guard goes on waiting for the process.
func (l *Link) Close() {
	l.closed.Store(true)
	_ = l.pipe.Close()
	if l.done != nil {
		<-l.done
	}
}
