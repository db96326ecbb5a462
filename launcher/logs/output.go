package logs

import (
	"io"
	"os"
	"reflect"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// owner names a stream that writes to an output. All raw streams are one: their bytes mix as if inherited.
type owner uint32

const (
	nobody owner = iota
	raw
)

// output is where the lines of several streams meet: the console, or a filtered_*.log. Each write is whole, and an
// unfinished line of one stream is never continued by another.
type output struct {
	write    func(p []byte) (int, error)
	terminal bool
	failed   func(err error)
	dropped  atomic.Int64 // bytes

	mu   sync.Mutex
	next owner // the last one given
	open owner // whose unfinished line is last, else nobody
}

// tee adds a stream whose lines have an owner of their own.
func (o *output) tee(l lines) *lines {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.next = max(o.next, raw) + 1
	by := o.next
	l.send = func(out []byte, head int, cont bool) { o.put(by, out, head, cont) }
	return &l
}

// pass adds a raw stream.
func (o *output) pass() *lines {
	return &lines{
		fold: !o.terminal,
		send: func(out []byte, head int, cont bool) { o.put(raw, out, head, cont) },
	}
}

// put writes the text out[head:] of stream by. out[:head] is scratch space that holds a newline and the prefix of the
// stream. cont says that the text goes on with a line that is on the output already; if another stream came between,
// that line was ended there, and the rest gets a prefix of its own.
func (o *output) put(by owner, out []byte, head int, cont bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if by != raw && cont && o.open != by {
		if out[head] == '\n' {
			head++
		} else {
			head = 1
		}
	}
	if head == len(out) {
		return
	}
	if o.open != nobody && o.open != by {
		head--
		out[head] = '\n'
	}
	text := out[head:]
	o.open = nobody
	if text[len(text)-1] != '\n' {
		o.open = by
	}
	if n, err := o.write(text); err != nil {
		o.dropped.Add(int64(len(text) - n))
		o.failed(err)
	}
}

// openConsole wraps the launcher's stdout and stderr: once, when they are the same terminal, pipe or file, so that
// lines of the two do not mix.
func (l *Logs) openConsole() error {
	out, err := l.newConsole(l.cfg.Stdout)
	if err != nil {
		return err
	}
	l.console = [2]*output{out, out}
	if !sameWriter(l.cfg.Stdout, l.cfg.Stderr) {
		l.console[1], err = l.newConsole(l.cfg.Stderr)
	}
	return err
}

func (l *Logs) newConsole(w io.Writer) (*output, error) {
	o := &output{failed: l.consoleFailed}
	if f, ok := w.(*os.File); ok {
		// Go ends the program on EPIPE from descriptors 1 and 2 (os/signal, "SIGPIPE"); a copy returns the error.
		fd, err := dupFile(f)
		if err != nil {
			return nil, os.NewSyscallError("dup the console "+f.Name(), err)
		}
		_, err = unix.IoctlGetTermios(fd, unix.TCGETS)
		o.terminal = err == nil
		dup := os.NewFile(uintptr(fd), f.Name())
		l.dups = append(l.dups, dup)
		w = dup
	}
	o.write = w.Write
	return o, nil
}

// dupFile does not use f.Fd(), which would make a non-blocking descriptor blocking for everybody who shares it.
func dupFile(f *os.File) (fd int, err error) {
	c, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	cerr := c.Control(func(old uintptr) { fd, err = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 3) })
	if cerr != nil {
		return -1, cerr
	}
	return fd, err
}

func (l *Logs) consoleFailed(err error) {
	if l.consoleSaid.CompareAndSwap(false, true) {
		l.cfg.Logger.Warn("cannot write to the console: the workers go on, their output is dropped and counted", "err", err)
	}
}

func sameWriter(a, b io.Writer) bool {
	fa, oka := a.(*os.File)
	fb, okb := b.(*os.File)
	if oka && okb {
		ia, erra := fa.Stat()
		ib, errb := fb.Stat()
		return erra == nil && errb == nil && os.SameFile(ia, ib)
	}
	return reflect.TypeOf(a) == reflect.TypeOf(b) && reflect.TypeOf(a).Comparable() && a == b
}
