package xpu

import (
	"encoding/binary"
	"errors"
)

// Wire types of protocol buffers.
const (
	varint  = 0
	fixed64 = 1
	bytes   = 2
	fixed32 = 5
)

var errMessage = errors.New("no message of protocol buffers: it is cut off, or something else")

// field is one field of a message. Number has the value of a varint, Bytes that of a string or a message within.
type field struct {
	ID     uint64
	Number uint64
	Bytes  []byte
	kind   uint64
}

func (f field) text() string { return string(f.Bytes) }

// fields calls do with the fields of a message in order, without fields of fixed size: xpu_timer has none.
func fields(b []byte, do func(field) error) error {
	for len(b) > 0 {
		f, rest, err := next(b)
		if err == nil && (f.kind == varint || f.kind == bytes) {
			err = do(f)
		}
		if err != nil {
			return err
		}
		b = rest
	}
	return nil
}

func next(b []byte) (f field, rest []byte, err error) {
	tag, rest, ok := number(b)
	f.ID, f.kind = tag>>3, tag&7
	size := uint64(0)
	switch f.kind {
	case varint:
		f.Number, rest, ok = number(rest)
	case fixed64:
		size = 8
	case fixed32:
		size = 4
	case bytes:
		size, rest, ok = number(rest)
	default:
		ok = false
	}
	if !ok || f.ID == 0 || size > uint64(len(rest)) {
		return field{}, nil, errMessage
	}
	f.Bytes = rest[:size]
	return f, rest[size:], nil
}

func number(b []byte) (n uint64, rest []byte, ok bool) {
	n, size := binary.Uvarint(b)
	if size <= 0 {
		return 0, nil, false
	}
	return n, b[size:], true
}
