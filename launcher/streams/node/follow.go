package node

import (
	"sync"
	"time"

	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/streams"
)

// follow sends the workers' output until the other side goes away or, without Follow, only the present output.
func (n *Node) follow(c *conn, req streams.Request) {
	q := newQueue()
	end := n.cfg.Logs.Follow(logs.Follower{
		Wants: func(id logs.WorkerID) bool { return req.Rank < 0 || id.Rank == req.Rank },
		Tail:  func(b []byte) []byte { return streams.LastLines(b, req.Tail) },
		Print: func(id logs.WorkerID, std logs.Std, b []byte) { q.put(int32(id.Rank), uint8(std), b) },
	})
	defer end()
	defer q.close()
	var gone sync.WaitGroup
	defer gone.Wait()
	defer c.nc.Close()
	gone.Go(func() { // the other side sends nothing but the end
		for {
			if _, err := c.in.Next(); err != nil {
				q.close()
				return
			}
		}
	})
	ending := n.ending
	if !req.Follow {
		closed := make(chan struct{})
		close(closed)
		ending = closed
	}
	for {
		f, ok := q.take(ending)
		if !ok {
			return
		}
		if err := c.send(f); err != nil || f.Kind == streams.KindEnd {
			return
		}
	}
}

const (
	// maxQueued bounds the bytes that wait for a follower, and overhead is the cost of a piece on top of its text.
	maxQueued = 1 << 20
	overhead  = 64
	// lastLook is how long after the end of the job, or of the present output, more may arrive.
	lastLook = 150 * time.Millisecond
)

// queue is the output that waits for one follower. No worker waits for it: output that does not fit is dropped and
// counted.
type queue struct {
	news chan struct{} // holds one when there is something new
	over chan struct{} // closed by close

	mu      sync.Mutex
	pieces  []streams.Frame
	size    int
	missing map[missingKey]uint64 // bytes that were dropped since
	closed  bool
}

type missingKey struct {
	rank int32
	std  uint8
}

func newQueue() *queue {
	return &queue{news: make(chan struct{}, 1), over: make(chan struct{}), missing: map[missingKey]uint64{}}
}

func (q *queue) put(rank int32, std uint8, b []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed || len(b) == 0 {
		return
	}
	key := missingKey{rank, std}
	if q.missing[key] > 0 || q.size+len(b)+overhead > maxQueued {
		q.missing[key] += uint64(len(b))
		return
	}
	for len(b) > 0 {
		n := q.appendLocked(key, b)
		b = b[n:]
	}
	select {
	case q.news <- struct{}{}:
	default:
	}
}

// appendLocked adds the beginning of b to the last piece, if it is of the same stream, or makes it a piece.
func (q *queue) appendLocked(key missingKey, b []byte) int {
	if last := len(q.pieces) - 1; last >= 0 {
		f := &q.pieces[last]
		room := streams.MaxData - len(f.Data)
		if f.Kind == streams.KindOutput && f.Rank == key.rank && f.Std == key.std && room > 0 {
			n := min(room, len(b))
			f.Data = append(f.Data, b[:n]...)
			q.size += n
			return n
		}
	}
	n := min(streams.MaxData, len(b))
	q.pieces = append(q.pieces, streams.Frame{
		Kind: streams.KindOutput, Rank: key.rank, Std: key.std, Data: append([]byte(nil), b[:n]...)})
	q.size += n + overhead
	return n
}

// take waits for the next frame. After ending the last is an End; false: the queue is closed.
func (q *queue) take(ending <-chan struct{}) (f streams.Frame, ok bool) {
	for ended := false; ; {
		f, found, ok := q.next()
		if found || !ok {
			return f, ok
		}
		if ended {
			return streams.Frame{Kind: streams.KindEnd}, true
		}
		select {
		case <-q.news:
		case <-q.over:
		case <-ending:
			last := time.NewTimer(lastLook)
			select {
			case <-q.news:
			case <-q.over:
			case <-last.C:
				ended = true
			}
			last.Stop()
		}
	}
}

func (q *queue) next() (f streams.Frame, found, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return f, false, false
	}
	if len(q.pieces) > 0 {
		f = q.pieces[0]
		q.pieces[0] = streams.Frame{}
		q.pieces = q.pieces[1:]
		if f.Kind == streams.KindOutput {
			q.size -= len(f.Data) + overhead
		}
		return f, true, true
	}
	for key, n := range q.missing { // all that came before is sent
		delete(q.missing, key)
		return streams.Frame{Kind: streams.KindDropped, Rank: key.rank, Std: key.std, Data: streams.Count(n)}, true, true
	}
	return f, false, true
}

// close drops the waiting output. It may be called more than once.
func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.closed {
		q.closed, q.pieces, q.missing = true, nil, nil
		close(q.over)
	}
}
