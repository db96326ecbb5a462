package checkpointd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/retry"
)

// segment is a file of the runtime directory that this daemon has open.
type segment struct {
	seg *shm.Segment
	// seen is the newest seq that was given to the writers and to the peers. Guarded by Daemon.scanning.
	seen uint64
}

// pin protects the save seq from its writer. A writer publishes before it unlocks and may lose the CPU between: as long
// as a busy segment has the same seq the save is there, and is waited for until ctx ends. errSuperseded: it is gone.
func (s *segment) pin(ctx context.Context, seq uint64) (*shm.Pinned, error) {
	pause := retry.Backoff{First: busyFirst, Most: busyMost}
	for {
		p, err := s.seg.Pin()
		if err == nil && p.Header.Seq == seq {
			return p, nil
		}
		if err == nil {
			p.Release()
			return nil, errSuperseded
		}
		if h, again := s.seg.Header(); errors.Is(err, shm.ErrClosed) || errors.Is(err, shm.ErrIncomplete) ||
			again == nil && h.Seq != seq {
			return nil, fmt.Errorf("%w (%w)", errSuperseded, err)
		}
		if !errors.Is(err, shm.ErrBusy) {
			return nil, err
		}
		if !pause.Wait(ctx) {
			return nil, fmt.Errorf("%w; %w", context.Cause(ctx), err)
		}
	}
}

// ours distinguishes a worker's segment from a copy of another node's.
func ours(name string) bool { return strings.HasPrefix(name, "seg/") }

// rescan asks for another look at the segments; it never blocks.
func (d *Daemon) rescan() {
	select {
	case d.scans <- struct{}{}:
	default:
	}
}

func (d *Daemon) scanLoop() {
	for {
		select {
		case <-d.scans:
			d.scan()
			d.dropPartial()
		case <-d.ctx.Done():
			return
		}
	}
}

// scan opens new segments, forgets removed ones and queues new saves for the disk and the peers.
func (d *Daemon) scan() {
	d.scanning.Lock()
	defer d.scanning.Unlock()
	names, err := d.cfg.Dir.Names()
	if err != nil {
		d.log.Warn("cannot list the segments", "err", err)
		return
	}
	present := map[string]bool{}
	for _, name := range names {
		present[name] = true
		s, err := d.open(name)
		if err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				d.log.Warn("cannot use a segment", "segment", name, "err", err)
			}
			continue
		}
		if ours(name) {
			d.queue(s)
		}
	}
	d.forget(present)
}

// open returns the segment of that name, opened again when the worker has replaced it.
func (d *Daemon) open(name string) (*segment, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.segs[name]
	if s != nil && !s.seg.Replaced() {
		return s, nil
	}
	seg, err := d.cfg.Dir.Open(name)
	if err != nil {
		return nil, err
	}
	if s != nil {
		_ = s.seg.Close() // pins of it stay valid until they are released
	}
	s = &segment{seg: seg}
	d.segs[name] = s
	return s, nil
}

func (d *Daemon) forget(present map[string]bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, s := range d.segs {
		if !present[name] {
			_ = s.seg.Close()
			delete(d.segs, name)
		}
	}
}

// queue gives a new complete save to the writers, if the disk wants it, and to the peers.
func (d *Daemon) queue(s *segment) {
	h, err := s.seg.Header()
	if err != nil || h.State != shm.Complete || s.seen >= h.Seq {
		return
	}
	h, m, err := s.seg.Peek()
	if err != nil {
		return // being written again; its worker will report it
	}
	s.seen = h.Seq
	if h.Disk && h.Durable < h.Seq {
		d.start(s, h, m)
	}
	d.replicate(h.Saved, m)
}

// eachHeld calls f with every complete save. It keeps no writer away, so the save may be another one by the time it is
// used.
func (d *Daemon) eachHeld(f func(name string, s *segment, h shm.Header, m shm.Meta)) {
	names, _ := d.cfg.Dir.Names() // none is as good as an error: nothing is held
	for _, name := range names {
		s, err := d.open(name)
		if err != nil {
			continue
		}
		if h, m, err := s.seg.Peek(); err == nil {
			f(name, s, h, m)
		}
	}
}
