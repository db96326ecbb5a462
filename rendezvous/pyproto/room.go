package pyproto

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
)

const (
	// smallBody is how many bytes of a request are always taken. Nearly all that agents send are smaller.
	smallBody = 4 << 10
	// roomSize is how many bytes of requests may be here beyond that, of all callers together.
	roomSize = 2 * maxJSON
	// largePickle is from how many bytes on one pickle is decoded at a time: its values may take fifty times as much.
	largePickle = 64 << 10
)

var errRoom = errors.New("too many large requests at once: send it again")

// room bounds the memory of requests, as anybody may send some. Who finds none is refused; agents try again.
type room struct {
	size  int64
	taken atomic.Int64
	large chan struct{} // holds one while a large pickle is decoded
}

func newRoom(size int64) *room { return &room{size: size, large: make(chan struct{}, 1)} }

// metered takes room for what is read of one request. Done gives it back.
type metered struct {
	io.Reader
	room    *room
	n, took int64
}

func (r *room) metered(body io.Reader) *metered { return &metered{Reader: body, room: r} }

func (m *metered) Read(p []byte) (n int, err error) {
	n, err = m.Reader.Read(p)
	m.n += int64(n)
	if more := m.n - smallBody - m.took; more > 0 {
		m.took += more
		if m.room.taken.Add(more) > m.room.size {
			return 0, errRoom
		}
	}
	return n, err
}

func (m *metered) done() { m.room.taken.Add(-m.took) }

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
