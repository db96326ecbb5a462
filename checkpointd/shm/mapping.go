package shm

import (
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	hugeSize = 2 << 20 // of a huge page
	piece    = 16 << 20
	// hugePatience bounds the time for a piece in huge pages. After it, small pages are faster.
	hugePatience = 30 * time.Millisecond
)

// mapFile maps the first n bytes of a file, a multiple of the page size, to read and write. The address is a multiple
// of hugeSize: only then are the file's huge pages mapped as such, at a small part of the page faults.
func mapFile(fd int, n int64) ([]byte, error) {
	size := uintptr(n+int64(os.Getpagesize())-1) &^ uintptr(os.Getpagesize()-1) // larger than ours on some processors
	room, err := unix.MmapPtr(-1, 0, nil, size+hugeSize, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("reserve addresses: %w", err)
	}
	before := -uintptr(room) % hugeSize
	start := unsafe.Add(room, before)
	if _, err := unix.MmapPtr(fd, 0, start, uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		return nil, fmt.Errorf("map it: %w", err) // the addresses stay reserved: some may be others' by now
	}
	if before > 0 {
		_ = unix.MunmapPtr(room, before) // a leftover does no harm
	}
	_ = unix.MunmapPtr(unsafe.Add(start, size), hugeSize-before)
	return unsafe.Slice((*byte)(start), n), nil
}

func unmap(mem []byte) error { return unix.MunmapPtr(unsafe.Pointer(&mem[0]), uintptr(len(mem))) }

// allocate takes the memory of a mapped file, piece by piece. A signal makes the kernel undo the present piece, and the
// Go runtime sends many signals.
func allocate(fd int, mem []byte) error {
	size, huge := int64(len(mem)), true
	for at := int64(0); at < size; {
		n := min(piece, size-at)
		huge = huge && takeHuge(fd, mem, at, n)
		switch err := unix.Fallocate(fd, 0, at, n); {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("allocate %d bytes of shared memory: %w", size, err)
		default:
			at += n
		}
	}
	return nil
}

// takeHuge takes memory in huge pages, regardless of the system's default for shared memory. False: there are none, or
// not quickly.
func takeHuge(fd int, mem []byte, at, n int64) bool {
	n -= n % hugeSize
	for o := at; o < at+n; o += hugeSize {
		if _, err := unix.Pwrite(fd, []byte{0}, o); err != nil { // the kernel collapses only ranges that have a page
			return false
		}
	}
	begin := time.Now()
	return n == 0 || unix.Madvise(mem[at:at+n], unix.MADV_COLLAPSE) == nil && time.Since(begin) < hugePatience
}
