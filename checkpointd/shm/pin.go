package shm

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"sync"

	"golang.org/x/sys/unix"
)

// Pinned is a complete save in a segment, held against its writer by a shared lock until Release.
type Pinned struct {
	Header Header
	Meta   Meta // read only: shared

	s       *Segment
	mem     []byte
	fixes   [][]fix // by file
	release sync.Once
}

// Pin holds the save that is in the segment. A segment may be pinned several times; the last release unlocks it.
// ErrBusy: the worker is writing, or about to. ErrIncomplete: there is no complete save. ErrDamaged: its description
// contradicts itself. ErrClosed: the segment is closed.
func (s *Segment) Pin() (*Pinned, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, s.failed("pin", ErrClosed)
	}
	if err := s.retainLocked(); err != nil {
		return nil, s.failed("pin", err)
	}
	p := &Pinned{s: s, mem: s.mem}
	if err := guard(p.read); err != nil {
		s.dropLocked()
		return nil, s.failed("pin", err)
	}
	return p, nil
}

// Peek reads the segment without excluding its writer: by the time it returns the content may have changed. Errors as
// for Pin.
func (s *Segment) Peek() (Header, Meta, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return Header{}, Meta{}, s.failed("look at", ErrClosed)
	}
	if h, err := s.header(); err == nil && s.peeked.is(h) {
		return h, s.peeked.meta, nil
	}
	p := &Pinned{s: s, mem: s.mem}
	err := guard(func() error {
		err := p.read()
		if errors.Is(err, ErrDamaged) && (s.load(offSeq) != p.Header.Seq || State(s.load(offState)) != Complete) {
			err = ErrBusy // its writer began meanwhile, so the content is half new
		}
		return err
	})
	if err != nil {
		return Header{}, Meta{}, s.failed("look at", err)
	}
	s.peeked = peeked{p.Header, p.Meta}
	return p.Header, p.Meta, nil
}

// peeked is what the last Peek has found: all segments are looked at whenever one of them has changed.
type peeked struct {
	header Header
	meta   Meta
}

// is reports whether h is that of the same save. It may have got further on its way to the disk.
func (p peeked) is(h Header) bool {
	h.Released, h.Durable = p.header.Released, p.header.Durable
	return h.State == Complete && h == p.header
}

// retainLocked counts a user of the shared lock, and takes it for the first one. The lock belongs to the open file
// (F_OFD_SETLK, https://man7.org/linux/man-pages/man2/fcntl_locking.2.html). So it excludes the record locks of all
// processes, and only dropLocked or our death releases it.
func (s *Segment) retainLocked() error {
	if s.taken {
		return ErrBusy // a lock of our own is no obstacle to another, but would be changed by it
	}
	if s.pins == 0 {
		if err := s.setLock(unix.F_RDLCK); err != nil {
			return err
		}
	}
	s.pins++
	return nil
}

func (s *Segment) dropLocked() {
	if s.pins--; s.pins == 0 {
		_ = s.setLock(unix.F_UNLCK) // cannot fail on a valid descriptor
		_ = s.unmapLocked()
	}
}

func (s *Segment) drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropLocked()
}

// setLock changes our lock of the whole file. ErrBusy: another lock is in the way.
func (s *Segment) setLock(kind int16) error {
	err := unix.FcntlFlock(uintptr(s.fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: kind})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return ErrBusy
	}
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	return nil
}

func (p *Pinned) read() (err error) {
	if _, err := p.s.stat(); err != nil {
		return err
	}
	if p.Header, err = p.s.header(); err != nil {
		return err
	}
	if p.Header.State != Complete {
		return ErrIncomplete
	}
	if err := p.check(); err != nil {
		return err
	}
	if p.s.load(offSeq) != p.Header.Seq || State(p.s.load(offState)) != Complete {
		return ErrBusy // its writer does not heed the lock
	}
	return nil
}

func (s *Segment) stat() (st unix.Stat_t, err error) {
	if err = unix.Fstat(s.fd, &st); err == nil && st.Size < s.size {
		err = errShrunk
	}
	return st, err
}

// check checks the parts that the header describes. It copies them first, so that they cannot change afterwards.
func (p *Pinned) check() (err error) {
	h := &p.Header
	if h.used() > p.s.size {
		return fmt.Errorf("%w: %d bytes used in a file of %d", ErrDamaged, h.used(), p.s.size)
	}
	meta := bytes.Clone(p.mem[h.MetaOff : h.MetaOff+h.MetaLen])
	if crc32.ChecksumIEEE(meta) != h.MetaCRC {
		return fmt.Errorf("%w: checksum of the description differs", ErrDamaged)
	}
	if p.Meta, err = ParseMeta(meta); err != nil {
		return err
	}
	if p.Meta.Step != h.Step {
		return fmt.Errorf("%w: step %d in the header, %d in the description", ErrDamaged, h.Step, p.Meta.Step)
	}
	table := bytes.Clone(p.mem[h.FixOff : h.FixOff+h.FixCount*fixSize])
	p.fixes, err = parseFixes(table, p.Meta.Files, h.ImageLen)
	return err
}

// File returns the bytes of a file. They start at a page, and the capacity reaches to the end of the last one. Some of
// them may change until the file is sealed.
func (p *Pinned) File(i int) []byte {
	f := p.Meta.Files[i]
	start := p.Header.ImageOff + f.Off
	return p.mem[start : start+f.Len : start+roundUp(f.Len)]
}

// Used returns the used part of the segment. Seal all files before you make checksums of it, and copy the header first:
// Released and Durable change at any time.
func (p *Pinned) Used() []byte { return p.mem[:p.Header.used():p.Header.used()] }

// Hold keeps the writer away until release is called, which may be after Release. It is called before Release.
func (p *Pinned) Hold() (release func()) {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	p.s.pins++ // the lock is ours already
	return sync.OnceFunc(p.s.drop)
}

// Release lets the writer have the segment again. The bytes must not be used any more. A Sealing that is still at work
// keeps the lock until it ends, so end its context first.
func (p *Pinned) Release() { p.release.Do(p.s.drop) }
