package checkpointd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/retry"
)

// segment is a file of the runtime directory that this daemon has open.
type segment struct {
	seg *shm.Segment
	// seen is the newest seq that was given to the writers and to the peers. Guarded by segments.scanning.
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

// fresh returns the save of the segment if it is complete and new. The lock segments.scanning is held.
func (s *segment) fresh() (h shm.Header, m shm.Meta, ok bool) {
	h, err := s.seg.Header()
	if err != nil || h.State != shm.Complete || s.seen >= h.Seq {
		return h, m, false
	}
	if h, m, err = s.seg.Peek(); err != nil {
		return h, m, false // being written again; its worker will report it
	}
	s.seen = h.Seq
	return h, m, true
}

// ours distinguishes a worker's segment from a copy of another node's.
func ours(name string) bool { return strings.HasPrefix(name, "seg/") }

// segments are the files of shared memory that this daemon has open.
type segments struct {
	dir   *shm.Dir
	log   *slog.Logger
	scans chan struct{} // asks for another look at the segments

	scanning sync.Mutex // held while the segments are read; before mu
	mu       sync.Mutex
	byName   map[string]*segment
}

func newSegments(dir *shm.Dir, log *slog.Logger) *segments {
	return &segments{dir: dir, log: log, scans: make(chan struct{}, 1), byName: map[string]*segment{}}
}

// rescan asks for another look at the segments; it never blocks.
func (g *segments) rescan() {
	select {
	case g.scans <- struct{}{}:
	default:
	}
}

// scan opens new segments, forgets removed ones, and calls found for each new complete save of a worker.
func (g *segments) scan(found func(s *segment, h shm.Header, m shm.Meta)) {
	g.scanning.Lock()
	defer g.scanning.Unlock()
	names, err := g.dir.Names()
	if err != nil {
		g.log.Warn("cannot list the segments", "err", err)
		return
	}
	present := map[string]bool{}
	for _, name := range names {
		present[name] = true
		s, err := g.open(name)
		if err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				g.log.Warn("cannot use a segment", "segment", name, "err", err)
			}
			continue
		}
		if !ours(name) {
			continue
		}
		if h, m, ok := s.fresh(); ok {
			found(s, h, m)
		}
	}
	g.forget(present)
}

// open returns the segment of that name, opened again when the worker has replaced it.
func (g *segments) open(name string) (*segment, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.byName[name]
	if s != nil && !s.seg.Replaced() {
		return s, nil
	}
	seg, err := g.dir.Open(name)
	if err != nil {
		return nil, err
	}
	if s != nil {
		_ = s.seg.Close() // pins of it stay valid until they are released
	}
	s = &segment{seg: seg}
	g.byName[name] = s
	return s, nil
}

func (g *segments) forget(present map[string]bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for name, s := range g.byName {
		if !present[name] {
			_ = s.seg.Close()
			delete(g.byName, name)
		}
	}
}

// each calls f with every complete save. It keeps no writer away, so the save may be another one by the time it is
// used.
func (g *segments) each(f func(name string, s *segment, h shm.Header, m shm.Meta)) {
	names, _ := g.dir.Names() // none is as good as an error: nothing is held
	for _, name := range names {
		s, err := g.open(name)
		if err != nil {
			continue
		}
		if h, m, err := s.seg.Peek(); err == nil {
			f(name, s, h, m)
		}
	}
}

// pinned pins a save of ours, nil if it is no longer here.
func (g *segments) pinned(ctx context.Context, of origin, save string) (pin *shm.Pinned) {
	ctx, cancel := context.WithTimeout(ctx, pinPatience)
	defer cancel()
	g.each(func(name string, s *segment, h shm.Header, m shm.Meta) {
		if pin == nil && ours(name) && m.Save == save && m.Rank == of.rank && m.Dir == of.dir {
			pin, _ = s.pin(ctx, h.Seq) // nil: it is gone
		}
	})
	return pin
}

// holds lists the saves that this node can give to others.
func (g *segments) holds() []coordinator.Copy {
	var out []coordinator.Copy
	g.each(func(_ string, _ *segment, h shm.Header, m shm.Meta) {
		c := coordinator.Copy{Rank: m.Rank, Shard: m.Shard, Save: m.Save, Step: m.Step, Dir: m.Dir,
			SavedNS: h.Saved.UnixNano(), Shards: m.Shards}
		if m.Resize == "any" {
			c.Rank = anyRank
		}
		if !slices.Contains(out, c) {
			out = append(out, c)
		}
	})
	return out
}

// shards lists the shards in memory.
func (g *segments) shards() map[shardOf]bool {
	here := map[shardOf]bool{}
	g.each(func(_ string, _ *segment, _ shm.Header, m shm.Meta) { here[shardOf{m.Save, m.Shard}] = true })
	return here
}

func (g *segments) latestOrders() orders {
	latest := orders{}
	g.each(func(name string, _ *segment, h shm.Header, m shm.Meta) {
		if at := (stream{m.Epoch, m.Dir, m.Shard, m.Shards}); ours(name) && m.Primary &&
			h.Saved.After(latest[at].saved) {
			l := latest[at]
			l.saved, l.order = h.Saved, m.Order
			latest[at] = l
		}
	})
	return latest
}

// restorable lists the saves in memory that the rank of r may load.
func (g *segments) restorable(r request) []restorable {
	out := []restorable{}
	g.each(func(name string, _ *segment, h shm.Header, m shm.Meta) {
		if m.Dir != r.Dir || m.Rank != r.Rank && m.Resize != "any" {
			return
		}
		out = append(out, restorable{Seg: name, Seq: h.Seq, Step: m.Step, Save: m.Save, Rank: m.Rank, Shard: m.Shard,
			Shards:    m.Shards,
			WorldSize: m.WorldSize, Layout: m.Layout, Resize: m.Resize, SavedNS: h.Saved.UnixNano(),
			Framework: m.Framework})
	})
	return out
}

// adopt keeps the segment of a received copy open: its memory is mapped already.
func (g *segments) adopt(seg *shm.Segment) {
	g.mu.Lock()
	old := g.byName[seg.Name()]
	if old == nil || old.seg != seg {
		g.byName[seg.Name()] = &segment{seg: seg}
	}
	g.mu.Unlock()
	if old != nil && old.seg != seg {
		_ = old.seg.Close() // pins of it stay valid until they are released
	}
	g.rescan()
}

// remove removes the files.
func (g *segments) remove() {
	names, err := g.dir.Names()
	for _, name := range names {
		err = errors.Join(err, g.dir.Remove(name))
	}
	if err != nil {
		g.log.Warn("cannot remove the segments", "err", err)
	}
}

// close closes all segments.
func (g *segments) close() { g.forget(nil) }

func (g *segments) status() []SegmentStatus {
	out := []SegmentStatus{}
	g.each(func(name string, _ *segment, h shm.Header, m shm.Meta) {
		out = append(out, SegmentStatus{Name: name, Rank: m.Rank, Step: m.Step, Saved: h.Saved, Bytes: h.ImageLen,
			Durable: h.Durable >= h.Seq, Copy: !ours(name), Dir: m.Dir})
	})
	return out
}
