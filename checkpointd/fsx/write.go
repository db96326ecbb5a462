package fsx

import (
	"context"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	directBlock = 8 << 20  // one block at a time of this size keeps the storage busy at a twelfth of the CPU time
	pacedBlock  = 4 << 20  // through the page cache
	pacedWindow = 64 << 20 // how much of the page cache a paced writer occupies
	align       = 4096     // what O_DIRECT wants of addresses, offsets and lengths
)

// WriteFrom implements FS. It takes O_DIRECT where source and file system allow it, else it goes through the page
// cache. The mode of the file is what the umask leaves of 0666.
func (o OS) WriteFrom(ctx context.Context, path string, src Source) error {
	p, base, err := openParent(path)
	if err != nil {
		return err
	}
	defer p.Close()
	if err := unix.Unlinkat(int(p.Fd()), base, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return pathError("replace", path, err)
	}
	f, err := create(p, base)
	if err != nil {
		return err
	}
	err = o.fill(ctx, f, src)
	if err = errors.Join(err, f.Close()); err != nil {
		_ = unix.Unlinkat(int(p.Fd()), base, 0)
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// fill gives the new file f its content and makes it durable.
func (o OS) fill(ctx context.Context, f *os.File, src Source) error {
	if err := allocate(f, src.Len()); err != nil {
		return err
	}
	w := writer{f: f, rate: o.Rate, data: src.Bytes()[:src.Len()], block: pacedBlock}
	if padded, ok := aligned(w.data); ok && !o.Paced && setDirect(f, true) == nil {
		w.data, w.direct, w.block = padded, true, directBlock
	}
	if err := w.copy(ctx, src); err != nil {
		return err
	}
	if err := f.Truncate(src.Len()); err != nil { // the padding of the last block
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if !w.direct {
		_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	}
	return nil
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

// copy writes a block while the next one is awaited. When it returns nothing uses src any more.
func (w *writer) copy(ctx context.Context, src Source) error {
	ctx, cancel := context.WithCancel(ctx)
	ready := make(chan error)
	defer func() {
		cancel()
		for range ready { // until the goroutine has ended
		}
	}()
	go func() {
		defer close(ready)
		for off := 0; off < len(w.data); off += w.block {
			err := src.Ready(ctx, min(int64(off+w.block), src.Len()))
			select {
			case ready <- err:
			case <-ctx.Done():
				return
			}
		}
	}()
	for off := 0; off < len(w.data); off += w.block {
		if err := w.next(ctx, ready, off); err != nil {
			return err
		}
	}
	return nil
}

// next writes the block at off once it is ready and the limiter lets it.
func (w *writer) next(ctx context.Context, ready <-chan error, off int) error {
	var err error
	select {
	case err = <-ready:
	case <-ctx.Done():
	}
	if err = errors.Join(err, ctx.Err()); err != nil {
		return err
	}
	b := w.data[off:min(off+w.block, len(w.data))]
	if err := w.rate.Wait(ctx, int64(len(b))); err != nil {
		return err
	}
	return w.write(b, int64(off))
}

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

// pace starts the writing of the block just copied into the page cache, and waits for the one a window behind, which it
// drops from the cache: or the cache would grow until the kernel stops the writer, and everybody else.
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

// syncRange reports what went wrong on the storage: the kernel tells it once, so a later fsync would not. That the file
// system does not know the call is no error.
func syncRange(fd int, off, n int64, flags int) error {
	err := unix.SyncFileRange(fd, off, n, flags)
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}
