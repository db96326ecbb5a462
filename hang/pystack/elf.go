package pystack

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"syscall"

	"dlrover-run/internal/openfile"
)

// Bounds of the data that is read of an ELF file.
const (
	maxSymbols = 4 << 20
	maxNames   = 64 << 20
	maxRodata  = 64 << 20
	maxName    = 4096
)

// openMapped opens the file of a mapping: the mapping itself if the reader may, which is right even if the path has
// changed; else by its path as the process sees it, or as the reader does (chroot).
func openMapped(pid int, m mapping) (*os.File, error) {
	if f, err := openfile.OpenLinked(fmt.Sprintf("/proc/%d/map_files/%x-%x", pid, m.start, m.end)); err == nil {
		return f, nil
	}
	f, err := openfile.OpenLinked(fmt.Sprintf("/proc/%d/root%s", pid, m.path))
	if err == nil && inode(f) == m.inode {
		return f, nil
	}
	other, otherErr := openfile.OpenLinked(m.path)
	switch {
	case otherErr == nil && inode(other) == m.inode:
		if f != nil {
			f.Close()
		}
		return other, nil
	case otherErr == nil:
		other.Close()
	}
	return f, err // some file systems show one number in maps and another to stat
}

func inode(f *os.File) uint64 { return fileID(f).inode }

// imageID identifies a file, and its version before a change.
type imageID struct {
	device, inode uint64
	size          int64
	changed       syscall.Timespec
}

func fileID(f *os.File) imageID {
	var st syscall.Stat_t
	if syscall.Fstat(int(f.Fd()), &st) != nil {
		return imageID{}
	}
	return imageID{device: st.Dev, inode: st.Ino, size: st.Size, changed: st.Ctim}
}

var errELF = errors.New("no ELF file, or not all of it")

// parseELF reads the headers of a file. The result reads from r later.
func parseELF(r io.ReaderAt) (*elf.File, error) {
	f, err := elf.NewFile(r)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errELF, err)
	}
	if f.Class != elf.ELFCLASS64 || f.Data != elf.ELFDATA2LSB {
		return nil, fmt.Errorf("an ELF file of class %d and byte order %d is not supported: 64-bit (2) little-endian (1) is",
			f.Class, f.Data)
	}
	return f, nil
}

// load is a segment of a file that is mapped.
type load struct{ offset, addr, size uint64 }

func loadsOf(f *elf.File) (all []load) {
	for _, p := range f.Progs {
		if p.Type == elf.PT_LOAD {
			all = append(all, load{offset: p.Off, addr: p.Vaddr, size: p.Filesz})
		}
	}
	return all
}

// biasOf is the distance between addresses in the process and in the file.
func biasOf(loads []load, m mapping) (uint64, bool) {
	for _, l := range loads {
		if from := l.offset &^ (pageSize - 1); m.offset >= from && m.offset < l.offset+l.size {
			return m.start - m.offset - (l.addr - l.offset), true
		}
	}
	return 0, false
}

// symbolTable is a section of symbols; names is the section of their names. debug/elf would read all symbols into
// memory: 450 MB for PyTorch's.
type symbolTable struct{ symbols, names *elf.Section }

// tablesOf are the tables of a file, the one that stripping leaves first.
func tablesOf(f *elf.File) []symbolTable {
	var all []symbolTable
	for _, kind := range []elf.SectionType{elf.SHT_DYNSYM, elf.SHT_SYMTAB} {
		s := f.SectionByType(kind)
		if s == nil || int(s.Link) >= len(f.Sections) {
			continue
		}
		if names := f.Sections[s.Link]; s.ReaderAt != nil && names.ReaderAt != nil { // they are not compressed
			all = append(all, symbolTable{symbols: s, names: names})
		}
	}
	return all
}

// symbol is one of ELF64's.
type symbol struct {
	name        uint32 // where its name is
	kind        elf.SymType
	undefined   bool
	value, size uint64
}

// each calls f for every symbol, without holding more than a piece of the table.
func (t symbolTable) each(f func(symbol)) error {
	r := io.NewSectionReader(t.symbols, 0, int64(min(t.symbols.Size, maxSymbols*elf.Sym64Size)))
	piece := make([]byte, 4096*elf.Sym64Size)
	for {
		n, err := io.ReadFull(r, piece)
		for b := piece[:n]; len(b) >= elf.Sym64Size; b = b[elf.Sym64Size:] {
			f(symbol{
				name: binary.LittleEndian.Uint32(b), kind: elf.ST_TYPE(b[4]),
				undefined: binary.LittleEndian.Uint16(b[6:]) == 0,
				value:     binary.LittleEndian.Uint64(b[8:]), size: binary.LittleEndian.Uint64(b[16:]),
			})
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// nameAt reads a symbol's name.
func (t symbolTable) nameAt(off uint32) string {
	b := make([]byte, maxName)
	n, _ := t.names.ReadAt(b, int64(off))
	name, _, _ := bytes.Cut(b[:n], []byte{0})
	return string(name)
}

// lookup finds objects by their names; missing ones are absent from the result.
func lookup(f *elf.File, names ...string) map[string]uint64 {
	found := map[string]uint64{}
	for _, t := range tablesOf(f) {
		if t.names.Size > maxNames {
			continue
		}
		text, err := t.names.Data()
		if err != nil {
			continue
		}
		_ = t.each(func(s symbol) {
			if s.undefined || s.kind != elf.STT_OBJECT || uint64(s.name) >= uint64(len(text)) {
				return
			}
			for _, name := range names {
				if rest := text[s.name:]; len(rest) > len(name) && rest[len(name)] == 0 && string(rest[:len(name)]) == name {
					found[name] = s.value
				}
			}
		})
		if len(found) == len(names) {
			break
		}
	}
	return found
}

// functionsAt names the functions that addresses (of the file) lie in; unknown ones are absent.
func functionsAt(f *elf.File, addrs []uint64) map[uint64]string {
	addrs = slices.Sorted(slices.Values(addrs))
	names := map[uint64]string{}
	for _, t := range tablesOf(f) {
		best := map[uint64]symbol{}
		_ = t.each(func(s symbol) {
			if s.undefined || s.kind != elf.STT_FUNC && s.kind != elf.STT_GNU_IFUNC || s.size > math.MaxInt32 {
				return
			}
			i, _ := slices.BinarySearch(addrs, s.value)
			for ; i < len(addrs) && addrs[i] < s.value+s.size; i++ {
				if b, ok := best[addrs[i]]; !ok || s.size < b.size {
					best[addrs[i]] = s
				}
			}
		})
		for addr, s := range best {
			if names[addr] == "" {
				names[addr] = t.nameAt(s.name)
			}
		}
		if len(names) == len(addrs) {
			break
		}
	}
	return names
}

// versionText finds the version of a CPython before 3.11 among its constants, as 3.9.18; "" if it is not there.
func versionText(f *elf.File) string {
	s := f.Section(".rodata")
	if s == nil || s.Size > maxRodata {
		return ""
	}
	data, err := s.Data()
	if err != nil {
		return ""
	}
	for i := range data {
		// The linker may have made it the end of another constant, such as a path.
		if data[i] != '3' || i == 0 || data[i-1] == '.' || data[i-1] >= '0' && data[i-1] <= '9' {
			continue
		}
		text, _, ends := bytes.Cut(data[i:min(len(data), i+16)], []byte{0})
		if ends && isVersion(text) {
			return string(text)
		}
	}
	return ""
}

// isVersion reports whether a text is 3.MINOR.MICRO of a version without a better sign of it.
func isVersion(s []byte) bool {
	s, ok := bytes.CutPrefix(s, []byte("3."))
	minor, micro, dot := bytes.Cut(s, []byte("."))
	_, err := strconv.ParseUint(string(micro), 10, 8)
	return ok && dot && err == nil && (slices.Contains([]string{"7", "8", "9", "10"}, string(minor)))
}
