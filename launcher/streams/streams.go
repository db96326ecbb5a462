// Package streams is the protocol between a user, the daemon and the launchers for following the output of workers,
// for executing a command next to one, and for the profile of one. It has frames, requests, and lines made of the
// output of many workers.
//
// It does no I/O of its own. The launcher's side is package node below it; the daemon's is in cmd.
package streams

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

const (
	// Topic is that of the notices that ask launchers to open a stream; the body is an Invitation.
	Topic = "stream"
	// Protocol is the protocol that a connection is upgraded to.
	Protocol = "dlrover-stream-1"
	// MaxData bounds the data of a frame, in bytes.
	MaxData = 64 << 10
	// Window bounds the input that a command has not read yet, in bytes.
	Window = 256 << 10
	// MaxProfile bounds Request.Profile, and MaxTrace the trace before it is compressed, in bytes.
	MaxProfile = time.Minute
	MaxTrace   = 4 << 30
	// maxArgs bounds the arguments of a command, all together, in bytes.
	maxArgs = 32 << 10
)

// Invitation asks a launcher to open a stream. The Request on the stream holds its purpose.
type Invitation struct {
	ID string `json:"id"`
}

// Request is the purpose of a stream.
type Request struct {
	// Rank selects the worker with the output, or next to which a command runs; -1: all.
	Rank int `json:"rank"`
	// Follow: the output goes on until the stream is closed.
	Follow bool `json:"follow,omitempty"`
	// Tail is how many lines come first of each stream of each worker; -1: all that are kept.
	Tail int `json:"tail,omitempty"`
	// Args is the command; none asks for output. From is the user that wants it executed.
	Args []string `json:"args,omitempty"`
	From string   `json:"from,omitempty"`
	// Profile is for how long the worker of Rank is recorded; 0: it is not. The output is then the trace, by gzip.
	Profile time.Duration `json:"profile,omitempty"`
	// Timeout is how long the command may run; 0: as long as it wants.
	Timeout time.Duration `json:"timeout,omitempty"`
}

// Ends reports whether the stream is about one worker, and ends with an Exit.
func (r Request) Ends() bool { return len(r.Args) > 0 || r.Profile > 0 }

// CheckArgs returns the error of an invalid command.
func (r Request) CheckArgs() error {
	size := 0
	for _, a := range r.Args {
		if strings.IndexByte(a, 0) >= 0 {
			return fmt.Errorf("the argument %.40q of a command: no argument can have a zero byte", a)
		}
		size += len(a) + 1
	}
	switch {
	case len(r.Args) == 0 || r.Args[0] == "":
		return errors.New("no command is given")
	case size > maxArgs || len(JSON(r)) > MaxData:
		return fmt.Errorf("a command of %d bytes: at most %d are taken; put them into a file, or send them as input",
			size, maxArgs)
	}
	return nil
}

// Exit is how a command has ended.
type Exit struct {
	Code int `json:"code"`
	// Error is why it was not executed, or not to its end.
	Error string `json:"error,omitempty"`
}

// Exit codes on top of the command's own, like those of env, timeout and shells.
const (
	CodeTimeout    = 124 // it ran for too long
	CodeRefused    = 125 // it was not tried, or its end is not known
	CodeExecute    = 126 // it cannot be executed
	CodeNotFound   = 127
	CodeSignalBase = 128 // and the number of the signal that has ended it
)

// Kind is the type of a Frame.
type Kind uint8

// The kinds of frames.
const (
	KindRequest  Kind = 1 + iota // JSON of a Request
	KindNode                     // the name of a node
	KindOutput                   // written by a worker or a command
	KindDropped                  // 8 bytes: how many bytes of output are missing here
	KindNote                     // something for people
	KindExit                     // JSON of an Exit
	KindEnd                      // nothing follows; why, in a few words
	KindInput                    // for a command
	KindInputEnd                 // nothing follows of it
	KindAck                      // 8 bytes: how much input was read since the last one
)

// Frame is one message. Std is 1 for standard output and 2 for standard error.
type Frame struct {
	Kind Kind
	Std  uint8
	Node uint16 // the daemon's number of a node, for a follower of several
	Rank int32
	Data []byte
}

const headerSize = 12

// errFrame: the received bytes are no frame.
var errFrame = errors.New("streams: this is no frame")

// Append adds f to b as it is sent. Data must have at most MaxData bytes.
func (f Frame) Append(b []byte) []byte {
	b = append(b, byte(f.Kind), f.Std)
	b = binary.BigEndian.AppendUint16(b, f.Node)
	b = binary.BigEndian.AppendUint32(b, uint32(f.Rank))
	b = binary.BigEndian.AppendUint32(b, uint32(len(f.Data)))
	return append(b, f.Data...)
}

// Count makes the Data of a frame that holds a number.
func Count(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// Count is the number in a frame; 0 for none.
func (f Frame) Count() uint64 {
	if len(f.Data) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(f.Data)
}

// JSON makes the Data of a frame of a Request or an Exit. The caller sees to its size.
func JSON(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("streams: %T cannot be encoded: %v", v, err)) // it holds strings and numbers
	}
	return data
}

// Decode parses the JSON data.
func (f Frame) Decode(v any) error {
	if err := json.Unmarshal(f.Data, v); err != nil {
		return fmt.Errorf("%w: %w", errFrame, err)
	}
	return nil
}

// Reader reads frames.
type Reader struct {
	r      io.Reader
	header [headerSize]byte
	buf    []byte
}

// NewReader returns a Reader, which reads no more from r than it needs.
func NewReader(r io.Reader) *Reader { return &Reader{r: r} }

// Next returns the next frame, and its Data are valid until the next call. io.EOF: there is none, and nothing is
// missing.
func (r *Reader) Next() (f Frame, err error) {
	if _, err = io.ReadFull(r.r, r.header[:]); err != nil {
		return f, err
	}
	h := r.header[:]
	n := binary.BigEndian.Uint32(h[8:])
	f = Frame{Kind: Kind(h[0]), Std: h[1], Node: binary.BigEndian.Uint16(h[2:]),
		Rank: int32(binary.BigEndian.Uint32(h[4:]))}
	if n > MaxData || f.Kind == 0 {
		return f, fmt.Errorf("%w: kind %d, %d bytes; at most %d are sent", errFrame, f.Kind, n, MaxData)
	}
	if int(n) > cap(r.buf) {
		r.buf = make([]byte, n)
	}
	f.Data = r.buf[:n]
	if _, err = io.ReadFull(r.r, f.Data); errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return f, err
}
