package replica

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io"

	"dlrover-run/checkpointd/shm"
)

const (
	maxMessage = 64 << 10
	// chunkSize is small enough for the CPU cache: a chunk is summed right before or after it moves.
	chunkSize  = 1 << 20
	headerSize = 4096 // of a segment; it travels in the offer
	// maxSize is more than any memory, and far from where sums overflow.
	maxSize = 1 << 46
)

// message is every request and every reply: length u32, CRC-32 u32, JSON.
type message struct {
	Op    string `json:"op,omitempty"`    // push, fetch, join, go; empty in a reply
	Size  int64  `json:"size,omitempty"`  // offer: bytes of the segment
	Meta  int    `json:"meta,omitempty"`  // offer: bytes of its description
	Rank  int    `json:"rank,omitempty"`  // fetch
	Save  string `json:"save,omitempty"`  // fetch
	ID    string `json:"id,omitempty"`    // of the transfer that further connections join
	OK    bool   `json:"ok,omitempty"`    // reply
	Busy  bool   `json:"busy,omitempty"`  // not a reply yet, only a sign of life
	Code  string `json:"code,omitempty"`  // of the error
	Error string `json:"error,omitempty"` // for people
}

func (m message) bytes() ([]byte, error) {
	b, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	if len(b) > maxMessage {
		return nil, fmt.Errorf("message of %d bytes, the limit is %d", len(b), maxMessage)
	}
	out := binary.LittleEndian.AppendUint32(make([]byte, 0, 8+len(b)), uint32(len(b)))
	out = binary.LittleEndian.AppendUint32(out, crc32.ChecksumIEEE(b))
	return append(out, b...), nil
}

func readMessage(r io.Reader) (m message, err error) {
	var head [8]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return m, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n > maxMessage {
		return m, fmt.Errorf("%w: message of %d bytes, the limit is %d", errDamaged, n, maxMessage)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return m, err
	}
	if crc32.ChecksumIEEE(b) != binary.LittleEndian.Uint32(head[4:]) {
		return m, fmt.Errorf("%w: checksum of a message differs", errDamaged)
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return m, fmt.Errorf("%w: message: %w", errDamaged, err)
	}
	return m, nil
}

// peerError is the error that the other end reports.
type peerError struct {
	kind error // nil: none of ours
	text string
}

func (e *peerError) Error() string { return "peer says: " + e.text }
func (e *peerError) Unwrap() error { return e.kind }

// codes are the errors that keep their meaning on the other end.
var codes = []struct {
	code string
	err  error
}{{"refused", ErrRefused}, {"missing", ErrMissing}, {"damaged", errDamaged}}

// offer is sent before any bulk byte, and the receiver decides on it: the size, and the header and description of the
// segment.
type offer struct {
	size   int64
	header shm.Header
	raw    []byte // the description as in the segment
	meta   shm.Meta
}

func offerOf(p *shm.Pinned) (offer, error) {
	b, h := p.Used(), p.Header
	if h.MetaOff < headerSize || h.MetaLen < 0 || h.MetaOff > int64(len(b))-h.MetaLen {
		return offer{}, fmt.Errorf("%w: description at %d of %d bytes in a segment of %d", errDamaged, h.MetaOff,
			h.MetaLen, len(b))
	}
	return offer{size: int64(len(b)), header: h, raw: b[h.MetaOff:][:h.MetaLen], meta: p.Meta}, nil
}

// write sends the offer, as part of message m.
func (o offer) write(w io.Writer, m message) error {
	m.Size, m.Meta = o.size, len(o.raw)
	b, err := m.bytes()
	if err != nil {
		return err
	}
	for _, part := range [][]byte{b, o.head().Append(nil), o.raw} {
		if _, err := w.Write(part); err != nil {
			return err
		}
	}
	return nil
}

// head is the header of the copy. The owner's progress with its own segment does not apply to the copy, and the disk
// never waits for a copy.
func (o offer) head() shm.Header {
	h := o.header
	h.State, h.Disk, h.Released, h.Durable = shm.Complete, false, h.Seq, 0
	return h
}

// readOffer reads the body of an offer, and checks all of it.
func readOffer(r io.Reader, m message) (offer, error) {
	o := offer{size: m.Size}
	if m.Size < headerSize || m.Size > maxSize || m.Meta < 0 || m.Meta > shm.MaxMeta ||
		int64(m.Meta) > m.Size-headerSize {
		return o, fmt.Errorf("%w: segment of %d bytes with a description of %d", errDamaged, m.Size, m.Meta)
	}
	b := make([]byte, headerSize+m.Meta)
	if _, err := io.ReadFull(r, b); err != nil {
		return o, err
	}
	var err error
	if o.header, err = shm.ParseHeader(b[:headerSize]); err != nil {
		return o, fmt.Errorf("%w: %w", errDamaged, err)
	}
	o.raw = b[headerSize:]
	if o.meta, err = shm.ParseMeta(o.raw); err != nil {
		return o, fmt.Errorf("%w: %w", errDamaged, err)
	}
	return o, o.check()
}

func (o offer) check() error {
	h := o.header
	switch {
	case h.State != shm.Complete:
		return fmt.Errorf("%w: the segment is %v", errDamaged, h.State)
	case h.MetaLen != int64(len(o.raw)) || h.MetaCRC != crc32.ChecksumIEEE(o.raw) || h.Step != o.meta.Step:
		return fmt.Errorf("%w: the description is not the one that the header means", errDamaged)
	}
	for _, end := range []int64{h.MetaOff + h.MetaLen, h.FixOff + h.FixCount*32, h.ImageOff + h.ImageLen} {
		if end > o.size {
			return fmt.Errorf("%w: a part of the segment ends at %d of %d", errDamaged, end, o.size)
		}
	}
	return nil
}

// Everything behind the header of a segment travels in chunks of chunkSize; the last one is shorter.

func chunks(size int64) int64 { return (size - headerSize + chunkSize - 1) / chunkSize }

func chunkRange(i, size int64) (from, to int64) {
	from = headerSize + i*chunkSize
	return from, min(from+chunkSize, size)
}

// chunkHead precedes the bytes of a chunk, and alone it is the end: index u64, length u32, CRC-32 u32 of the index, the
// length and the bytes.
type chunkHead [16]byte

const endOfChunks = ^uint64(0)

func newChunkHead(index uint64, data []byte) (h chunkHead) {
	binary.LittleEndian.PutUint64(h[:], index)
	binary.LittleEndian.PutUint32(h[8:], uint32(len(data)))
	binary.LittleEndian.PutUint32(h[12:], h.sum(data))
	return h
}

func (h *chunkHead) sum(data []byte) uint32 {
	return crc32.Update(crc32.ChecksumIEEE(h[:12]), crc32.IEEETable, data)
}

// matches compares the checksum.
func (h *chunkHead) matches(data []byte) bool {
	return h.sum(data) == binary.LittleEndian.Uint32(h[12:])
}

// parse returns the chunk of a segment that follows; end: none does.
func (h *chunkHead) parse(size int64) (index int64, end bool, err error) {
	i, n := binary.LittleEndian.Uint64(h[:]), int64(binary.LittleEndian.Uint32(h[8:]))
	if i == endOfChunks && n == 0 && h.matches(nil) {
		return 0, true, nil
	}
	if i >= uint64(chunks(size)) {
		return 0, false, fmt.Errorf("%w: chunk %d of %d", errDamaged, i, chunks(size))
	}
	if from, to := chunkRange(int64(i), size); n != to-from {
		return 0, false, fmt.Errorf("%w: chunk %d has %d bytes instead of %d", errDamaged, i, n, to-from)
	}
	return int64(i), false, nil
}
