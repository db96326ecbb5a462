package checkpointd

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/shm"
)

// prepare tries once to write all files of the shard under temporary names, unless a newer save has taken the segment.
// The segment is pinned meanwhile, and when all is written until release is called.
func (d *Daemon) prepare(ctx context.Context, j *save) (entry commit.Entry, release func(), err error) {
	p, err := j.seg.pin(ctx, j.seq)
	if err != nil {
		return entry, nil, err
	}
	select {
	case d.writeSem <- struct{}{}:
		defer func() { <-d.writeSem }()
	case <-ctx.Done():
		p.Release()
		return entry, nil, ctx.Err()
	}
	d.setPhase(j, writing)
	release = p.Hold()
	entry, err = bounded(ctx, func() (commit.Entry, error) {
		defer p.Release() // here: when storage hangs, write uses the pin for longer than we wait
		return d.write(ctx, j, p)
	})
	if err != nil {
		release()
		return entry, nil, err
	}
	return entry, release, nil
}

// write writes the files of p and marks the shard as prepared. It may continue after its ctx has ended: see bounded.
func (d *Daemon) write(ctx context.Context, j *save, p *shm.Pinned) (entry commit.Entry, err error) {
	s := saveOf(j)
	entry.Shard = j.meta.Shard
	paths := make([]string, len(j.meta.Files))
	for i, f := range j.meta.Files {
		paths[i] = f.Path
	}
	if err := d.checkMounted(j.meta.Dir); err != nil {
		return entry, err
	}
	tmps, err := d.store.Plan(s, j.meta.Shard, paths)
	if err != nil {
		return entry, err
	}
	defer func() {
		if errors.Is(err, fs.ErrNotExist) { // others have ended the save, and removed the plan that lists these
			err = errors.Join(err, d.remove(tmps))
		}
	}()
	d.recordMount(j)
	begin := time.Now()
	for i, f := range j.meta.Files {
		crc, err := d.writeFile(ctx, j, p, i, tmps[i])
		if err != nil {
			return entry, err
		}
		entry.Files = append(entry.Files, commit.FileEntry{Path: f.Path, Size: f.Len, CRC: crc, Shard: j.meta.Shard,
			Tmp: tmps[i]})
	}
	if err := d.store.Prepared(s, entry); err != nil {
		return entry, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.count.Flushes++
	d.count.FlushedBytes += j.bytes
	d.count.WriteTime += time.Since(begin)
	return entry, nil
}

func (d *Daemon) remove(paths []string) (err error) {
	for _, path := range paths {
		err = errors.Join(err, d.cfg.FS.Remove(path))
	}
	return err
}

// writeFile writes file i of p and returns its CRC-32. The checksums run ahead of the disk.
func (d *Daemon) writeFile(ctx context.Context, j *save, p *shm.Pinned, i int, tmp string) (uint32, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sealing := p.Seal(ctx, i)
	defer sealing.Sum() // it uses the pin
	src := &source{bytes: p.File(i), ready: sealing.Ready, d: d, j: j}
	if err := d.cfg.FS.WriteFrom(ctx, tmp, src); err != nil {
		cancel()
		return 0, err
	}
	return sealing.Sum()
}

// source is a file's image as an fsx.Source that counts the requested bytes.
type source struct {
	bytes []byte
	ready func(ctx context.Context, end int64) error // waits until the checksums up to end are in bytes
	d     *Daemon
	j     *save
	at    int64 // requested bytes
}

func (s *source) Len() int64    { return int64(len(s.bytes)) }
func (s *source) Bytes() []byte { return s.bytes }

func (s *source) Ready(ctx context.Context, end int64) error {
	if err := s.ready(ctx, end); err != nil {
		return err
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	s.j.done += end - s.at
	s.at = end
	return nil
}
