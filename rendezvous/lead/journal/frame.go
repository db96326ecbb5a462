package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"dlrover-run/rendezvous/lead"
)

// A segment is a row of frames. Each has a multiple of 8 bytes, so that no sector of a disk ends within a header:
//
//	length of the payload  uint32
//	CRC-32 (IEEE)          uint32, of the rest of the frame without its padding, and of the length
//	number                 uint64, one more than the frame before
//	payload                and up to 7 zeros
//
// The number shows frames that are lost or out of order, as a CRC over all frames before would. Unlike that, it also
// finds the frames behind a damaged one.
const headerSize = 16

const (
	maxFrame   = 64 << 20 // bytes of a payload
	maxMissing = 1 << 32  // frames in a row
)

// appendFrame adds the frame of a payload to b.
func appendFrame(b []byte, number uint64, payload []byte) []byte {
	start := len(b)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	b = append(b, 0, 0, 0, 0)
	b = binary.LittleEndian.AppendUint64(b, number)
	b = append(b, payload...)
	binary.LittleEndian.PutUint32(b[start+4:], checksum(b[start:]))
	for len(b)%8 != 0 {
		b = append(b, 0)
	}
	return b
}

// checksum is that of a frame without its padding.
func checksum(frame []byte) uint32 {
	return crc32.Update(crc32.ChecksumIEEE(frame[:4]), crc32.IEEETable, frame[8:])
}

// frameAt reads the frame at the beginning of b, whose size is that with its padding.
func frameAt(b []byte) (number uint64, payload []byte, size int, ok bool) {
	if len(b) < headerSize {
		return 0, nil, 0, false
	}
	length := uint64(binary.LittleEndian.Uint32(b))
	if size = int(headerSize + (length+7)&^7); length > maxFrame || size > len(b) {
		return 0, nil, 0, false
	}
	end := headerSize + int(length)
	if binary.LittleEndian.Uint32(b[4:]) != checksum(b[:end]) {
		return 0, nil, 0, false
	}
	return binary.LittleEndian.Uint64(b[8:]), b[headerSize:end], size, true
}

// scan is the result of reading a segment.
type scan struct {
	payloads [][]byte
	next     uint64 // number of the next frame
	end      int    // of the last frame
	damage   string // in one line: which frames are missing before the last; "": none is
}

// read finds the frames of a segment. Bytes behind the last frame are a write that a crash has cut short.
func read(b []byte) (s scan) {
	for at := nextFrame(b, 0, 0); at < len(b); at = nextFrame(b, s.end, s.next) {
		number, payload, size, _ := frameAt(b[at:])
		if number > s.next && s.damage == "" {
			s.damage = fmt.Sprintf("frames %d to %d cannot be read: they were in bytes %d to %d", s.next, number-1, s.end, at)
		}
		s.payloads, s.next, s.end = append(s.payloads, payload), number+1, at+size
	}
	return s
}

// nextFrame is the place of the first frame, from byte at on, with this number or a later one; len(b): there is none.
func nextFrame(b []byte, at int, number uint64) int {
	for ; at+headerSize <= len(b); at += 8 {
		if n := binary.LittleEndian.Uint64(b[at+8:]); n < number || n-number > maxMissing {
			continue // cheaper than the checksum
		}
		if _, _, _, ok := frameAt(b[at:]); ok {
			return at
		}
	}
	return len(b)
}

// batch is the payload of a frame: records of one term.
type batch struct {
	term    lead.Term
	records []lead.Record
}

// encode appends the term and, for each record, the lengths of key and value before them. Length 0 of a value removes
// the key, n + 1 is a value of n bytes.
func (b batch) encode(out []byte) []byte {
	out = binary.AppendUvarint(out, uint64(b.term))
	for _, r := range b.records {
		out = append(binary.AppendUvarint(out, uint64(len(r.Key))), r.Key...)
		if r.Value == nil {
			out = binary.AppendUvarint(out, 0)
			continue
		}
		out = append(binary.AppendUvarint(out, uint64(len(r.Value))+1), r.Value...)
	}
	return out
}

var errPayload = errors.New("the records of a frame cannot be read")

// decode reads what encode has written.
func decode(payload []byte) (b batch, err error) {
	r := reader{payload}
	term, ok := r.number()
	b.term = lead.Term(term)
	for ok && len(r.rest) > 0 {
		var key, value []byte
		if key, ok = r.bytes(0); !ok {
			break
		}
		value, ok = r.bytes(1)
		b.records = append(b.records, lead.Record{Key: string(key), Value: value})
	}
	if !ok {
		return batch{}, errPayload
	}
	return b, nil
}

type reader struct{ rest []byte }

func (r *reader) number() (n uint64, ok bool) {
	n, size := binary.Uvarint(r.rest)
	if size <= 0 {
		return 0, false
	}
	r.rest = r.rest[size:]
	return n, true
}

// bytes reads a length, which is larger by more, and as many bytes; nil if the length is below more.
func (r *reader) bytes(more uint64) (b []byte, ok bool) {
	n, ok := r.number()
	if !ok || n < more {
		return nil, ok
	}
	if n -= more; n > uint64(len(r.rest)) {
		return nil, false
	}
	b, r.rest = r.rest[:n:n], r.rest[n:]
	return b, true
}
