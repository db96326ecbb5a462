package shm

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"time"
)

const (
	magic   = "DLRSEG01"
	version = 1

	offState     = 16
	offSeq       = 24
	offSaved     = 40
	offReleased  = 112
	offDurable   = 120
	offHeaderCRC = 128
	headerUsed   = 136 // bytes of the header that have a meaning, in whole words

	flagDisk = 1 << 0
	fixSize  = 32
)

// State is the state of a segment's content.
type State uint64

const (
	Unused   State = 0
	Writing  State = 1
	Complete State = 2
)

func (s State) String() string {
	switch s {
	case Unused:
		return "free"
	case Writing:
		return "writing"
	case Complete:
		return "complete"
	}
	return fmt.Sprintf("State(%d)", uint64(s))
}

// Header is the first page of a segment. Offsets and lengths are in bytes from the start of the file.
type Header struct {
	State    State
	Seq      uint64 // counts the saves into this file
	Step     int64
	Saved    time.Time
	Disk     bool // the save is to reach the disk
	MetaOff  int64
	MetaLen  int64
	MetaCRC  uint32
	FixOff   int64
	FixCount int64
	ImageOff int64
	ImageLen int64
	Released uint64 // the seq up to which the disk needs nothing more from this file
	Durable  uint64 // the seq of the save that is committed
}

// ParseHeader reads a header from the first bytes of a segment. The checksum and the bounds are checked only for a
// complete save, to which they belong. A file that was never written is Unused.
func ParseHeader(b []byte) (Header, error) {
	if len(b) < headerUsed {
		return Header{}, fmt.Errorf("%w: header of %d bytes", ErrDamaged, len(b))
	}
	if [16]byte(b) == [16]byte{} {
		return Header{State: Unused}, nil
	}
	le := binary.LittleEndian
	if string(b[:8]) != magic || le.Uint32(b[8:]) != version || le.Uint32(b[12:]) != headerSize {
		return Header{}, fmt.Errorf("%w: not a segment of version %d: it starts with %q", ErrDamaged, version, b[:16])
	}
	i64 := func(off int) int64 { return int64(le.Uint64(b[off:])) }
	h := Header{
		State: State(le.Uint64(b[offState:])), Seq: le.Uint64(b[offSeq:]), Step: i64(32),
		Saved: time.Unix(0, i64(offSaved)), Disk: le.Uint64(b[48:])&flagDisk != 0,
		MetaOff: i64(56), MetaLen: i64(64), MetaCRC: le.Uint32(b[72:]),
		FixOff: i64(80), FixCount: i64(88), ImageOff: i64(96), ImageLen: i64(104),
		Released: le.Uint64(b[offReleased:]), Durable: le.Uint64(b[offDurable:]),
	}
	if h.State > Complete {
		return Header{}, fmt.Errorf("%w: unknown state %d", ErrDamaged, h.State)
	}
	if h.State != Complete {
		return h, nil
	}
	if got := headerCRC(b); got != le.Uint32(b[offHeaderCRC:]) {
		return Header{}, fmt.Errorf("%w: checksum of the header differs", ErrDamaged)
	}
	return h, h.check()
}

// Append appends the header as it stands in a file, a page long, with its checksum.
func (h Header) Append(b []byte) []byte {
	le, start := binary.LittleEndian, len(b)
	flags := uint64(0)
	if h.Disk {
		flags |= flagDisk
	}
	b = append(b, magic...)
	b = le.AppendUint32(b, version)
	b = le.AppendUint32(b, headerSize)
	for _, v := range []uint64{
		uint64(h.State), h.Seq, uint64(h.Step), uint64(h.Saved.UnixNano()), flags, uint64(h.MetaOff), uint64(h.MetaLen),
		uint64(h.MetaCRC), uint64(h.FixOff), uint64(h.FixCount), uint64(h.ImageOff), uint64(h.ImageLen), h.Released,
		h.Durable,
	} {
		b = le.AppendUint64(b, v)
	}
	b = le.AppendUint32(b, headerCRC(b[start:]))
	return append(b, make([]byte, start+headerSize-len(b))...)
}

// SetMeta sets the place and checksum of the description.
func (h *Header) SetMeta(off int64, meta []byte) {
	h.MetaOff, h.MetaLen, h.MetaCRC = off, int64(len(meta)), crc32.ChecksumIEEE(meta)
}

// headerCRC leaves out the fields that change after the save is complete.
func headerCRC(b []byte) uint32 {
	return crc32.Update(crc32.ChecksumIEEE(b[:offState]), crc32.IEEETable, b[offSeq:offReleased])
}

// used is where the used part of the file ends.
func (h Header) used() int64 {
	return max(headerSize, h.MetaOff+h.MetaLen, h.FixOff+h.FixCount*fixSize, h.ImageOff+h.ImageLen)
}

// check checks that the three parts lie behind the header, are aligned, end before the largest int64, and do not
// overlap.
func (h Header) check() error {
	if h.MetaLen > MaxMeta {
		return fmt.Errorf("%w: description of %d bytes, the limit is %d", ErrDamaged, h.MetaLen, MaxMeta)
	}
	if h.ImageOff%pageSize != 0 || h.FixOff%8 != 0 {
		return fmt.Errorf("%w: image at %d or fix-ups at %d are not aligned", ErrDamaged, h.ImageOff, h.FixOff)
	}
	const limit = 1 << 62
	if h.FixCount < 0 || h.FixCount > limit/fixSize {
		return fmt.Errorf("%w: %d fix-ups", ErrDamaged, h.FixCount)
	}
	parts := [...][2]int64{{h.MetaOff, h.MetaLen}, {h.FixOff, h.FixCount * fixSize}, {h.ImageOff, h.ImageLen}}
	for i, p := range parts {
		if p[1] == 0 {
			if p[0] < 0 || p[0] > limit {
				return fmt.Errorf("%w: part at %d", ErrDamaged, p[0])
			}
			continue
		}
		if p[0] < headerSize || p[1] < 0 || p[0] > limit || p[1] > limit {
			return fmt.Errorf("%w: part at %d of %d bytes", ErrDamaged, p[0], p[1])
		}
		for _, q := range parts[:i] {
			if q[1] > 0 && p[0] < q[0]+q[1] && q[0] < p[0]+p[1] {
				return fmt.Errorf("%w: the parts at %d and %d overlap", ErrDamaged, q[0], p[0])
			}
		}
	}
	return nil
}
