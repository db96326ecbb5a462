// Package openfile opens files that another process can replace at the same time. A FIFO would block the opener,
// /dev/zero has no end, and a link leads to a file of another owner. This package opens only regular files, never waits
// in open, and bounds all reads.
package openfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// Why a file is refused, behind its path.
var (
	ErrNotRegular = errors.New("not a regular file")
	ErrLink       = errors.New("a link, which is not followed here")
	ErrTooLong    = errors.New("too long")
)

// Open is os.OpenFile for a file in a place where others write, too. It follows no link at the end of path.
func Open(path string, flags int, mode fs.FileMode) (*os.File, error) {
	return regular(open(path, flags|unix.O_NOFOLLOW, mode))
}

// OpenLinked opens a file for reading that may be reached through links, as programs and Kubernetes' mounts are.
func OpenLinked(path string) (*os.File, error) { return regular(open(path, os.O_RDONLY, 0)) }

// Read returns the content of a file as Open opens it. One of more than limit bytes is an error.
func Read(path string, limit int64) ([]byte, error) {
	f, err := Open(path, os.O_RDONLY, 0)
	return readAll(f, err, limit)
}

// ReadLinked is Read for a file as OpenLinked opens it.
func ReadLinked(path string, limit int64) ([]byte, error) {
	f, err := OpenLinked(path)
	return readAll(f, err, limit)
}

// pipeTime is how long ReadNamed waits for all of a pipe.
var pipeTime = 10 * time.Second

// ReadNamed is ReadLinked for a file that the command line names. It also reads a pipe, such as a shell's <(command),
// if its end comes soon; /dev/null is an empty file.
func ReadNamed(path string, limit int64) ([]byte, error) {
	if path == os.DevNull {
		return nil, nil
	}
	f, err := open(path, os.O_RDONLY, 0)
	if err == nil {
		if info, err := f.Stat(); err == nil && info.Mode().Type() == fs.ModeNamedPipe {
			defer f.Close()
			return readPipe(f, limit)
		}
	}
	f, err = regular(f, err)
	return readAll(f, err, limit)
}

// readPipe waits for a writer, too: before there has been one, a read finds the end.
func readPipe(f *os.File, limit int64) (data []byte, err error) {
	end := time.Now().Add(pipeTime)
	_ = f.SetReadDeadline(end)
	if err = awaitWriter(f, end); err == nil {
		data, err = readTo(f, limit)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = pathError("read", f.Name(), fmt.Errorf("a pipe whose writer has not ended within %s", pipeTime))
	}
	return data, err
}

// awaitWriter waits until something is written to a pipe, or its writers have ended.
func awaitWriter(f *os.File, end time.Time) (err error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	n := 0
	control := conn.Control(func(fd uintptr) {
		for err = unix.EINTR; err == unix.EINTR; { // by the runtime's own signals
			left := max(0, time.Until(end)).Milliseconds()
			n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(left))
		}
	})
	if err == nil && n == 0 {
		err = os.ErrDeadlineExceeded
	}
	return errors.Join(control, err)
}

func open(path string, flags int, mode fs.FileMode) (*os.File, error) {
	f, err := os.OpenFile(path, flags|unix.O_NONBLOCK|unix.O_NOCTTY, mode)
	switch {
	case errors.Is(err, unix.ENXIO): // a socket, or a FIFO without a reader
		err = pathError("open", path, ErrNotRegular)
	case errors.Is(err, unix.ELOOP) && flags&unix.O_NOFOLLOW != 0:
		err = pathError("open", path, ErrLink)
	}
	return f, err
}

// regular closes a file that is not regular. The flag that kept the opening from waiting is not left to children.
func regular(f *os.File, err error) (*os.File, error) {
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = pathError("open", f.Name(), ErrNotRegular)
	}
	if err == nil {
		err = unix.SetNonblock(int(f.Fd()), false)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// readAll reads an opened file and closes it.
func readAll(f *os.File, err error, limit int64) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > limit {
		return nil, tooLong(f, limit)
	}
	return readTo(f, limit)
}

func readTo(f *os.File, limit int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if int64(len(data)) > limit {
		err = tooLong(f, limit)
	}
	if err != nil {
		return nil, err
	}
	return data, nil
}

func tooLong(f *os.File, limit int64) error {
	return pathError("read", f.Name(), fmt.Errorf("%w: at most %d bytes are read", ErrTooLong, limit))
}

func pathError(op, path string, err error) error { return &fs.PathError{Op: op, Path: path, Err: err} }

// WriteNamed writes a file that the user names, in place and through links. The file may be mounted there, or be in a
// directory where no file can be made.
func WriteNamed(path string, data []byte, mode fs.FileMode) error {
	f, err := regular(open(path, os.O_WRONLY|os.O_CREATE, mode))
	if err != nil {
		return err
	}
	if _, err = f.Write(data); err == nil {
		err = f.Truncate(int64(len(data)))
	}
	return errors.Join(err, f.Close())
}

// Replace puts a file with data at path, in place of any file with that name: readers see all of it, or the earlier
// file. A crash may leave a file next to it with a name that ends in ".new".
func Replace(path string, data []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*.new")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(mode), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}
