package pystack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// memory is that of a process. ReadAt fills the whole of b or fails.
type memory interface {
	ReadAt(b []byte, addr uint64) error
}

// procMem reads through /proc/PID/mem. Unlike process_vm_readv a read that waits for the process's memory lock can be
// killed there, so it cannot keep the reader from ending. The file stays that of the program that ran when it was
// opened: a pid that is used again is not read by mistake.
type procMem struct{ *os.File }

func openMem(pid int) (procMem, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	return procMem{f}, err
}

func (m procMem) ReadAt(b []byte, addr uint64) error {
	if addr > maxAddr {
		return errAddr
	}
	n, err := m.File.ReadAt(b, int64(addr))
	if n == len(b) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// maxAddr is beyond all addresses of programs on 64-bit machines.
const maxAddr = 1 << 56

var (
	errAddr   = errors.New("not an address")
	errBudget = errors.New("too much to read")
)

// bounded is memory for one Read: no more than left bytes are read, with any contents, and none after the end of the
// context. It is not for several goroutines.
type bounded struct {
	memory
	ctx  context.Context
	left int
}

// readBudget bounds the memory that one Read takes from a process, in bytes: hundreds of deep stacks need half of it.
const readBudget = 32 << 20

func (m *bounded) ReadAt(b []byte, addr uint64) error {
	if err := m.ctx.Err(); err != nil {
		return err
	}
	if m.left -= len(b) + 64; m.left < 0 {
		return errBudget
	}
	return m.memory.ReadAt(b, addr)
}

// paged reads whole pages, and keeps the last: neighbouring data is read at once.
type paged struct {
	memory
	page  [pageSize]byte
	start uint64 // of the page; 0: none is kept
}

const pageSize = 4096

func (m *paged) ReadAt(b []byte, addr uint64) error {
	start, off := addr&^(pageSize-1), addr%pageSize
	if start == 0 || off+uint64(len(b)) > pageSize {
		return m.memory.ReadAt(b, addr)
	}
	if m.start != start {
		m.start = 0
		if err := m.memory.ReadAt(m.page[:], start); err != nil {
			return err
		}
		m.start = start
	}
	copy(b, m.page[off:])
	return nil
}

// block is a piece of memory, such as a C struct.
type block []byte

// word is the 8 bytes at off, and 0 if they are not all there.
func (b block) word(off uint64) uint64 {
	if off > uint64(len(b)) || uint64(len(b))-off < 8 {
		return 0
	}
	return binary.LittleEndian.Uint64(b[off:])
}

// half is the 4 bytes at off, and 0 if they are not all there.
func (b block) half(off uint64) uint32 {
	if off > uint64(len(b)) || uint64(len(b))-off < 4 {
		return 0
	}
	return binary.LittleEndian.Uint32(b[off:])
}

func (b block) byte(off uint64) byte {
	if off >= uint64(len(b)) {
		return 0
	}
	return b[off]
}

// read returns n bytes.
func read(m memory, addr, n uint64) (block, error) {
	b := make(block, n)
	return b, m.ReadAt(b, addr)
}

// pointer returns the 8 bytes at addr.
func pointer(m memory, addr uint64) (uint64, error) {
	var b [8]byte
	err := m.ReadAt(b[:], addr)
	return binary.LittleEndian.Uint64(b[:]), err
}
