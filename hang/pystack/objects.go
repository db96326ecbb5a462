package pystack

import (
	"encoding/binary"
	"fmt"
	"strings"
)

// Bounds of the data that is read of one object.
const (
	maxText  = 4096    // characters of a name
	maxTable = 1 << 20 // bytes of a line table
)

// readText reads a str.
func readText(m memory, l textLayout, addr uint64) (string, error) {
	head, err := read(m, addr, l.other)
	if err != nil {
		return "", err
	}
	n := head.word(l.length)
	kind, ascii, ok := textKind(head.half(l.state))
	if !ok || n > maxText {
		return "", fmt.Errorf("no str at %#x", addr)
	}
	from := l.other
	if ascii {
		from = l.ascii
	}
	b, err := read(m, addr+from, n*kind)
	if err != nil {
		return "", err
	}
	return decode(b, kind), nil
}

// textKind takes a str's state apart: how many bytes a character has, and whether all are ASCII. Its flags are from bit
// 2 on, or from bit 8 or 16 in builds without GIL; the bits below them are a number less than 4, those above anything.
func textKind(state uint32) (size uint64, ascii, ok bool) {
	for _, shift := range []int{2, 8, 16} {
		flags := state >> shift
		size, compact, ascii := uint64(flags&7), flags&8 != 0, flags&16 != 0
		if compact && (size == 1 || !ascii && (size == 2 || size == 4)) {
			return size, ascii, true
		}
	}
	return 0, false, false
}

// decode makes UTF-8 of characters of 1, 2 or 4 bytes. An invalid one, such as a lone surrogate, becomes U+FFFD.
func decode(b []byte, size uint64) string {
	var s strings.Builder
	for ; uint64(len(b)) >= size; b = b[size:] {
		switch size {
		case 1:
			s.WriteRune(rune(b[0]))
		case 2:
			s.WriteRune(rune(binary.LittleEndian.Uint16(b)))
		default:
			s.WriteRune(rune(binary.LittleEndian.Uint32(b)))
		}
	}
	return s.String()
}

// readBytes reads a bytes object.
func readBytes(m memory, l bytesLayout, addr uint64) ([]byte, error) {
	n, err := pointer(m, addr+l.count)
	if err != nil {
		return nil, err
	}
	if n > maxTable {
		return nil, fmt.Errorf("no bytes at %#x", addr)
	}
	return read(m, addr+l.data, n)
}

// code is the part of a code object that a walk needs.
type code struct {
	name, file string
	first      int
	table      []byte
	start      uint64 // the address of its instructions; none: not needed
	copies     uint64 // the address of its copies' addresses; 0: there are none
}

func readCode(m memory, l *layout, addr uint64) (*code, error) {
	b, err := read(m, addr, l.code.size)
	if err != nil {
		return nil, err
	}
	c := &code{first: int(int32(b.half(l.code.first))), start: none}
	if l.code.start != none {
		c.start = addr + l.code.start
	}
	if l.code.tlbc != none {
		c.copies = b.word(l.code.tlbc)
	}
	if c.name, err = readText(m, l.text, b.word(l.code.name)); err != nil {
		return nil, err
	}
	if c.file, err = readText(m, l.text, b.word(l.code.file)); err != nil {
		return nil, err
	}
	c.table, err = readBytes(m, l.bytes, b.word(l.code.table))
	return c, err
}

// copyStart is the address of one of the copies of the instructions that free-threaded builds make, one for each
// thread. The first is the code object's own.
func (c *code) copyStart(m memory, index uint32) (uint64, error) {
	if index == 0 || c.copies == 0 {
		return c.start, nil
	}
	n, err := pointer(m, c.copies)
	if err != nil {
		return 0, err
	}
	if uint64(index) >= n {
		return 0, fmt.Errorf("no copy %d of the code", index)
	}
	return pointer(m, c.copies+8+8*uint64(index))
}
