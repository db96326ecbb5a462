package commit

import (
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/checkpointd/fsx"
)

const (
	// cacheLimit is about how many bytes a Cache takes: fifteen thousand steps of 64 files.
	cacheLimit = 16 << 20
	// stampGrain is longer than the timestamp granularity of any file system.
	stampGrain = 3 * time.Second
)

// Cache remembers the essence of manifests, so that a commit does not read those of all steps that stay. The zero value
// is ready. Any number of Stores may share one, for any directories.
type Cache struct {
	mu   sync.Mutex
	dirs map[string]memory

	lockless atomic.Bool // a lock was not answered at all: none is asked for any more
}

// memory are cached manifests by directory entry: a file that was replaced has another entry, and is not found.
type memory map[fsx.Entry]*brief

// brief is a manifest without the fields that do not affect other steps.
type brief struct {
	Manifest           // without the files, and fields that matter for its own step only
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

// meets is false if the two have no file in common, as with steps in separate directories.
func (b *brief) meets(o *brief) bool { return b.first <= o.last && o.first <= b.last }

// bytes estimates the memory of b in a Cache.
func (b *brief) bytes() int {
	return 512 + len(b.ID) + len(b.Epoch) + len(b.first) + len(b.last) + 8*len(b.sums)
}

func (m memory) bytes() (n int) {
	for _, b := range m {
		n += b.bytes()
	}
	return n
}

// known returns the cached manifests of a directory, which do not change. A nil Cache has none.
func (c *Cache) known(dir string) memory {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dirs[dir]
}

// remember replaces the cached manifests of a directory, as far as there is room: other directories are forgotten
// first, then steps of this one.
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
