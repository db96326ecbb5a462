package filetimer

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/tempdir"
)

// ErrServed is returned by Listen for a path that another process reads.
var ErrServed = errors.New("another process serves it")

// FIFO receives requests through a named pipe that only this user may write to.
type FIFO struct {
	path     string
	dir      string // private, holds the pipe; "" when the caller chose the path
	file     *os.File
	log      *slog.Logger
	requests chan Request
	quit     chan struct{}
	done     chan struct{}
}

// Listen makes the pipe at path, in place of one that a process left behind, or, if path is empty, in a directory of
// its own.
func Listen(path string, log *slog.Logger) (*FIFO, error) {
	f := &FIFO{path: path, log: log, requests: make(chan Request), quit: make(chan struct{}), done: make(chan struct{})}
	if err := f.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("file timer %s: %w", cmp.Or(f.path, "in "+os.TempDir()), err), f.remove())
	}
	go f.serve()
	return f, nil
}

func (f *FIFO) open() (err error) {
	if f.path == "" {
		if f.dir, err = tempdir.Make("watchdog_timer_"); err != nil {
			return err
		}
		f.path = filepath.Join(f.dir, "fifo")
	}
	err = unix.Mkfifo(f.path, 0o600)
	if errors.Is(err, fs.ErrExist) {
		if err = clearAway(f.path); err == nil {
			err = unix.Mkfifo(f.path, 0o600)
		}
	}
	if err != nil {
		return err
	}
	// Open for writing, too, the pipe does not end when no worker has it open.
	if f.file, err = os.OpenFile(f.path, os.O_RDWR|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0); err != nil {
		return err
	}
	// Clients do not wait while the pipe is full, they fail; 1 MiB is the kernel's limit for unprivileged users (pipe(7)).
	if rc, err := f.file.SyscallConn(); err == nil {
		_ = rc.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, 1<<20) })
	}
	return nil
}

// clearAway removes a pipe of ours without a reader.
func clearAway(path string) error {
	fi, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); fi.Mode().Type() != fs.ModeNamedPipe || !ok || int(st.Uid) != os.Geteuid() {
		return errors.New("there is something else than a named pipe of this user: remove it or choose another path")
	}
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == nil {
		unix.Close(fd)
		return ErrServed
	}
	if !errors.Is(err, unix.ENXIO) {
		return err
	}
	return os.Remove(path)
}

// Path is the value of the workers' TORCHELASTIC_TIMER_FILE.
func (f *FIFO) Path() string { return f.path }

// Requests are the workers' requests, in order. The channel is never closed.
func (f *FIFO) Requests() <-chan Request { return f.requests }

// Close removes the pipe and waits for the goroutine.
func (f *FIFO) Close() error {
	close(f.quit)
	err := f.remove()
	<-f.done
	return err
}

// remove leaves a file of another process at the path alone.
func (f *FIFO) remove() (err error) {
	if f.file != nil {
		ours, err1 := f.file.Stat()
		there, err2 := os.Lstat(f.path)
		if err1 == nil && err2 == nil && os.SameFile(ours, there) {
			err = os.Remove(f.path)
		}
		err = errors.Join(err, f.file.Close())
	}
	if f.dir != "" {
		err = errors.Join(err, os.RemoveAll(f.dir))
	}
	return err
}

func (f *FIFO) serve() {
	defer close(f.done)
	level := slog.LevelWarn // for the first bad request
	err := eachLine(f.file, func(line []byte) bool {
		r, err := parse(line, time.Now())
		if err != nil {
			f.log.Log(context.Background(), level,
				"a timer request that cannot be read is ignored; more of them are not reported",
				"request", string(line[:min(len(line), 200)]), "err", err)
			level = slog.LevelDebug
			return true
		}
		select {
		case f.requests <- r:
			return true
		case <-f.quit:
			return false
		}
	})
	if err != nil && !errors.Is(err, os.ErrClosed) {
		f.log.Error("the file timer ends", "path", f.path, "err", err)
	}
}

// eachLine calls do for each line of r until it returns false. Of a line that is too long it passes the beginning,
// which is longer than maxLine.
func eachLine(r io.Reader, do func(line []byte) bool) error {
	b := bufio.NewReaderSize(r, maxLine+2)
	rest := false // of a line that was too long
	for {
		line, err := b.ReadSlice('\n')
		full := errors.Is(err, bufio.ErrBufferFull)
		if err != nil && !full {
			return err
		}
		if !rest && !do(bytes.TrimSuffix(line, []byte("\n"))) {
			return nil
		}
		rest = full
	}
}
