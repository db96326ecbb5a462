package logs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"dlrover-run/internal/openfile"
)

// nearLineEnd is how far over RotateSize a file may grow to end with a whole line.
const nearLineEnd = 4 << 10

// file is a log file that never fails its writer: a full disk must not stop training. Bytes that cannot be written are
// counted, and every write tries again, so that the file goes on once there is space. Not safe for concurrent use.
type file struct {
	path        string
	rotateSize  int64
	rotateCount int
	create      func(path string) (io.WriteCloser, int64, error) // opens for append; the size it has already
	failed      func(path string, err error)                     // called for every error

	w       io.WriteCloser // nil until it could be opened
	closed  bool
	size    int64
	midLine bool // the last byte written is not a newline
	moved   bool // rotated away, but the next file could not be opened yet
	lost    int64
	err     error // the first one
}

// openLog opens path for append, and its directory when there was no space for it before. Workers can put something
// else there at any time.
func openLog(path string) (*os.File, int64, error) {
	open := func() (*os.File, error) {
		return openfile.Open(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	}
	f, err := open()
	if errors.Is(err, fs.ErrNotExist) && os.MkdirAll(filepath.Dir(path), 0o755) == nil {
		f, err = open()
	}
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, info.Size(), nil
}

func createLog(path string) (io.WriteCloser, int64, error) { return openLog(path) }

func (f *file) fail(err error) {
	if f.err == nil {
		f.err = err
	}
	f.failed(f.path, err)
}

func (f *file) open() bool {
	if f.w == nil {
		if f.closed {
			return false
		}
		w, size, err := f.create(f.path)
		if err != nil {
			f.fail(err)
			return false
		}
		f.w, f.size = w, size
	}
	return true
}

func (f *file) write(p []byte) {
	for len(p) > 0 {
		n := len(p)
		if f.rotateSize > 0 && f.rotateCount > 0 {
			if n = f.fit(p); n == 0 {
				f.rotate()
				continue
			}
		}
		f.append(p[:n])
		p = p[n:]
	}
}

func (f *file) append(p []byte) {
	n := 0
	if f.open() {
		var err error
		if n, err = f.w.Write(p); err != nil {
			f.fail(err)
		}
	}
	f.lost += int64(len(p) - n)
	if n > 0 {
		f.size += int64(n)
		f.midLine = p[n-1] != '\n'
	}
}

// fit returns how many bytes of p go into the current file; 0: rotate first. Never 0 for an empty file.
func (f *file) fit(p []byte) int {
	clamp := func(n int64) int { return int(min(max(n, 0), int64(len(p)))) }
	room := f.rotateSize - f.size
	if int64(len(p)) <= room {
		return len(p)
	}
	limit, hard := clamp(room), clamp(room+nearLineEnd)
	if i := bytes.LastIndexByte(p[:limit], '\n'); i >= 0 {
		return i + 1
	}
	if f.size > 0 && !f.midLine {
		return 0
	}
	if i := bytes.IndexByte(p[limit:hard], '\n'); i >= 0 {
		return limit + i + 1
	}
	if hard == len(p) {
		return len(p) // the end of the line may come with the next write
	}
	return limit
}

// rotate moves the file to .1 and opens a new one. On failure the old one, under either name, stays in use for another
// RotateSize: no byte is lost.
func (f *file) rotate() {
	f.size = 0
	if !f.moved {
		if err := f.shift(); err != nil {
			f.fail(err)
			return
		}
		f.moved = true
	}
	w, _, err := f.create(f.path)
	if err != nil {
		f.fail(err)
		return
	}
	f.closeFile()
	f.w, f.moved, f.midLine = w, false, false
}

// shift renames path.1 to path.2 and so on, over the oldest, and path to path.1.
func (f *file) shift() error {
	name := func(i int) string { return fmt.Sprintf("%s.%d", f.path, i) }
	for i := f.rotateCount - 1; i >= 1; i-- {
		if err := os.Rename(name(i), name(i+1)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return os.Rename(f.path, name(1))
}

// closeFile also finds the errors that NFS and quotas only report at close.
func (f *file) closeFile() {
	if f.w != nil {
		if err := f.w.Close(); err != nil {
			f.fail(err)
		}
		f.w = nil
	}
}

// close ends the file for good and reports the bytes that it could not take.
func (f *file) close(log *slog.Logger) {
	f.closeFile()
	f.closed = true
	if f.err != nil {
		log.Warn("log file is incomplete", "path", f.path, "lost_bytes", f.lost, "err", f.err)
	}
}
