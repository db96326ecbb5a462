package crashfs

import (
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
)

// Choice is the effect of a crash on the changes that were not synced. A number from 0 on is the seed of a random
// choice: of the names any subset, of the data of each file all, a part, zeros or nothing.
type Choice int64

const (
	// Process is the end of the process alone: nothing is lost, and nothing becomes durable.
	Process Choice = -1 - iota
	// Lost is a power failure that takes all of them.
	Lost
	// Kept is a power failure just after all of them had reached the disk.
	Kept
	// Torn is a power failure that takes the data, while the names had reached the disk.
	Torn
)

func (c Choice) String() string {
	if c < 0 && c >= Torn {
		return [...]string{"process", "lost", "kept", "torn"}[-1-c]
	}
	return fmt.Sprintf("random-%d", int64(c))
}

// Crash returns the file system that is found after a crash at this point, without faults. f stays as it is.
func (f *FS) Crash(c Choice) *FS {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := &survivor{choice: c, rng: rand.New(rand.NewPCG(uint64(c), 1)), copies: map[*inode]*inode{}}
	root := f.root
	if c == Process {
		root = s.copy(root)
	} else {
		root = s.found(root)
	}
	return &FS{root: root, clock: f.clock, crashAt: -1, tmp: f.tmp}
}

// survivor makes the inodes of the file system after a crash.
type survivor struct {
	choice Choice
	rng    *rand.Rand
	copies map[*inode]*inode
}

// copy is for the end of the process.
func (s *survivor) copy(n *inode) *inode {
	if n == nil || s.copies[n] != nil {
		return s.copies[n]
	}
	c := &inode{dir: n.dir, modified: n.modified, data: n.data, synced: n.synced}
	s.copies[n] = c
	if n.dir {
		c.names, c.stable = s.copyAll(n.names), s.copyAll(n.stable)
	}
	for _, p := range n.pending {
		c.pending = append(c.pending, change{del: p.del, set: p.set, node: s.copy(p.node)})
	}
	return c
}

func (s *survivor) copyAll(names map[string]*inode) map[string]*inode {
	copies := make(map[string]*inode, len(names))
	for name, n := range names {
		copies[name] = s.copy(n)
	}
	return copies
}

// found is for a power failure. Everything that is found is durable.
func (s *survivor) found(n *inode) *inode {
	if !n.dir {
		return &inode{modified: n.modified, data: s.data(n), synced: true}
	}
	names := maps.Clone(n.stable)
	for _, p := range n.pending {
		if s.name() {
			p.apply(names)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) { // sorted: a seed means the same each time
		names[name] = s.found(names[name])
	}
	return &inode{dir: true, modified: n.modified, names: names, stable: maps.Clone(names)}
}

// name decides about one change of a name.
func (s *survivor) name() bool {
	switch s.choice {
	case Lost:
		return false
	case Kept, Torn:
		return true
	}
	return s.rng.IntN(2) == 0
}

// data decides about the content of one file.
func (s *survivor) data(n *inode) []byte {
	if n.synced || s.choice == Kept {
		return n.data
	}
	if s.choice == Lost || s.choice == Torn {
		return nil
	}
	switch s.rng.IntN(4) {
	case 0:
		return n.data
	case 1:
		return n.data[:s.rng.IntN(len(n.data)+1)]
	case 2:
		return make([]byte, len(n.data))
	}
	return nil
}

// Fingerprint is equal for two file systems with the same content and the same durable content, regardless of times. A
// test can skip a crash whose result it has already checked.
func (f *FS) Fingerprint() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := &fingerprint{ids: map[*inode]int{}}
	s.inode(f.root)
	h := fnv.New64a()
	h.Write(s.b)
	return h.Sum64()
}

// fingerprint hashes all relevant parts of an inode and its children.
type fingerprint struct {
	b   []byte
	ids map[*inode]int
}

func (s *fingerprint) inode(n *inode) {
	if n == nil {
		return
	}
	if id, known := s.ids[n]; known {
		s.b = append(s.b, '#', byte(id), byte(id>>8))
		return
	}
	s.ids[n] = len(s.ids)
	s.b = append(s.b, '(')
	s.b = strconv.AppendBool(s.b, n.dir)
	s.b = strconv.AppendBool(s.b, n.synced)
	s.b = strconv.AppendInt(s.b, int64(len(n.data)), 10)
	s.b = append(s.b, n.data...)
	s.names(n.names)
	s.names(n.stable)
	for _, p := range n.pending {
		s.b = append(s.b, p.del...)
		s.b = append(s.b, '>')
		s.b = append(s.b, p.set...)
		s.inode(p.node)
	}
	s.b = append(s.b, ')')
}

func (s *fingerprint) names(names map[string]*inode) {
	for _, name := range slices.Sorted(maps.Keys(names)) {
		s.b = append(s.b, name...)
		s.b = append(s.b, '=')
		s.inode(names[name])
	}
	s.b = append(s.b, '|')
}
