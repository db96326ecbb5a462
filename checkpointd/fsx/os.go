package fsx

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// readBlock is how much Checksum reads at once.
const readBlock = 1 << 20

// OS is the file system of this machine. The zero value writes as fast as the storage takes it.
type OS struct {
	Rate  *Limiter // shared by all writers; nil: no limit
	Paced bool     // never O_DIRECT: through the page cache, which is emptied behind the writer
	// Weak receives the error of a file system without fsync. Its answer is accepted, and its data may not survive a crash
	// of its own. May be nil.
	Weak func(path string, err error)
}

var _ FS = OS{}

// Resolve implements FS. dir must be absolute.
func (OS) Resolve(dir string) (string, error) {
	dir = filepath.Clean(dir)
	if !filepath.IsAbs(dir) {
		return "", fmt.Errorf("resolve %q: not an absolute path", dir)
	}
	missing := ""
	for {
		real, err := filepath.EvalSymlinks(dir)
		if err == nil {
			return filepath.Join(real, missing), nil
		}
		if !errors.Is(err, fs.ErrNotExist) || dir == "/" {
			return "", fmt.Errorf("resolve: %w", err)
		}
		missing = filepath.Join(filepath.Base(dir), missing)
		dir = filepath.Dir(dir)
	}
}

// MkdirAll implements FS. The directories get the mode that the umask leaves of 0777.
func (o OS) MkdirAll(dir string) error {
	d, err := openDir(dir, unix.O_PATH)
	if err == nil {
		return d.Close()
	}
	if !errors.Is(err, fs.ErrNotExist) || dir == "/" {
		return err
	}
	if err := o.MkdirAll(filepath.Dir(dir)); err != nil {
		return err
	}
	p, base, err := openParent(dir)
	if err != nil {
		return err
	}
	defer p.Close()
	if err := unix.Mkdirat(int(p.Fd()), base, 0o777); err != nil && !errors.Is(err, unix.EEXIST) {
		return pathError("mkdir", dir, err)
	}
	return o.SyncDir(filepath.Dir(dir))
}

// WriteFile implements FS.
func (o OS) WriteFile(path string, data []byte) error {
	p, base, err := openParent(path)
	if err != nil {
		return err
	}
	defer p.Close()
	tmp := temporaryName(base)
	f, err := create(p, tmp)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = o.synced(path, f.Sync())
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = pathError("rename", path, unix.Renameat(int(p.Fd()), tmp, int(p.Fd()), base))
	}
	if err != nil {
		_ = unix.Unlinkat(int(p.Fd()), tmp, 0)
		return fmt.Errorf("write %s: %w", path, err)
	}
	return o.SyncDir(filepath.Dir(path))
}

// Rename implements FS.
func (OS) Rename(from, to string) error {
	if filepath.Dir(from) != filepath.Dir(to) {
		return pathError("rename", from, unix.EXDEV)
	}
	p, base, err := openParent(from)
	if err != nil {
		return err
	}
	defer p.Close()
	return pathError("rename", from, unix.Renameat(int(p.Fd()), base, int(p.Fd()), filepath.Base(to)))
}

// SyncDir implements FS.
func (o OS) SyncDir(dir string) error {
	d, err := openDir(dir, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer d.Close()
	return o.synced(dir, d.Sync())
}

// synced is the error of an fsync, unless there is no fsync here.
func (o OS) synced(path string, err error) error {
	for _, none := range []error{unix.EINVAL, unix.ENOTSUP, unix.ENOSYS, unix.EBADF} {
		if errors.Is(err, none) {
			if o.Weak != nil {
				o.Weak(path, err)
			}
			return nil
		}
	}
	return err
}

// Remove implements FS.
func (OS) Remove(path string) error {
	p, base, err := openParent(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer p.Close()
	err = unix.Unlinkat(int(p.Fd()), base, 0)
	if errors.Is(err, unix.EISDIR) {
		err = unix.Unlinkat(int(p.Fd()), base, unix.AT_REMOVEDIR)
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return pathError("remove", path, err)
}

// ReadFile implements FS.
func (OS) ReadFile(path string, limit int64) ([]byte, error) {
	f, size, err := openFile(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var b []byte
	if size <= limit {
		if b, err = io.ReadAll(io.LimitReader(f, limit+1)); err != nil {
			return nil, err
		}
	}
	if size = max(size, int64(len(b))); size > limit {
		return nil, fmt.Errorf("read %s: %w: %d bytes, at most %d are expected", path, ErrTooLong, size, limit)
	}
	return b, nil
}

// Size implements FS. It opens the file, because that makes NFS ask the server instead of its cache.
func (OS) Size(path string) (int64, error) {
	f, size, err := openFile(path)
	if err != nil {
		return 0, err
	}
	return size, f.Close()
}

// List implements FS.
func (OS) List(dir string) ([]Entry, error) {
	d, err := openDir(dir, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	es := make([]Entry, 0, len(names))
	for _, name := range names {
		var st unix.Stat_t
		err := unix.Fstatat(int(d.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if errors.Is(err, unix.ENOENT) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, pathError("stat", filepath.Join(dir, name), err)
		}
		es = append(es, Entry{Name: name, Dir: st.Mode&unix.S_IFMT == unix.S_IFDIR,
			ModTime: time.Unix(st.Mtim.Unix()), Size: st.Size, Inode: st.Ino})
	}
	return es, nil
}

// lockPoll is the pause between two attempts at a lock.
const lockPoll = 10 * time.Millisecond

// Lock implements FS. A lock service that does not answer keeps a goroutine, and no caller.
func (OS) Lock(path string, patience time.Duration) (done func(), err error) {
	type result struct {
		f   *os.File
		err error
	}
	results, over := make(chan result), make(chan struct{})
	defer close(over)
	go func() {
		f, err := lock(path, time.Now().Add(patience))
		select {
		case results <- result{f, err}:
		case <-over:
			_ = f.Close() // nil has an error for it
		}
	}()
	select {
	case r := <-results:
		return func() { _ = r.f.Close() }, r.err
	case <-time.After(patience + time.Second):
		return nil, pathError("lock", path, unix.ETIMEDOUT)
	}
}

// lock locks an open file description: of two that a process has, one waits for the other, too.
func lock(path string, until time.Time) (*os.File, error) {
	p, base, err := openParent(path)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	const flags = unix.O_RDWR | unix.O_CREAT | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC
	fd, err := unix.Openat(int(p.Fd()), base, flags, 0o666)
	if err != nil {
		return nil, pathError("lock", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	for ; ; time.Sleep(lockPoll) {
		err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
		if err == nil {
			return f, nil
		}
		held := errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EINTR)
		if !held || time.Now().After(until) {
			_ = f.Close()
			return nil, pathError("lock", path, err)
		}
	}
}

// Checksum implements FS.
func (OS) Checksum(ctx context.Context, path string) (crc uint32, size int64, err error) {
	f, _, err := openFile(path)
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_SEQUENTIAL)
	buf := make([]byte, readBlock)
	for {
		if err := ctx.Err(); err != nil {
			return 0, 0, fmt.Errorf("read %s: %w", path, err)
		}
		n, err := f.Read(buf)
		crc, size = crc32.Update(crc, crc32.IEEETable, buf[:n]), size+int64(n)
		if err == io.EOF {
			return crc, size, nil
		}
		if err != nil {
			return 0, 0, err
		}
	}
}

// Temporary reports whether name is that of a file that WriteFile left behind in a crash, or is writing just now.
func Temporary(name string) bool {
	name, tmp := strings.CutSuffix(name, ".tmp")
	i := len(name) - 2*randomBytes
	return tmp && i > len("..w") && name[0] == '.' && name[i-2:i] == ".w" &&
		strings.Trim(name[i:], "0123456789abcdef") == ""
}

// randomBytes make a temporary name unique.
const randomBytes = 8

// temporaryName is different each time: several nodes may write the same file at once.
func temporaryName(base string) string {
	var b [randomBytes]byte
	rand.Read(b[:]) // never fails
	return "." + base + ".w" + hex.EncodeToString(b[:]) + ".tmp"
}

// create makes a new file in the open directory p.
func create(p *os.File, base string) (*os.File, error) {
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC
	path := filepath.Join(p.Name(), base)
	fd, err := unix.Openat(int(p.Fd()), base, flags, 0o666)
	if err != nil {
		return nil, pathError("create", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// openFile opens a regular file for reading. O_NONBLOCK avoids a hang if the path is a FIFO.
func openFile(path string) (*os.File, int64, error) {
	f, err := open(path, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = pathError("open", path, ErrNotRegular)
	}
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, st.Size(), nil
}

func openParent(path string) (*os.File, string, error) {
	d, err := openDir(filepath.Dir(path), unix.O_PATH)
	return d, filepath.Base(path), err
}

func openDir(path string, flags uint64) (*os.File, error) {
	return open(path, flags|unix.O_DIRECTORY)
}

// open opens an existing file, by a path without links.
func open(path string, flags uint64) (*os.File, error) {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		return nil, pathError("open", path, errors.New("not an absolute and clean path"))
	}
	flags |= unix.O_CLOEXEC | unix.O_NOFOLLOW
	how := unix.OpenHow{Flags: flags, Resolve: unix.RESOLVE_NO_SYMLINKS}
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &how)
	for err == unix.EINTR {
		fd, err = unix.Openat2(unix.AT_FDCWD, path, &how)
	}
	if err == unix.ENOSYS || err == unix.EPERM { // an older kernel, or a container that forbids unknown system calls
		fd, err = walk(path, int(flags))
	}
	if err != nil {
		return nil, pathError("open", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// walk is open for kernels without openat2: it opens one directory after the other.
func walk(path string, flags int) (int, error) {
	const dir = unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	names := strings.Split(path, "/")[1:]
	at, err := unix.Open("/", dir, 0)
	for _, name := range names[:len(names)-1] {
		if err != nil {
			return -1, err
		}
		var next int
		next, err = unix.Openat(at, name, dir, 0)
		unix.Close(at)
		at = next
	}
	if err != nil {
		return -1, err
	}
	defer unix.Close(at)
	last := names[len(names)-1]
	if last == "" { // the path is "/"
		last = "."
	}
	return unix.Openat(at, last, flags, 0)
}

// pathError is nil when err is.
func pathError(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: path, Err: err}
}
