package pystack

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// elfFile is what is needed of a 64-bit little-endian ELF file. The package debug/elf would do, but for its size in
// every launcher: with it come DWARF, zlib and zstd.
type elfFile struct {
	r        io.ReaderAt
	loads    []load
	sections []elfSection
	names    int // the number of the section with the names of sections
}

// load is a segment of a file that is mapped.
type load struct{ offset, addr, size uint64 }

// elfSection is a part of a file.
type elfSection struct {
	r            io.ReaderAt
	name, kind   uint32 // name: where it is in the section of names
	link         uint32 // the number of the section that belongs to it
	offset, size uint64
}

// Kinds of sections and segments.
const (
	sectionSymtab = 2
	sectionNoBits = 8 // has a size, but is not in the file
	sectionDynsym = 11
	segmentLoad   = 1
)

// The sizes of ELF64's structures, and a bound of the file's own numbers of them.
const (
	elfHeaderSize  = 64
	segmentSize    = 56
	sectionSize    = 64
	maxHeaderBytes = sectionSize << 16
	maxOffset      = 1 << 62
)

var errELF = errors.New("no ELF file, or not all of it")

// parseELF reads the headers of a file, which it goes on to use.
func parseELF(r io.ReaderAt) (*elfFile, error) {
	var h [elfHeaderSize]byte
	if _, err := r.ReadAt(h[:], 0); err != nil {
		return nil, fmt.Errorf("%w: %w", errELF, err)
	}
	if string(h[:4]) != "\x7fELF" {
		return nil, errELF
	}
	if h[4] != 2 || h[5] != 1 {
		return nil, fmt.Errorf("an ELF file of class %d and byte order %d is not supported: 64-bit (2) little-endian (1) is",
			h[4], h[5])
	}
	le := binary.LittleEndian
	f := &elfFile{r: r, names: int(le.Uint16(h[62:]))}
	if err := headers(r, le.Uint64(h[32:]), le.Uint16(h[54:]), le.Uint16(h[56:]), segmentSize, f.addSegment); err != nil {
		return nil, err
	}
	return f, headers(r, le.Uint64(h[40:]), le.Uint16(h[58:]), le.Uint16(h[60:]), sectionSize, f.addSection)
}

// headers reads a table of n rows, each of which has size bytes, and at least those that are known.
func headers(r io.ReaderAt, offset uint64, size, n uint16, known int, add func([]byte)) error {
	if n == 0 {
		return nil
	}
	if int(size) < known || int(size)*int(n) > maxHeaderBytes || offset > maxOffset {
		return fmt.Errorf("%w: %d headers of %d bytes at %d", errELF, n, size, offset)
	}
	table := make([]byte, int(size)*int(n))
	if _, err := r.ReadAt(table, int64(offset)); err != nil {
		return fmt.Errorf("%w: %w", errELF, err)
	}
	for ; len(table) > 0; table = table[size:] {
		add(table[:size])
	}
	return nil
}

func (f *elfFile) addSegment(b []byte) {
	le := binary.LittleEndian
	if le.Uint32(b) == segmentLoad {
		f.loads = append(f.loads, load{offset: le.Uint64(b[8:]), addr: le.Uint64(b[16:]), size: le.Uint64(b[32:])})
	}
}

func (f *elfFile) addSection(b []byte) {
	le := binary.LittleEndian
	s := elfSection{r: f.r, name: le.Uint32(b), kind: le.Uint32(b[4:]), offset: le.Uint64(b[24:]), size: le.Uint64(b[32:]),
		link: le.Uint32(b[40:])}
	if s.kind == sectionNoBits || s.offset > maxOffset || s.size > maxOffset {
		s.size = 0
	}
	f.sections = append(f.sections, s)
}

// section finds a section by its name.
func (f *elfFile) section(name string) (elfSection, bool) {
	if f.names >= len(f.sections) {
		return elfSection{}, false
	}
	names, want := f.sections[f.names].data(), append([]byte(name), 0)
	b := make([]byte, len(want))
	for _, s := range f.sections {
		if n, _ := names.ReadAt(b, int64(s.name)); n == len(b) && bytes.Equal(b, want) {
			return s, true
		}
	}
	return elfSection{}, false
}

// data is the content of a section.
func (s elfSection) data() *io.SectionReader {
	return io.NewSectionReader(s.r, int64(s.offset), int64(s.size))
}

// read returns the content of a section, which the caller has found to be small enough. A size that lies costs no
// memory.
func (s elfSection) read() ([]byte, error) {
	if s.size == 0 {
		return nil, nil
	}
	r := s.data()
	if _, err := r.ReadAt(make([]byte, 1), int64(s.size)-1); err != nil {
		return nil, fmt.Errorf("%w: %w", errELF, err)
	}
	b := make([]byte, s.size)
	_, err := io.ReadFull(r, b)
	return b, err
}
