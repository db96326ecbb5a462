package shm

import (
	"context"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/retry"
)

const (
	yieldPoll = 4 * time.Millisecond
	// yieldMost bounds one wait, and yieldShare how much longer work takes: after a second of waiting it goes on for a
	// quarter of a second at least, so a worker that is stopped during its save, or saves all the time, does not keep the
	// saves from the disk.
	yieldMost  = time.Second
	yieldShare = 4
)

// Yielder lets workers save first: work in the background would take memory bandwidth and processors from their copies,
// for which training waits. One goroutine uses it.
type Yielder struct {
	dir  *Dir
	left time.Duration // that it may still wait
	last time.Time     // the end of the last wait
}

// Yielder returns one for work on the save.
func (p *Pinned) Yielder() *Yielder {
	return &Yielder{dir: p.s.dir, left: yieldMost, last: time.Now()}
}

// Wait waits while a worker of this node copies a save, for a second at most, and in the long run for four times as
// long as the work between takes. It fails when ctx has ended.
func (y *Yielder) Wait(ctx context.Context) error {
	now := time.Now()
	y.left = min(yieldMost, y.left+yieldShare*now.Sub(y.last))
	was, is := false, y.dir.copying() // at the last two looks: after a copy the worker waits for our answer
	for (was || is) && y.left > 0 && retry.Sleep(ctx, yieldPoll) {
		y.left -= time.Since(now)
		now = time.Now()
		was, is = is, y.dir.copying()
	}
	y.last = now
	return context.Cause(ctx)
}

// watch makes the segment one of those that copying looks at, if it is a worker's.
func (d *Dir) watch(s *Segment) {
	if !strings.HasPrefix(s.name, ownDir+"/") {
		return
	}
	d.watching.Lock()
	defer d.watching.Unlock()
	d.watched = append(slices.DeleteFunc(d.watched, (*Segment).unmapped), s)
}

// copying reports whether a worker is writing to one of the open segments.
func (d *Dir) copying() bool {
	d.watching.Lock()
	defer d.watching.Unlock()
	return slices.ContainsFunc(d.watched, (*Segment).copying)
}

func (s *Segment) unmapped() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mem == nil
}

// copying reports whether a worker is writing the segment: one that has died in the middle has lost its lock.
func (s *Segment) copying() (yes bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mem == nil {
		return false
	}
	_ = guard(func() error { // a file that shrank has no writer
		yes = State(s.load(offState)) == Writing
		return nil
	})
	held := unix.Flock_t{Type: unix.F_RDLCK}
	return yes && unix.FcntlFlock(uintptr(s.fd), unix.F_OFD_GETLK, &held) == nil && held.Type != unix.F_UNLCK
}
