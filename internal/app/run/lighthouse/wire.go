package lighthouse

import (
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"dlrover-run/rendezvous"
)

// maxMessage bounds a request of a worker, in bytes.
const maxMessage = 64 << 10

var (
	errUnknown = errors.New("this lighthouse has no such method")
	errMessage = errors.New("it is no message of torchft's lighthouse, or has more than 64 KiB")
)

// The codes of gRPC that are used here.
const codeOK, codeInvalid, codeUnimplemented, codeUnavailable = 0, 3, 12, 14

// readMessage reads the one message of a request: a byte for compression, which is not used, its size, and itself.
func readMessage(w http.ResponseWriter, req *http.Request) ([]byte, error) {
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Now().Add(bodyTime))
	defer func() { _ = c.SetReadDeadline(time.Time{}) }()
	var head [5]byte
	if _, err := io.ReadFull(req.Body, head[:]); err != nil {
		return nil, errMessage
	}
	size := binary.BigEndian.Uint32(head[1:])
	if head[0] != 0 || size > maxMessage {
		return nil, errMessage
	}
	in := make([]byte, size)
	if _, err := io.ReadFull(req.Body, in); err != nil {
		return nil, errMessage
	}
	return in, nil
}

// writeMessage writes the answer, or the error.
func writeMessage(w http.ResponseWriter, out []byte, err error) {
	h := w.Header()
	h.Set("Content-Type", "application/grpc")
	code := codeOK
	switch {
	case err == nil:
		_, _ = w.Write(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(out)))) // the worker may be gone
		_, _ = w.Write(out)
	case errors.Is(err, errMessage):
		code = codeInvalid
	case errors.Is(err, errUnknown):
		code = codeUnimplemented
	default:
		code = codeUnavailable
	}
	h.Set(http.TrailerPrefix+"Grpc-Status", strconv.Itoa(code))
	if err != nil {
		h.Set(http.TrailerPrefix+"Grpc-Message", url.PathEscape(err.Error()))
	}
}

// The wire types of protobuf. Its protowire would add two initializers and 20 kB to the launcher.
const varint, fixed64, lengthed, fixed32 = 0, 1, 2, 5

// fields calls f with each field of a message: a number, or bytes.
func fields(in []byte, f func(field, n uint64, b []byte)) error {
	for len(in) > 0 {
		key, size := binary.Uvarint(in)
		if size <= 0 {
			return errMessage
		}
		in = in[size:]
		n := uint64(8)
		switch key & 7 {
		case varint, lengthed:
			if n, size = binary.Uvarint(in); size <= 0 {
				return errMessage
			}
			in = in[size:]
		case fixed32:
			n = 4
		case fixed64:
		default:
			return errMessage
		}
		if key&7 == varint {
			f(key>>3, n, nil)
			continue
		}
		if n > uint64(len(in)) {
			return errMessage
		}
		f(key>>3, 0, in[:n])
		in = in[n:]
	}
	return nil
}

// parseHeartbeat returns the replica_id of a LighthouseHeartbeatRequest.
func parseHeartbeat(in []byte) (id string, err error) {
	err = fields(in, func(field, _ uint64, b []byte) {
		if field == 1 {
			id = string(b)
		}
	})
	return id, err
}

// parseAsk parses a LighthouseQuorumRequest. The QuorumMember in it stays as it is: newer versions have more fields.
func parseAsk(in []byte) (a rendezvous.QuorumAsk, err error) {
	if err = fields(in, func(field, _ uint64, b []byte) {
		if field == 1 {
			a.Member = b
		}
	}); err != nil {
		return a, err
	}
	err = fields(a.Member, func(field, n uint64, b []byte) {
		switch field {
		case 1:
			a.Replica = string(b)
		case 6:
			a.ShrinkOnly = n != 0
		case 8:
			a.Failed = int64(n) > 0
		}
	})
	return a, err
}

// marshal makes a LighthouseQuorumResponse.
func marshal(q *rendezvous.Quorum) []byte {
	b := appendNumber(nil, 1, q.ID)
	for _, m := range q.Members {
		b = appendBytes(b, 2, m)
	}
	b = appendBytes(b, 3, appendNumber(appendNumber(nil, 1, q.Made/1000), 2, q.Made%1000*1_000_000))
	return appendBytes(nil, 1, b)
}

func appendNumber(b []byte, field byte, n int64) []byte {
	return binary.AppendUvarint(append(b, field<<3|varint), uint64(n))
}

func appendBytes(b []byte, field byte, v []byte) []byte {
	return append(binary.AppendUvarint(append(b, field<<3|lengthed), uint64(len(v))), v...)
}
