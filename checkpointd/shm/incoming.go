package shm

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	partialSuffix = ".part"
	maxCopy       = 1 << 50 // bytes; far from where sums overflow
)

// Incoming is a copy of another node's segment while it is received. Until it is complete no other process can see it.
// Not for concurrent use, except for the bytes.
type Incoming struct {
	s    *Segment
	size int64
	tmp  string // base name of a new file; "": one that is taken over
	seq  uint64 // of one that is taken over
	warm int64
	over bool
}

// Incoming makes room for a copy, size bytes long, that is to be published as name, such as "peer/r3-0.seg". The memory
// is taken now: when there is not enough of it the error is ENOSPC.
func (d *Dir) Incoming(name string, size int64) (*Incoming, error) {
	if err := receivable(name, size); err != nil {
		return nil, err
	}
	in := &Incoming{size: size}
	err := d.at(name, func(dirfd int, base string) error {
		in.tmp = fmt.Sprintf(".%s.%016x%s", base, rand.Uint64(), partialSuffix)
		fd, err := openat(dirfd, in.tmp, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL)
		if err != nil {
			return fmt.Errorf("receive segment %s: %w", name, err)
		}
		if err = unix.Ftruncate(fd, capacity(size)); err == nil {
			in.s, err = newSegment(d, name, fd)
		}
		if err != nil {
			return errors.Join(fmt.Errorf("receive segment %s: %w", name, err), unix.Close(fd),
				unix.Unlinkat(dirfd, in.tmp, 0))
		}
		if err = allocate(fd, in.s.mem); err != nil {
			return errors.Join(fmt.Errorf("receive segment %s: %w", name, err), in.s.Close(),
				unix.Unlinkat(dirfd, in.tmp, 0))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return in, nil
}

func receivable(name string, size int64) error {
	if !strings.HasPrefix(name, peerDir+"/") {
		return fmt.Errorf("receive segment %s: only copies of peers are received; use a name in %s/", name, peerDir)
	}
	if size < headerSize || size > maxCopy {
		return fmt.Errorf("receive segment %s: %w: %d bytes", name, ErrDamaged, size)
	}
	return nil
}

// capacity leaves some room: the description of a save often is a few bytes longer than that of the one before.
func capacity(size int64) int64 {
	const step = 64 << 10
	return (size + step - 1) / step * step
}

// Reuse takes the segment over, with its memory, for a copy of size bytes, if it still holds the save seq. That save is
// lost at once, and the segment stays incomplete until Publish, also after a crash. ErrBusy: it is pinned or locked.
// ErrUnfit: it is too small, more than twice as large as a new one, no longer the file of its name, or holds another
// save. After an error it is as it was, and Dir.Incoming makes a new file. Close of the segment takes effect at the end
// of the copy.
func (s *Segment) Reuse(size int64, seq uint64) (*Incoming, error) {
	if err := receivable(s.name, size); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.takeLocked(size, seq); err != nil {
		return nil, s.failed("reuse", err)
	}
	return &Incoming{s: s, size: size, seq: seq + 1, warm: s.mapped}, nil
}

func (s *Segment) takeLocked(size int64, seq uint64) error {
	switch {
	case s.closed:
		return ErrClosed
	case s.pins > 0 || s.taken:
		return ErrBusy
	case s.size < size || s.size > 2*capacity(size) || !s.named():
		return ErrUnfit
	}
	if err := s.setLock(unix.F_WRLCK); err != nil {
		return err
	}
	err := guard(func() error {
		h, err := s.header()
		if err != nil {
			return err
		}
		if h.Seq != seq {
			return ErrUnfit
		}
		atomic.StoreUint64(s.word(offState), littleEndian(uint64(Writing)))
		atomic.StoreUint64(s.word(offSeq), littleEndian(seq+1))
		return nil
	})
	if err != nil {
		return errors.Join(err, s.setLock(unix.F_UNLCK))
	}
	s.taken = true
	return nil
}

// named reports whether the file has its name still, no other one, and its size.
func (s *Segment) named() bool {
	st, err := s.stat()
	return err == nil && st.Nlink == 1 && !s.Replaced()
}

// Bytes is the copy, as long as was asked for. Its first page is for Publish to write. It must not be used after
// Publish or Abort.
func (in *Incoming) Bytes() []byte { return in.s.mem[:in.size:in.size] }

// Warm is how many of the first bytes were received into the same mapping before: writing to them costs no page faults.
func (in *Incoming) Warm() int64 { return in.warm }

// Publish checks that the save that h describes has been received, and makes it visible under its name, in place of an
// older file. A reused file continues its own count of saves, regardless of h. After an error the copy is still there
// for Abort.
func (in *Incoming) Publish(h Header) (*Segment, error) {
	s := in.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if in.over {
		return nil, s.failed("publish", ErrClosed)
	}
	if in.tmp == "" {
		h.Seq = in.seq
	}
	h.State, h.Released = Complete, h.Seq // the disk never waits for a copy
	if err := in.publish(h); err != nil {
		return nil, s.failed("publish", err)
	}
	in.over = true
	s.mapped = max(s.mapped, in.size)
	return s, s.returnLocked()
}

func (in *Incoming) publish(h Header) error {
	if err := h.check(); err != nil {
		return err
	}
	p := &Pinned{Header: h, s: in.s, mem: in.Bytes()}
	if h.used() > in.size {
		return fmt.Errorf("%w: %d bytes used in a copy of %d", ErrDamaged, h.used(), in.size)
	}
	if err := guard(p.check); err != nil {
		return err
	}
	if in.tmp == "" {
		if !in.s.named() {
			return ErrUnfit
		}
		return in.s.store(h)
	}
	if err := in.s.store(h); err != nil {
		return err
	}
	return in.s.dir.at(in.s.name, func(dirfd int, base string) error {
		return unix.Renameat(dirfd, in.tmp, dirfd, base)
	})
}

// returnLocked ends a Reuse.
func (s *Segment) returnLocked() error {
	if !s.taken {
		return nil
	}
	s.taken = false
	return errors.Join(s.setLock(unix.F_UNLCK), s.unmapLocked())
}

// Abort drops the received bytes. A reused file stays, incomplete, for the next Reuse. After Publish it does nothing.
func (in *Incoming) Abort() {
	if in.over {
		return
	}
	in.over = true
	if in.tmp == "" {
		in.s.mu.Lock()
		defer in.s.mu.Unlock()
		_ = in.s.returnLocked() // cannot fail on a valid descriptor
		return
	}
	_ = in.s.Close()
	_ = in.s.dir.at(in.s.name, func(dirfd int, _ string) error { return unix.Unlinkat(dirfd, in.tmp, 0) })
}
