package checkpointd

import (
	"context"
	"errors"
	"io/fs"
	"sync/atomic"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/background"
)

// writer writes the files of shards, a few shards at a time.
type writer struct {
	lanes   *lanes
	count   *counters
	saves   *saves
	storage *storage
	mounts  *mounts
	restart *restart
}

// prepare tries once to write all files of the shard under temporary names, unless a newer save has taken the segment.
// The segment is pinned meanwhile, and when all is written until release is called.
func (w *writer) prepare(ctx context.Context, j *save) (entry commit.Entry, release func(), err error) {
	p, err := j.seg.pin(ctx, j.seq)
	if err != nil {
		return entry, nil, err
	}
	leave, err := w.enter(ctx, j)
	if err != nil {
		p.Release()
		return entry, nil, err
	}
	defer leave()
	w.saves.setPhase(j, writing)
	release = p.Hold()
	entry, err = bounded(ctx, func() (commit.Entry, error) {
		defer p.Release() // here: when storage hangs, write uses the pin for longer than we wait
		return w.write(ctx, j, p)
	})
	if err != nil {
		release()
		return entry, nil, err
	}
	return entry, release, nil
}

// enter waits until it is j's turn: the mount of its directory takes one more shard.
func (w *writer) enter(ctx context.Context, j *save) (leave func(), err error) {
	if j.afterRestart {
		if err := w.restart.wait(ctx); err != nil {
			return nil, err
		}
	}
	free, err := bounded(ctx, func() (chan struct{}, error) {
		root, err := w.storage.fs.Resolve(j.meta.Dir)
		if err != nil {
			return nil, err
		}
		return w.lanes.of(root)
	})
	if err != nil {
		return nil, err
	}
	select {
	case free <- struct{}{}:
		return func() { <-free }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// write writes the files of p and marks the shard as prepared. It may continue after its ctx has ended: see bounded.
func (w *writer) write(ctx context.Context, j *save, p *shm.Pinned) (entry commit.Entry, err error) {
	s := saveOf(j)
	entry.Shard = j.meta.Shard
	paths := make([]string, len(j.meta.Files))
	for i, f := range j.meta.Files {
		paths[i] = f.Path
	}
	if err := w.mounts.check(j.meta.Dir); err != nil {
		return entry, err
	}
	tmps, err := w.storage.store.Plan(s, j.meta.Shard, paths)
	if err != nil {
		return entry, err
	}
	defer func() {
		if errors.Is(err, fs.ErrNotExist) { // others have ended the save, and removed the plan that lists these
			err = errors.Join(err, w.remove(tmps))
		}
	}()
	if root, err := w.storage.fs.Resolve(j.meta.Dir); err == nil { // after the commit it may have changed
		id := mountIdentityOf(root)
		j.mount.Store(&id)
	}
	begin := time.Now()
	for i, f := range j.meta.Files {
		crc, err := w.writeFile(ctx, j, p, i, tmps[i])
		if err != nil {
			return entry, err
		}
		entry.Files = append(entry.Files, commit.FileEntry{Path: f.Path, Size: f.Len, CRC: crc, Shard: j.meta.Shard,
			Tmp: tmps[i]})
	}
	if err := w.storage.store.Prepared(s, entry); err != nil {
		return entry, err
	}
	w.count.add(func(n *Counters) {
		n.Flushes++
		n.FlushedBytes += j.bytes
		n.WriteTime += time.Since(begin)
	})
	return entry, nil
}

func (w *writer) remove(paths []string) (err error) {
	for _, path := range paths {
		err = errors.Join(err, w.storage.fs.Remove(path))
	}
	return err
}

// writeFile writes file i of p and returns its CRC-32. The checksums run ahead of the disk.
func (w *writer) writeFile(ctx context.Context, j *save, p *shm.Pinned, i int, tmp string) (uint32, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sealing := p.Seal(ctx, i)
	defer sealing.Sum() // it uses the pin
	src := &source{bytes: p.File(i), ready: sealing.Ready, yield: p.Yielder().Wait, done: &j.done}
	if err := background.Run(func() error { return w.storage.fs.WriteFrom(ctx, tmp, src) }); err != nil {
		cancel()
		return 0, err
	}
	return sealing.Sum()
}

// source is a file's image as an fsx.Source that counts the requested bytes.
type source struct {
	bytes []byte
	ready func(ctx context.Context, end int64) error // waits until the checksums up to end are in bytes
	yield func(ctx context.Context) error            // waits for workers that save
	done  *atomic.Int64
	at    int64 // requested bytes
}

func (s *source) Len() int64    { return int64(len(s.bytes)) }
func (s *source) Bytes() []byte { return s.bytes }

func (s *source) Ready(ctx context.Context, end int64) error {
	if err := s.ready(ctx, end); err != nil {
		return err
	}
	if err := s.yield(ctx); err != nil {
		return err
	}
	s.done.Add(end - s.at)
	s.at = end
	return nil
}
