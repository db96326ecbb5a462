package fsx

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	directBlock = 8 << 20  // one block at a time of this size keeps the storage busy at a twelfth of the CPU time
	pacedBlock  = 4 << 20  // through the page cache
	pacedWindow = 64 << 20 // how much of the page cache a paced writer occupies
	align       = 4096     // of addresses, offsets and lengths for O_DIRECT, see open(2)
)

// WriteFrom implements FS. It uses O_DIRECT where source and file system allow it, else the page cache. The mode of the
// file is 0666 less the umask.
func (o OS) WriteFrom(ctx context.Context, path string, src Source) error {
	p, base, err := openParent(path)
	if err != nil {
		return err
	}
	defer p.Close()
	f, err := replace(p, base)
	if err != nil {
		return err
	}
	w, err := o.newWriter(f, src)
	if err == nil {
		err = w.copy(ctx, src)
	}
	if err == nil {
		err = w.finish(src.Len(), o)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		_ = unix.Unlinkat(int(p.Fd()), base, 0)
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// replace makes a new file in the open directory p, in place of any file of that name.
func replace(p *os.File, base string) (*os.File, error) {
	if err := unix.Unlinkat(int(p.Fd()), base, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, pathError("replace", filepath.Join(p.Name(), base), err)
	}
	return create(p, base)
}

// newWriter reserves the space of the new file f, and chooses the way of writing it.
func (o OS) newWriter(f *os.File, src Source) (*writer, error) {
	if err := allocate(f, src.Len()); err != nil {
		return nil, err
	}
	w := &writer{f: f, rate: o.Rate, data: src.Bytes()[:src.Len()], block: pacedBlock}
	if padded, ok := aligned(w.data); ok && !o.Paced && setDirect(f, true) == nil {
		w.data, w.direct, w.block = padded, true, directBlock
	}
	return w, nil
}

// allocate reserves the space of the file, so that a full storage shows before a byte is written.
func allocate(f *os.File, size int64) error {
	if size == 0 {
		return nil
	}
	err := unix.Fallocate(int(f.Fd()), 0, 0, size)
	for err == unix.EINTR {
		err = unix.Fallocate(int(f.Fd()), 0, 0, size)
	}
	if errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.ENOSYS) {
		err = room(f, size)
	}
	if err != nil {
		return fmt.Errorf("reserve %d bytes: %w", size, err)
	}
	return nil
}

// room is for file systems that reserve nothing: it compares with the free space.
func room(f *os.File, size int64) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Blocks > 0 && uint64(size) > st.Bavail*uint64(st.Bsize) {
		return unix.ENOSPC
	}
	return nil
}

// aligned returns data lengthened to whole pages, if it may be written with O_DIRECT.
func aligned(data []byte) ([]byte, bool) {
	n := (len(data) + align - 1) / align * align
	if n == 0 || n > cap(data) || uintptr(unsafe.Pointer(&data[0]))%align != 0 {
		return nil, false
	}
	return data[:n], true
}

// setDirect is not a flag of open, which on some file systems creates the file and then fails.
func setDirect(f *os.File, on bool) error {
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err != nil {
		return err
	}
	flags &^= unix.O_DIRECT
	if on {
		flags |= unix.O_DIRECT
	}
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETFL, flags)
	return err
}

// writer copies the content of one file, block by block.
type writer struct {
	f      *os.File
	rate   *Limiter
	data   []byte
	block  int
	direct bool
}

// copy writes one block after the other, as fast as the limiter lets it and the source has them ready.
func (w *writer) copy(ctx context.Context, src Source) error {
	for off := 0; off < len(w.data); off += w.block {
		b := w.data[off:min(off+w.block, len(w.data))]
		if err := w.rate.Wait(ctx, int64(len(b))); err != nil {
			return err
		}
		if err := src.Ready(ctx, min(int64(off+len(b)), src.Len())); err != nil {
			return err
		}
		if err := w.write(b, int64(off)); err != nil {
			return err
		}
	}
	return nil
}

// write writes the block b, which begins at off.
func (w *writer) write(b []byte, off int64) error {
	_, err := w.f.WriteAt(b, off)
	if w.direct && errors.Is(err, unix.EINVAL) { // the file system wants another alignment
		if err := setDirect(w.f, false); err != nil {
			return err
		}
		w.direct = false
		_, err = w.f.WriteAt(b, off)
	}
	if err != nil || w.direct {
		return err
	}
	return w.pace(off, int64(len(b)))
}

// finish cuts off the padding of the last block and makes the file durable.
func (w *writer) finish(size int64, o OS) error {
	if err := w.f.Truncate(size); err != nil {
		return err
	}
	if err := o.synced(w.f.Name(), w.f.Sync()); err != nil {
		return err
	}
	if !w.direct {
		_ = unix.Fadvise(int(w.f.Fd()), 0, 0, unix.FADV_DONTNEED)
	}
	return nil
}

// pace starts the writing of the block just copied into the page cache. It waits for the one a window behind, and drops
// it from the cache. Otherwise the cache would grow until the kernel blocks all writers.
func (w *writer) pace(off, n int64) error {
	fd := int(w.f.Fd())
	if err := syncRange(fd, off, n, unix.SYNC_FILE_RANGE_WRITE); err != nil {
		return err
	}
	behind := off - pacedWindow
	if behind < 0 {
		return nil
	}
	const wait = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	if err := syncRange(fd, behind, n, wait); err != nil {
		return err
	}
	_ = unix.Fadvise(fd, behind, n, unix.FADV_DONTNEED)
	return nil
}

// syncRange returns errors of the storage: the kernel reports each once, so a later fsync would not. It is no error if
// the file system does not support the call.
func syncRange(fd int, off, n int64, flags int) error {
	err := unix.SyncFileRange(fd, off, n, flags)
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}
