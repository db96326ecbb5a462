package shm

import (
	"cmp"
	"context"
	"encoding/binary"
	"hash/crc32"
	"sort"
	"sync"

	"dlrover-run/internal/background"
	"dlrover-run/internal/stable"
)

// sealChunk is how many bytes are summed between two waits for workers: a millisecond's.
const sealChunk = 4 << 20

// Sealing completes the checksums in one file in the background. It ends by itself or with its context.
type Sealing struct {
	data  []byte
	yield *Yielder
	look  int // bytes until the next wait for workers: there may be many small fixes
	fixes []fix
	needs []need
	done  chan struct{} // closed at the end; then sum and err are set
	sum   uint32
	err   error

	mu   sync.Mutex
	rows int           // fixes that are in the file
	more chan struct{} // closed when rows grows; nil: no waiter
}

// need is a dependency: the bytes after off are final only when the first rows fix-ups are in.
type need struct {
	off  int64
	rows int
}

// sums are the checksums of the files that are sealed, of one save.
type sums struct {
	seq uint64
	of  map[int]uint32
}

func (s *sums) add(seq uint64, i int, sum uint32) {
	if s.seq != seq || s.of == nil {
		*s = sums{seq, map[int]uint32{}}
	}
	s.of[i] = sum
}

func (s *sums) get(seq uint64, i int) (sum uint32, ok bool) {
	if s.seq == seq {
		sum, ok = s.of[i]
	}
	return sum, ok
}

// Seal stores the checksums that the worker left open in file i, and sums the file. Every byte is read once. The lock
// on the segment is kept until the work ends. It may be asked for again, and costs nothing once it has been done.
func (p *Pinned) Seal(ctx context.Context, i int) *Sealing {
	s := &Sealing{data: p.File(i), yield: p.Yielder(), fixes: p.fixes[i], done: make(chan struct{})}
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	var ok bool
	if s.sum, ok = p.s.sealed.get(p.Header.Seq, i); ok {
		s.rows = len(s.fixes)
		close(s.done)
		return s
	}
	s.needs = needs(s.fixes)
	p.s.pins++ // the lock is ours already
	go func() {
		defer close(s.done)
		background.Enter()
		s.err = guard(func() error { return s.run(ctx) })
		p.s.mu.Lock()
		defer p.s.mu.Unlock()
		if s.err == nil {
			p.s.sealed.add(p.Header.Seq, i, s.sum)
		}
		p.s.dropLocked()
	}()
	return s
}

// needs returns for every target how many fix-ups it takes, by offset and never falling.
func needs(fixes []fix) []need {
	ns := make([]need, 0, 2*len(fixes))
	for i, f := range fixes {
		for _, d := range f.dst {
			if d >= 0 {
				ns = append(ns, need{d, i + 1})
			}
		}
	}
	stable.Sort(ns, func(a, b need) int { return cmp.Compare(a.off, b.off) })
	for i := 1; i < len(ns); i++ {
		ns[i].rows = max(ns[i].rows, ns[i-1].rows)
	}
	return ns
}

func (s *Sealing) run(ctx context.Context) error {
	sums := make([]uint32, len(s.fixes))
	for i, f := range s.fixes {
		sum, err := s.update(ctx, 0, s.data[f.off:f.end()])
		if err != nil {
			return err
		}
		sums[i] = sum
		s.patch(f, sum)
	}
	sum, at, c := uint32(0), int64(0), newCombiner()
	for i, f := range s.fixes {
		var err error
		if sum, err = s.update(ctx, sum, s.data[at:f.off]); err != nil {
			return err
		}
		sum, at = c.combine(sum, sums[i], f.len), f.end()
	}
	var err error
	s.sum, err = s.update(ctx, sum, s.data[at:])
	return err
}

// patch stores a checksum. A correct one is not written again: another process may be reading it.
func (s *Sealing) patch(f fix, sum uint32) {
	for _, d := range f.dst {
		if d >= 0 && binary.LittleEndian.Uint32(s.data[d:]) != sum {
			binary.LittleEndian.PutUint32(s.data[d:], sum)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rows++
	if s.more != nil {
		close(s.more)
		s.more = nil
	}
}

// update continues a checksum, as long as the context lasts.
func (s *Sealing) update(ctx context.Context, sum uint32, b []byte) (uint32, error) {
	for len(b) > 0 {
		if s.look == 0 {
			if err := s.yield.Wait(ctx); err != nil {
				return 0, err
			}
			s.look = sealChunk
		}
		n := min(len(b), s.look)
		sum = crc32.Update(sum, crc32.IEEETable, b[:n])
		b, s.look = b[n:], s.look-n
	}
	return sum, nil
}

// Ready waits until the bytes [0,end) of the file are final. It fails when the sealing failed before that.
func (s *Sealing) Ready(ctx context.Context, end int64) error {
	rows := 0
	if i := sort.Search(len(s.needs), func(i int) bool { return s.needs[i].off >= end }); i > 0 {
		rows = s.needs[i-1].rows
	}
	for {
		more := s.wait(rows)
		if more == nil {
			return nil
		}
		select {
		case <-more:
		case <-s.done:
			if s.wait(rows) != nil {
				return s.err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// wait returns a channel that is closed at the next fix-up; nil: enough of them are in.
func (s *Sealing) wait(rows int) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rows >= rows {
		return nil
	}
	if s.more == nil {
		s.more = make(chan struct{})
	}
	return s.more
}

// Sum waits for the end and returns the CRC-32 (IEEE) of the whole file.
func (s *Sealing) Sum() (uint32, error) {
	<-s.done
	return s.sum, s.err
}
