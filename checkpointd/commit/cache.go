package commit

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"time"

	"dlrover-run/checkpointd/fsx"
)

const (
	// cacheLimit is about how many bytes a Cache takes: fifteen thousand steps of 64 files.
	cacheLimit = 16 << 20
	// stampGrain is longer than the time between two stamps that any file system can tell apart.
	stampGrain = 3 * time.Second
)

// Cache remembers manifests in short, so that a commit does not read those of all steps that stay. The zero value is
// ready. Any number of Stores may share one, for any directories.
type Cache struct {
	mu   sync.Mutex
	dirs map[string]memory
}

// memory is manifests in short, by what a listing says of their files: one that was replaced is not found any more.
type memory map[fsx.Entry]*brief

// brief is what the fate of other steps depends on.
type brief struct {
	Manifest           // without the files, and what else only its own fate depends on
	first, last string // of the paths of the files
	sums        []uint64
}

func briefOf(m Manifest) *brief {
	b := &brief{sums: make([]uint64, 0, len(m.Files)), Manifest: Manifest{Committed: m.Committed, Save: Save{
		ID: m.ID, Epoch: m.Epoch, Step: m.Step, Saved: m.Saved, Retention: m.Retention,
	}}}
	if len(m.Files) > 0 {
		b.first, b.last = m.Files[0].Path, m.Files[0].Path
	}
	for _, f := range m.Files {
		b.first, b.last = min(b.first, f.Path), max(b.last, f.Path)
		b.sums = append(b.sums, pathSum(f.Path))
	}
	slices.Sort(b.sums)
	return b
}

// pathSum stands for a path. Two paths with the same would keep a file that should go; it does not happen.
func pathSum(path string) uint64 {
	sum := sha256.Sum256([]byte(path))
	return binary.LittleEndian.Uint64(sum[:])
}

func (b *brief) has(sum uint64) bool {
	_, ok := slices.BinarySearch(b.sums, sum)
	return ok
}

// meets is false if the two have no file in common. Those of steps with directories of their own do not meet.
func (b *brief) meets(o *brief) bool { return b.first <= o.last && o.first <= b.last }

// bytes is about what b takes as part of a Cache.
func (b *brief) bytes() int {
	return 512 + len(b.ID) + len(b.Epoch) + len(b.first) + len(b.last) + 8*len(b.sums)
}

func (m memory) bytes() (n int) {
	for _, b := range m {
		n += b.bytes()
	}
	return n
}

// known returns what is remembered of a directory. It does not change. A nil Cache remembers nothing.
func (c *Cache) known(dir string) memory {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dirs[dir]
}

// remember puts now in the place of what was known of a directory, as far as there is room: first the other directories
// are forgotten, then steps of this one.
func (c *Cache) remember(dir string, now memory) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.dirs, dir)
	size := now.bytes()
	all := size
	for _, m := range c.dirs {
		all += m.bytes()
	}
	if c.dirs == nil || all > cacheLimit {
		c.dirs = map[string]memory{}
	}
	for e, b := range now {
		if size > cacheLimit {
			size -= b.bytes()
			delete(now, e)
		}
	}
	if len(now) > 0 {
		c.dirs[dir] = now
	}
}

// briefs returns the committed steps of the directory, the newest commit first. It reads the manifests that the cache
// does not know. Damaged ones are left out.
func (d directory) briefs() ([]*brief, error) {
	es, err := d.list(d.meta())
	if err != nil {
		return nil, fmt.Errorf("list the checkpoints: %w", err)
	}
	// Who replaces a manifest after this listing stamps it no earlier than the newest one in the listing. What has an
	// older stamp, by enough to tell, will have another one then.
	settled := lastCommit(es).Add(-stampGrain)
	known, now := d.cache.known(d.root), memory{}
	var all []*brief
	for _, e := range es {
		step, ok := numbered(e, ".json")
		if !ok {
			continue
		}
		b, ok := known[e]
		if !ok {
			m, ok := d.committed(step)
			if !ok {
				continue
			}
			b = briefOf(m)
		}
		all = append(all, b)
		if e.ModTime.Before(settled) {
			now[e] = b
		}
	}
	d.cache.remember(d.root, now)
	slices.SortFunc(all, func(a, b *brief) int { return newestFirst(a.Manifest, b.Manifest) })
	return all, nil
}
