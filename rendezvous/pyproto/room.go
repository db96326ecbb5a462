package pyproto

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"dlrover-run/internal/pickle"
)

const (
	// smallBody is how many bytes of a request and its answer are always taken. Nearly all are smaller.
	smallBody = 4 << 10
	// roomSize is how many bytes of both may be here beyond that, of all callers together.
	roomSize = 2 * maxJSON
	// maxStrangers is how many calls of callers that are not known may be here at once: each takes some 40 KB.
	maxStrangers = 2048
	// largePickle is from how many bytes on one pickle is decoded at a time: its values may take fifty times as much.
	largePickle = 64 << 10
)

var (
	errRoom   = errors.New("too many or too large requests at once: send it again")
	errAnswer = errors.New("the answer is too large")
)

// room bounds the memory of requests and their answers, as any client may send some. A call without room is refused;
// agents try again.
type room struct {
	size      int64
	taken     atomic.Int64
	strangers atomic.Int64  // calls
	large     chan struct{} // holds one while a large pickle is decoded
}

func newRoom(size int64) *room { return &room{size: size, large: make(chan struct{}, 1)} }

// call reserves room for one request, and for its answer until that is written. Done gives it back.
type call struct {
	io.Reader
	room    *room
	known   bool
	n, took int64
}

func (r *room) enter(body io.Reader, known bool) (*call, error) {
	if !known && r.strangers.Add(1) > maxStrangers {
		r.strangers.Add(-1)
		return nil, errRoom
	}
	return &call{Reader: body, room: r, known: known}, nil
}

func (c *call) Read(p []byte) (n int, err error) {
	n, err = c.Reader.Read(p)
	if e := c.take(int64(n)); e != nil {
		return 0, e
	}
	return n, err
}

// take takes room for n more bytes.
func (c *call) take(n int64) error {
	c.n += n
	more := c.n - smallBody - c.took
	if more <= 0 {
		return nil
	}
	if c.room.taken.Add(more) > c.room.size {
		c.room.taken.Add(-more)
		return errRoom
	}
	c.took += more
	return nil
}

func (c *call) done() {
	c.room.taken.Add(-c.took)
	if !c.known {
		c.room.strangers.Add(-1)
	}
}

// encode makes the bytes of an answer. There is room for them before they are made.
func (c *call) encode(a Answer) ([]byte, error) {
	n := len(a.Encoded)
	if a.Message != nil {
		n = pickle.EncodedLen(a.Message)
	}
	if n > maxMessage {
		return nil, fmt.Errorf("%w: it has %d bytes, and at most %d are sent; ask for fewer keys at once", errAnswer, n,
			maxMessage)
	}
	if a.Message == nil {
		return a.Encoded, nil
	}
	if err := c.take(int64(n)); err != nil {
		return nil, err
	}
	return pickle.Encode(a.Message), nil
}

// read is ReadMessage, in its turn.
func (r *room) read(ctx context.Context, data []byte) (*Message, error) {
	if len(data) >= largePickle {
		select {
		case r.large <- struct{}{}:
			defer func() { <-r.large }()
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return ReadMessage(data)
}
