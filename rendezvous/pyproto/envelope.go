package pyproto

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// envelope wraps a message in both transports (elastic.Message).
type envelope struct {
	NodeID   int
	NodeType string
	Data     []byte
}

// response answers a report (elastic.Response).
type response struct {
	Success bool
	Reason  string
}

var errProto = errors.New("pyproto: not a protobuf message of DLRover's master")

// The wire types of protobuf.
const (
	varint, fixed64, lengthed, fixed32 = 0, 1, 2, 5
)

func (e envelope) marshal() []byte {
	b := make([]byte, 0, len(e.Data)+len(e.NodeType)+24)
	if e.NodeID != 0 {
		b = binary.AppendUvarint(append(b, 1<<3|varint), uint64(int64(e.NodeID)))
	}
	b = appendBytes(b, 2, strings.ToValidUTF8(e.NodeType, "\uFFFD"))
	return appendBytes(b, 3, e.Data)
}

func appendBytes[T string | []byte](b []byte, field byte, v T) []byte {
	if len(v) == 0 {
		return b
	}
	return append(binary.AppendUvarint(append(b, field<<3|lengthed), uint64(len(v))), v...)
}

func parseEnvelope(in []byte) (e envelope, err error) {
	err = fields(in, func(number uint64, n uint64, b []byte) {
		switch number {
		case 1:
			e.NodeID = int(int32(n))
		case 2:
			e.NodeType = string(b)
		case 3:
			e.Data = b
		}
	})
	return e, err
}

func (r response) marshal() []byte {
	var b []byte
	if r.Success {
		b = append(b, 1<<3|varint, 1)
	}
	return appendBytes(b, 2, strings.ToValidUTF8(r.Reason, "\uFFFD"))
}

func parseResponse(in []byte) (r response, err error) {
	err = fields(in, func(number uint64, n uint64, b []byte) {
		switch number {
		case 1:
			r.Success = n != 0
		case 2:
			r.Reason = string(b)
		}
	})
	return r, err
}

// fields calls f with every field of a message: its number, and its value or its bytes. Unknown ones are for f to skip.
func fields(in []byte, f func(number, n uint64, b []byte)) error {
	for len(in) > 0 {
		key, size := binary.Uvarint(in)
		if size <= 0 || key>>3 == 0 {
			return fmt.Errorf("%w: a field without a number", errProto)
		}
		in = in[size:]
		n, b, rest, err := value(in, key&7)
		if err != nil {
			return err
		}
		f(key>>3, n, b)
		in = rest
	}
	return nil
}

func value(in []byte, wire uint64) (n uint64, b, rest []byte, err error) {
	switch wire {
	case varint, lengthed:
		n, size := binary.Uvarint(in)
		if size <= 0 {
			return 0, nil, nil, fmt.Errorf("%w: a number that does not end", errProto)
		}
		in = in[size:]
		if wire == varint {
			return n, nil, in, nil
		}
		if n > uint64(len(in)) {
			return 0, nil, nil, fmt.Errorf("%w: it ends too early", errProto)
		}
		return 0, in[:n], in[n:], nil
	case fixed64, fixed32:
		size := 8
		if wire == fixed32 {
			size = 4
		}
		if len(in) < size {
			return 0, nil, nil, fmt.Errorf("%w: it ends too early", errProto)
		}
		return 0, nil, in[size:], nil
	}
	return 0, nil, nil, fmt.Errorf("%w: wire type %d", errProto, wire)
}
