package replica

import (
	"context"
	"fmt"
	"io"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd/shm"
)

// transfer is shared by the connections of one push or fetch. An error of one ends them all.
type transfer struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	moved  atomic.Int64
	part   func(*conn) error // runs on a further connection
	early  context.Context   // ends soon after no more connections are admitted
	late   context.CancelFunc

	mu     sync.Mutex
	joined int
	over   bool
	wg     sync.WaitGroup // the further connections
}

func newTransfer(ctx context.Context) *transfer {
	t := &transfer{}
	t.ctx, t.cancel = context.WithCancelCause(ctx)
	t.early, t.late = context.WithCancel(t.ctx)
	return t
}

// join counts a further connection; false: there are enough, or the transfer is over. The caller calls help after true.
func (t *transfer) join() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over || t.joined >= maxConns-1 {
		return false
	}
	t.joined++
	t.wg.Add(1)
	return true
}

// help does a further connection's part.
func (t *transfer) help(c *conn) error {
	defer t.wg.Done()
	c.bind(t.ctx, &t.moved)
	err := t.part(c)
	if err != nil {
		t.cancel(err)
	}
	return err
}

// wait admits no more connections, waits for those that there are, and returns the error that ended the transfer.
func (t *transfer) wait() error {
	t.mu.Lock()
	t.over = true
	t.mu.Unlock()
	defer time.AfterFunc(lateTime, t.late).Stop()
	t.wg.Wait()
	return context.Cause(t.ctx)
}

// done reports whether no more connections are admitted.
func (t *transfer) done() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.over
}

// end ends all connections, because of err unless there was an error before, and returns the first one.
func (t *transfer) end(err error) error {
	if err == nil {
		t.cancel(nil)
		t.wait()
		return nil
	}
	t.cancel(err)
	return t.wait()
}

// outgoing assigns the chunks of a pinned segment to free connections.
type outgoing struct {
	data []byte
	next atomic.Int64

	ctx    context.Context
	cancel context.CancelFunc
	p      *shm.Pinned
	mu     sync.Mutex
	seals  []*shm.Sealing // by file; nil: not begun
}

func newOutgoing(ctx context.Context, p *shm.Pinned) *outgoing {
	o := &outgoing{data: p.Used(), p: p, seals: make([]*shm.Sealing, len(p.Meta.Files))}
	o.ctx, o.cancel = context.WithCancel(ctx)
	return o
}

// close ends the work on checksums; after it the segment may be released.
func (o *outgoing) close() {
	o.cancel()
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, s := range o.seals {
		if s != nil {
			s.Sum()
		}
	}
}

// send sends chunks until none is left. Workers save first.
func (o *outgoing) send(c *conn) error {
	c.bulk = true
	size, yield := int64(len(o.data)), o.p.Yielder()
	for {
		i := o.next.Add(1) - 1
		if i >= chunks(size) {
			return nil
		}
		from, to := chunkRange(i, size)
		if err := o.final(from, to); err != nil {
			return err
		}
		if err := yield.Wait(o.ctx); err != nil {
			return err
		}
		var head chunkHead
		err := guard(func() { head = newChunkHead(uint64(i), o.data[from:to]) })
		if err == nil {
			err = c.writeChunk(head[:], o.data[from:to])
		}
		if err != nil {
			return err
		}
	}
}

// sendEnd marks the end of the chunks on this connection.
func sendEnd(c *conn) error {
	head := newChunkHead(endOfChunks, nil)
	_, err := c.Write(head[:])
	c.bulk = false
	return err
}

// final waits until no checksums in bytes [from,to) are being completed any more: they would change between our
// checksum and the socket.
func (o *outgoing) final(from, to int64) error {
	h := o.p.Header
	if h.FixCount == 0 {
		return nil
	}
	for i, f := range o.p.Meta.Files {
		start := h.ImageOff + f.Off
		if start >= to || start+f.Len <= from {
			continue
		}
		if err := o.seal(i).Ready(o.ctx, min(to-start, f.Len)); err != nil {
			return err
		}
	}
	return nil
}

func (o *outgoing) seal(i int) *shm.Sealing {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.seals[i] == nil {
		o.seals[i] = o.p.Seal(o.ctx, i)
	}
	return o.seals[i]
}

// incoming puts chunks from any connection in their place.
type incoming struct {
	file  *shm.Incoming
	data  []byte
	offer offer

	mu   sync.Mutex
	seen []bool // chunks that some connection has begun with
	left int64  // chunks that have not arrived whole
}

func newIncoming(file *shm.Incoming, o offer) (*incoming, error) {
	data := file.Bytes()
	if int64(len(data)) < o.size {
		return nil, fmt.Errorf("copy of %d bytes got room for %d", o.size, len(data))
	}
	n := chunks(o.size)
	return &incoming{file: file, data: data, offer: o, seen: make([]bool, n), left: n}, nil
}

// receive takes chunks until the sender marks their end.
func (in *incoming) receive(c *conn) error {
	for {
		var head chunkHead
		if _, err := c.Read(head[:]); err == io.EOF {
			return io.ErrUnexpectedEOF
		} else if err != nil {
			return err
		}
		i, end, err := head.parse(in.offer.size)
		if end || err != nil {
			return err
		}
		if err := in.claim(i); err != nil {
			return err
		}
		from, to := chunkRange(i, in.offer.size)
		b := in.data[from:to]
		if to > in.file.Warm() {
			// One call makes the pages writable that would fault one by one: a fifth less CPU. Old kernels do not know
			// it.
			_ = unix.Madvise(b, unix.MADV_POPULATE_WRITE)
		}
		if _, err := c.Read(b); err != nil {
			return err
		}
		good := false
		if err := guard(func() { good = head.matches(b) }); err != nil {
			return err
		}
		if !good {
			return fmt.Errorf("%w: checksum of chunk %d differs", errDamaged, i)
		}
		in.mu.Lock()
		in.left--
		in.mu.Unlock()
	}
}

// claim keeps two connections from writing to the same place.
func (in *incoming) claim(i int64) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.seen[i] {
		return fmt.Errorf("%w: chunk %d comes twice", errDamaged, i)
	}
	in.seen[i] = true
	return nil
}

// publish makes the copy visible if all of it is there. No connection may be receiving any more.
func (in *incoming) publish() (*shm.Segment, error) {
	if in.left != 0 {
		return nil, fmt.Errorf("%w: %d of %d chunks did not come", errDamaged, in.left, len(in.seen))
	}
	return in.file.Publish(in.offer.head())
}

// guard runs f, which reads or writes mapped memory. If another process has cut the file short, that would kill us.
func guard(f func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch r := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			err = fmt.Errorf("%w: the segment became shorter", errDamaged)
		default:
			panic(r)
		}
	}()
	f()
	return nil
}
