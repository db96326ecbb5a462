package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

var errShrunk = fmt.Errorf("%w: the file shrank, or memory for it ran out", ErrDamaged)

// Segment is an open segment, mapped into memory. Its methods may be called from several goroutines.
type Segment struct {
	dir  *Dir
	name string
	size int64
	ino  uint64

	mu     sync.Mutex
	fd     int
	mem    []byte // whole pages; nil after the last of Close, the releases and the end of a Reuse
	pins   int    // users of the shared lock
	taken  bool   // by Reuse, which has the exclusive lock
	closed bool
	mapped int64 // the first bytes that have been written through mem: they cost no page faults
	sealed sums
	peeked peeked
}

// Open opens and maps a segment. It must be a regular file of ours.
func (d *Dir) Open(name string) (*Segment, error) {
	var s *Segment
	err := d.at(name, func(dirfd int, base string) error {
		fd, err := openat(dirfd, base, unix.O_RDWR)
		if err != nil {
			return fmt.Errorf("open segment %s: %w", name, err)
		}
		if s, err = newSegment(d, name, fd); err != nil {
			_ = unix.Close(fd)
			return fmt.Errorf("open segment %s: %w", name, err)
		}
		d.watch(s)
		return nil
	})
	return s, err
}

// newSegment maps the file; fd belongs to the segment if there is no error.
func newSegment(d *Dir, name string, fd int) (*Segment, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, errors.New("it is not a regular file; remove it")
	case int(st.Uid) != os.Getuid():
		return nil, errors.New("it belongs to another user; remove it")
	case st.Size < headerSize || st.Size > math.MaxInt-pageSize:
		return nil, fmt.Errorf("%w: file of %d bytes", ErrDamaged, st.Size)
	}
	mem, err := mapFile(fd, roundUp(st.Size))
	if err != nil {
		return nil, err
	}
	return &Segment{dir: d, name: name, size: st.Size, ino: st.Ino, fd: fd, mem: mem}, nil
}

func roundUp(n int64) int64 { return (n + pageSize - 1) &^ (pageSize - 1) }

// Name returns the name that the segment was opened by, such as "seg/l0-1.seg".
func (s *Segment) Name() string { return s.name }

// Header reads the header as it is at this moment. Only that of a pinned segment stays as it is.
func (s *Segment) Header() (h Header, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mem == nil {
		return Header{}, s.failed("read header", ErrClosed)
	}
	if h, err = s.header(); err != nil {
		return Header{}, s.failed("read header", err)
	}
	return h, nil
}

func (s *Segment) failed(what string, err error) error {
	return fmt.Errorf("%s of segment %s: %w", what, s.name, err)
}

// header reads until no save has started or ended meanwhile.
func (s *Segment) header() (h Header, err error) {
	const tries = 8 // a save takes far longer than a try
	for range tries {
		var b [headerUsed]byte
		same := false
		err = guard(func() error {
			for off := 0; off < headerUsed; off += 8 {
				binary.NativeEndian.PutUint64(b[off:], atomic.LoadUint64(s.word(off)))
			}
			le := binary.LittleEndian
			same = s.load(offSeq) == le.Uint64(b[offSeq:]) && s.load(offState) == le.Uint64(b[offState:])
			return nil
		})
		if err != nil {
			return Header{}, err
		}
		if h, err = ParseHeader(b[:]); same {
			break
		}
	}
	return h, err
}

// word is a field of the header in the mapping. Other processes change these, so they are only used atomically.
func (s *Segment) word(off int) *uint64 { return (*uint64)(unsafe.Pointer(&s.mem[off])) }

func (s *Segment) load(off int) uint64 { return littleEndian(atomic.LoadUint64(s.word(off))) }

// littleEndian converts between a number and a word of the file.
func littleEndian(v uint64) uint64 {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], v)
	return binary.NativeEndian.Uint64(b[:])
}

// SetReleased lets the writer reuse this file: the disk needs no more of the saves up to seq. It never goes back.
func (s *Segment) SetReleased(seq uint64) { s.raise(offReleased, seq) }

// SetDurable records that the save seq in this file is committed. It never goes back.
func (s *Segment) SetDurable(seq uint64) { s.raise(offDurable, seq) }

func (s *Segment) raise(off int, seq uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mem == nil {
		return
	}
	_ = guard(func() error { // a file that shrank has no reader
		if s.load(off) < seq {
			atomic.StoreUint64(s.word(off), littleEndian(seq))
		}
		return nil
	})
}

// store writes a header. It becomes complete with the last word, for readers and after a crash.
func (s *Segment) store(h Header) error {
	b := h.Append(nil)
	return guard(func() error {
		for off := 0; off < headerUsed; off += 8 {
			if off != offState {
				atomic.StoreUint64(s.word(off), binary.NativeEndian.Uint64(b[off:]))
			}
		}
		atomic.StoreUint64(s.word(offState), littleEndian(uint64(h.State)))
		return nil
	})
}

// Replaced reports whether the name is another file now, or none.
func (s *Segment) Replaced() bool {
	replaced := true
	_ = s.dir.at(s.name, func(dirfd int, base string) error {
		var st unix.Stat_t
		err := unix.Fstatat(dirfd, base, &st, unix.AT_SYMLINK_NOFOLLOW)
		replaced = err != nil || st.Ino != s.ino
		return nil
	})
	return replaced
}

// Close gives the segment up. The memory stays mapped until the last Pinned is released, and a copy that is received
// into it has ended.
func (s *Segment) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return s.unmapLocked()
}

func (s *Segment) unmapLocked() error {
	if !s.closed || s.pins > 0 || s.taken || s.mem == nil {
		return nil
	}
	mem := s.mem
	s.mem = nil
	return errors.Join(unmap(mem), unix.Close(s.fd))
}
