package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"

	"dlrover-run/rendezvous/pyproto"
)

// caller speaks gRPC over one connection, one call after the other, as an agent of DLRover does. It has so little of
// HTTP/2 that the load of thousands of agents does not take the processors from the master that is measured: what it
// asks again and again is encoded once, and the headers of answers are not read.
type caller struct {
	w      io.WriteCloser
	r      *bufio.Reader
	from   pyproto.Caller
	known  []header // what the other end has in its table for HPACK, the oldest first
	stream uint32   // of the newest call
	body   []byte   // of the newest answer
	buf    []byte
}

type header struct{ name, value string }

// The frames of HTTP/2 that are sent or read, and their flags.
const (
	frameData, frameHeaders, frameReset, frameSettings, framePing, frameGoAway, frameWindow = 0, 1, 3, 4, 6, 7, 8

	flagAck, flagEndStream, flagEndHeaders, flagPadded = 1, 1, 4, 8
)

const (
	frameHead = 9        // bytes before the payload of a frame
	maxFrame  = 16 << 10 // bytes of a payload, as long as nobody offers more
	maxBody   = 16 << 20 // bytes of an answer
)

// dialCaller connects. What is under way ends with ctx.
func dialCaller(ctx context.Context, addr string, from pyproto.Caller) (*caller, error) {
	nc, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		_ = nc.SetDeadline(deadline) // of a socket that is open
	}
	c := &caller{w: nc, r: bufio.NewReaderSize(nc, 2<<10), from: from}
	return c, c.greet()
}

// greet opens the windows of the connection and of its streams, so that none has to be opened again.
func (c *caller) greet() error {
	const initialWindowSize = 4
	b := []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	b = appendFrame(b, frameSettings, 0, 0, binary.BigEndian.AppendUint32([]byte{0, initialWindowSize}, maxBody))
	b = appendFrame(b, frameWindow, 0, 0, binary.BigEndian.AppendUint32(nil, 1<<31-1-1<<16))
	_, err := c.w.Write(b)
	return err
}

func appendFrame(b []byte, kind, flags byte, stream uint32, payload []byte) []byte {
	n := len(payload)
	b = append(b, byte(n>>16), byte(n>>8), byte(n), kind, flags)
	return append(binary.BigEndian.AppendUint32(b, stream), payload...)
}

// encode makes the frames of a call of "get" or "report", which is sent with send. All headers are in the table for
// HPACK after the first call, as with gRPC's own clients.
func (c *caller) encode(name string, m *pyproto.Message) (frames []byte) {
	block := []byte{0x83, 0x86} // :method POST, :scheme http
	for _, h := range []header{
		{":path", pyproto.GRPCPath + name}, {":authority", "master"}, {"content-type", "application/grpc"},
		{"te", "trailers"}, {"user-agent", "grpc-python/1.62.1 grpc-c/39.0.0 (linux; chttp2)"},
		{"grpc-accept-encoding", "identity, deflate, gzip"}, {"grpc-timeout", "60S"}, {"job_uid", c.from.JobUID},
	} {
		block = c.appendHeader(block, h)
	}
	frames = appendFrame(nil, frameHeaders, flagEndHeaders, 0, block)
	return appendFrame(frames, frameData, flagEndStream, 0, pyproto.RequestBody(c.from, m))
}

// appendHeader has a header that is new put into the other end's table, in plain text, and refers to others.
func (c *caller) appendHeader(b []byte, h header) []byte {
	const firstDynamic = 62 // the newest
	if i := slices.Index(c.known, h); i >= 0 {
		return append(b, 0x80|byte(firstDynamic+len(c.known)-1-i))
	}
	c.known = append(c.known, h)
	b = append(append(b, 0x40, byte(len(h.name))), h.name...)
	return append(append(b, byte(len(h.value))), h.value...)
}

// send begins a call, which receive ends. Frames that refer to the table may be sent again.
func (c *caller) send(frames []byte) error {
	c.stream += 2
	if c.stream == 2 {
		c.stream = 1
	}
	data := frameHead + (int(frames[0])<<16 | int(frames[1])<<8 | int(frames[2]))
	binary.BigEndian.PutUint32(frames[5:], c.stream)
	binary.BigEndian.PutUint32(frames[data+5:], c.stream)
	_, err := c.w.Write(frames)
	return err
}

// receive waits for the end of the call. The answer's body is valid until the next one.
func (c *caller) receive() ([]byte, error) {
	c.body = c.body[:0]
	for {
		over, err := c.frame()
		if err != nil || over {
			return c.body, err
		}
	}
}

// frame reads one; over: it is the last of the call.
func (c *caller) frame() (over bool, err error) {
	head, err := c.r.Peek(frameHead)
	if err != nil {
		return false, err
	}
	n, kind, flags := int(head[0])<<16|int(head[1])<<8|int(head[2]), head[3], head[4]
	_, _ = c.r.Discard(frameHead) // it is there
	if n > maxFrame {
		return false, fmt.Errorf("a frame of %d bytes, more than HTTP/2 allows unasked", n)
	}
	switch kind {
	case frameData:
		return flags&flagEndStream != 0, c.data(n, flags)
	case frameHeaders:
		_, err = c.r.Discard(n)
		return flags&flagEndStream != 0, err
	case frameSettings, framePing:
		return false, c.acknowledge(n, kind, flags)
	case frameReset, frameGoAway:
		return false, errors.New("the master ends the call, or the connection")
	}
	_, err = c.r.Discard(n)
	return false, err
}

func (c *caller) data(n int, flags byte) error {
	if flags&flagPadded != 0 || len(c.body)+n > maxBody {
		return fmt.Errorf("an answer that is padded, or of more than %d bytes", maxBody)
	}
	from := len(c.body)
	c.body = slices.Grow(c.body, n)[:from+n]
	_, err := io.ReadFull(c.r, c.body[from:])
	return err
}

// acknowledge reads settings, all of which suit, or a ping.
func (c *caller) acknowledge(n int, kind, flags byte) error {
	c.buf = slices.Grow(c.buf[:0], n)[:n]
	if _, err := io.ReadFull(c.r, c.buf); err != nil || flags&flagAck != 0 {
		return err
	}
	if kind == frameSettings {
		c.buf = c.buf[:0]
	}
	_, err := c.w.Write(appendFrame(nil, kind, flagAck, 0, c.buf))
	return err
}

// call is one call, whose answer's body is valid until the next one.
func (c *caller) call(name string, m *pyproto.Message) ([]byte, error) {
	if err := c.send(c.encode(name, m)); err != nil {
		return nil, err
	}
	return c.receive()
}

var errNoAnswer = errors.New("the master does not answer, or does not do as it is told")

// get asks the master.
func (c *caller) get(m *pyproto.Message) (*pyproto.Message, error) {
	body, err := c.call("get", m)
	if err != nil {
		return nil, err
	}
	answer, err := pyproto.AnswerBody(body)
	if err == nil && answer == nil {
		err = fmt.Errorf("%w: %s", errNoAnswer, m.Class.Name)
	}
	return answer, err
}

// report tells the master.
func (c *caller) report(m *pyproto.Message) error {
	body, err := c.call("report", m)
	if err == nil && string(body) != "\x00\x00\x00\x00\x02\x08\x01" { // Response{success: true}
		err = fmt.Errorf("%w: %s", errNoAnswer, m.Class.Name)
	}
	return err
}
