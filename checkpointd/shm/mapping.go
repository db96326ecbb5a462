package shm

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugeSize is the size of a huge page.
const hugeSize = 2 << 20

// mapFile maps the first n bytes of a file, a multiple of the page size, to read and write. The address is a multiple of
// hugeSize: only then are the file's huge pages mapped as such, at a small part of the page faults.
func mapFile(fd int, n int64) ([]byte, error) {
	room, err := unix.MmapPtr(-1, 0, nil, uintptr(n)+hugeSize, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("reserve addresses: %w", err)
	}
	before := -uintptr(room) % hugeSize
	start := unsafe.Add(room, before)
	if _, err := unix.MmapPtr(fd, 0, start, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		_ = unix.MunmapPtr(room, uintptr(n)+hugeSize)
		return nil, fmt.Errorf("map it: %w", err)
	}
	if before > 0 {
		_ = unix.MunmapPtr(room, before) // what is left over does no harm
	}
	_ = unix.MunmapPtr(unsafe.Add(start, n), hugeSize-before)
	return unsafe.Slice((*byte)(start), n), nil
}

func unmap(mem []byte) error { return unix.MunmapPtr(unsafe.Pointer(&mem[0]), uintptr(len(mem))) }
