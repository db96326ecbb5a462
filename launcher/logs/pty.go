package logs

import (
	"os"

	"golang.org/x/sys/unix"
)

// newPTY returns a pump that reads a pseudo-terminal of the size of console, and the terminal for the worker. Its
// programs then draw bars and colours as if they had the console itself. The worker has it for writing only: there is
// no input, and a read that never returned would be worse than one that fails.
//
// It is no controlling terminal: the launcher passes on ctrl-C and hang-ups, regardless of the session's leader. A
// process that still writes after the pump has closed its side gets EIO.
func newPTY(ptmx string, tailBytes int, console *os.File) (*pump, *os.File, error) {
	master, err := unix.Open(ptmx, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: ptmx, Err: err}
	}
	slave, err := openSlave(master)
	if err != nil {
		unix.Close(master)
		return nil, nil, err
	}
	p, w, err := newPump(master, slave, tailBytes)
	if err == nil {
		p.terminal = console
		p.resize()
	}
	return p, w, err
}

// openSlave opens the worker's side by its master (Linux 4.13), because /dev/pts of a container may be of another
// instance than /dev/ptmx. The output must not be changed: the console is the terminal that makes \r\n of \n.
func openSlave(master int) (int, error) {
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return -1, os.NewSyscallError("TIOCSPTLCK", err)
	}
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER,
		unix.O_WRONLY|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return -1, os.NewSyscallError("TIOCGPTPEER", errno)
	}
	slave := int(fd)
	mode, err := unix.IoctlGetTermios(slave, unix.TCGETS)
	if err == nil {
		mode.Oflag &^= unix.OPOST
		mode.Lflag &^= unix.ECHO
		err = unix.IoctlSetTermios(slave, unix.TCSETS, mode)
	}
	if err != nil {
		unix.Close(slave)
		return -1, os.NewSyscallError("termios", err)
	}
	return slave, nil
}

// resize gives the worker's terminal the size of the console.
func (p *pump) resize() {
	var size *unix.Winsize
	control(p.terminal, func(fd int) { size, _ = unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ) })
	if size != nil {
		control(p.r, func(fd int) { _ = unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, size) })
	}
}

// control does nothing with a file that is closed.
func control(f *os.File, do func(fd int)) {
	if c, err := f.SyscallConn(); err == nil {
		_ = c.Control(func(fd uintptr) { do(int(fd)) })
	}
}

// fill reads on while there is something: a terminal gives at most 4 KiB at a time.
func (p *pump) fill(n int) int {
	for n < len(p.buf) {
		more := 0
		_ = p.conn.Control(func(fd uintptr) { more, _ = unix.Read(int(fd), p.buf[n:]) })
		if more <= 0 {
			break // also at the end, which the next Read sees
		}
		n += more
	}
	return n
}

// Resize gives the workers' terminals the size of the launcher's. The workers still need a SIGWINCH: they are in no
// session of these terminals.
func (l *Logs) Resize() {
	l.mu.Lock()
	var open []*Attempt
	for a := range l.attempts {
		open = append(open, a)
	}
	l.mu.Unlock()
	for _, a := range open {
		a.mu.Lock()
		for _, w := range a.workers {
			for _, s := range w.streams {
				if s.pump != nil && s.pump.terminal != nil {
					s.pump.resize()
				}
			}
		}
		a.mu.Unlock()
	}
}
