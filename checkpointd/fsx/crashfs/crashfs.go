// Package crashfs is a model of a POSIX file system in memory, for tests of crashes.
//
// It separates durable state from volatile state. The data of a file is durable after its fsync, a name (made, renamed
// or removed) after the fsync of its directory. Crash returns a file system that may be found afterwards. A change that
// was not synced may have happened or not, independent of the others; only a rename is atomic. It also makes operations
// fail or block. Links are not modelled.
package crashfs

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"dlrover-run/checkpointd/fsx"
)

// errCrashed is returned by every operation after the crash.
var errCrashed = errors.New("crashed")

// tick is how much the model's clock advances with each change.
const tick = time.Millisecond

// Op is one operation. The changes are numbered from 0; N of a read is the number of the next change.
type Op struct {
	N int
	// Kind is create, allocate, write, fsync, mkdir, rename, remove or syncdir; or read, size or list.
	Kind string
	Path string
}

func (o Op) String() string { return fmt.Sprintf("%d %s %s", o.N, o.Kind, o.Path) }

// FS is one file system. It is safe for concurrent use.
type FS struct {
	mu      sync.Mutex
	root    *inode
	clock   time.Time
	log     []Op
	crashAt int // the change that does not happen any more; -1: none
	crashed bool
	tmp     int // for the temporary names
	fault   func(Op) error
	locks   map[string]chan struct{} // by path; a held one is full
}

var _ fsx.FS = (*FS)(nil)

// inode is a file or a directory.
type inode struct {
	dir      bool
	modified time.Time

	names   map[string]*inode // of a directory: as seen now,
	stable  map[string]*inode // as durable,
	pending []change          // and the changes that lead from stable to names

	data   []byte
	synced bool // data is durable
}

// change is a change of the names of a directory: del is removed, set is added.
type change struct {
	del, set string
	node     *inode
}

func (c change) apply(names map[string]*inode) {
	delete(names, c.del)
	if c.set != "" {
		names[c.set] = c.node
	}
}

// New returns an empty file system. Its clock starts at an arbitrary time.
func New() *FS {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	return &FS{root: newDir(start), clock: start, crashAt: -1}
}

func newDir(now time.Time) *inode {
	return &inode{dir: true, modified: now, names: map[string]*inode{}, stable: map[string]*inode{}}
}

// CrashAt makes change n, and everything after it, fail with errCrashed.
func (f *FS) CrashAt(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.crashAt = n
}

// Crashed reports whether the crash has happened.
func (f *FS) Crashed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.crashed
}

// Fault sets a function that is called before each operation and may return an error for it, or block. nil: none.
func (f *FS) Fault(fault func(Op) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fault = fault
}

// FailAt makes change n fail with err, for instance syscall.ENOSPC. The changes after it work.
func (f *FS) FailAt(n int, err error) {
	f.Fault(func(o Op) error {
		if o.N == n && !o.Reads() {
			return err
		}
		return nil
	})
}

// BlockAt makes change n wait until release is called. reached is closed when it waits.
func (f *FS) BlockAt(n int) (reached <-chan struct{}, release func()) {
	at, free := make(chan struct{}), make(chan struct{})
	f.Fault(func(o Op) error {
		if o.N == n && !o.Reads() {
			close(at)
			<-free
		}
		return nil
	})
	return at, sync.OnceFunc(func() { close(free) })
}

// Reads reports whether the operation changes nothing.
func (o Op) Reads() bool { return o.Kind == "read" || o.Kind == "size" || o.Kind == "list" }

// Log returns the changes so far.
func (f *FS) Log() []Op {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.log)
}

// Ops returns the number of changes so far.
func (f *FS) Ops() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.log)
}

// Now is the time on the model's clock.
func (f *FS) Now() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.clock
}

// Advance moves the model's clock.
func (f *FS) Advance(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.clock = f.clock.Add(d)
}

// Tree returns all files with their content; a directory is a name that ends in "/".
func (f *FS) Tree() map[string]string {
	f.mu.Lock()
	defer f.mu.Unlock()
	tree := map[string]string{}
	f.root.tree("/", tree)
	return tree
}

func (n *inode) tree(path string, into map[string]string) {
	for name, child := range n.names {
		if child.dir {
			into[path+name+"/"] = ""
			child.tree(path+name+"/", into)
		} else {
			into[path+name] = string(child.data)
		}
	}
}

// Put places a durable file, and the directories above it, as if it had always been there: no operation is counted.
func (f *FS) Put(path, data string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	dir := f.root
	names := strings.Split(strings.TrimPrefix(path, "/"), "/")
	for _, name := range names[:len(names)-1] {
		if dir.names[name] == nil {
			dir.put(name, newDir(f.clock))
		}
		dir = dir.names[name]
	}
	dir.put(names[len(names)-1], &inode{data: []byte(data), synced: true, modified: f.clock})
}

func (n *inode) put(name string, child *inode) {
	n.names[name], n.stable[name] = child, child
}

// begin counts a change, or lets a read pass. It returns with the lock held unless there is an error.
func (f *FS) begin(kind, path string) error {
	f.mu.Lock()
	op := Op{N: len(f.log), Kind: kind, Path: path}
	f.crashed = f.crashed || op.N == f.crashAt && !op.Reads()
	if f.crashed {
		f.mu.Unlock()
		return errCrashed
	}
	if !op.Reads() {
		f.log = append(f.log, op)
		f.clock = f.clock.Add(tick)
	}
	if fault := f.fault; fault != nil {
		f.mu.Unlock()
		if err := fault(op); err != nil {
			return pathError(kind, path, err)
		}
		f.mu.Lock()
	}
	return nil
}

// find returns the inode of a path.
func (f *FS) find(op, path string) (*inode, error) {
	n := f.root
	for _, name := range strings.Split(filepath.Clean(path), "/") {
		switch {
		case name == "":
		case !n.dir:
			return nil, pathError(op, path, syscall.ENOTDIR)
		case n.names[name] == nil:
			return nil, pathError(op, path, syscall.ENOENT)
		default:
			n = n.names[name]
		}
	}
	return n, nil
}

// parent returns the directory of a path, and the last name in it.
func (f *FS) parent(op, path string) (*inode, string, error) {
	n, err := f.find(op, filepath.Dir(path))
	if err == nil && !n.dir {
		err = pathError(op, path, syscall.ENOTDIR)
	}
	return n, filepath.Base(path), err
}

// change makes one change to the names of a directory.
func (f *FS) change(dir *inode, c change) {
	c.apply(dir.names)
	dir.pending = append(dir.pending, c)
	dir.modified = f.clock
}

// Resolve implements fsx.FS.
func (f *FS) Resolve(dir string) (string, error) {
	if !filepath.IsAbs(dir) {
		return "", pathError("resolve", dir, syscall.EINVAL)
	}
	return filepath.Clean(dir), nil
}

// MkdirAll implements fsx.FS.
func (f *FS) MkdirAll(dir string) error {
	f.mu.Lock()
	n, err := f.find("mkdir", dir)
	f.mu.Unlock()
	if err == nil && !n.dir {
		return pathError("mkdir", dir, syscall.ENOTDIR)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := f.MkdirAll(filepath.Dir(dir)); err != nil {
		return err
	}
	if err := f.mkdir(dir); err != nil {
		return err
	}
	return f.SyncDir(filepath.Dir(dir))
}

func (f *FS) mkdir(dir string) error {
	if err := f.begin("mkdir", dir); err != nil {
		return err
	}
	defer f.mu.Unlock()
	p, base, err := f.parent("mkdir", dir)
	if err == nil && p.names[base] == nil {
		f.change(p, change{set: base, node: newDir(f.clock)})
	}
	return err
}

// WriteFrom implements fsx.FS. The content is written in two halves.
func (f *FS) WriteFrom(ctx context.Context, path string, src fsx.Source) error {
	if err := f.Remove(path); err != nil {
		return err
	}
	err := f.create(path, func(n *inode) error { return f.fill(ctx, path, n, src) })
	if err != nil {
		return errors.Join(err, f.Remove(path))
	}
	return nil
}

func (f *FS) fill(ctx context.Context, path string, n *inode, src fsx.Source) error {
	if err := f.op("allocate", path, func() {}); err != nil {
		return err
	}
	half := src.Len() / 2
	for _, end := range []int64{half, src.Len()} {
		if err := errors.Join(src.Ready(ctx, end), ctx.Err()); err != nil {
			return pathError("write", path, err)
		}
		if err := f.op("write", path, func() { n.data = slices.Clone(src.Bytes()[:end]) }); err != nil {
			return err
		}
	}
	return f.op("fsync", path, func() { n.synced = true })
}

// create makes an empty file and lets fill write it.
func (f *FS) create(path string, fill func(*inode) error) error {
	if err := f.begin("create", path); err != nil {
		return err
	}
	p, base, err := f.parent("create", path)
	if err == nil && p.names[base] != nil {
		err = pathError("create", path, syscall.EEXIST)
	}
	n := &inode{modified: f.clock}
	if err == nil {
		f.change(p, change{set: base, node: n})
	}
	f.mu.Unlock()
	if err != nil {
		return err
	}
	return fill(n)
}

// op makes one change that has no result.
func (f *FS) op(kind, path string, effect func()) error {
	if err := f.begin(kind, path); err != nil {
		return err
	}
	defer f.mu.Unlock()
	effect()
	return nil
}

// WriteFile implements fsx.FS.
func (f *FS) WriteFile(path string, data []byte) error {
	f.mu.Lock()
	f.tmp++
	tmp := filepath.Join(filepath.Dir(path), fmt.Sprintf(".%s.w%016x.tmp", filepath.Base(path), f.tmp))
	f.mu.Unlock()
	err := f.create(tmp, func(n *inode) error {
		if err := f.op("write", tmp, func() { n.data = slices.Clone(data) }); err != nil {
			return err
		}
		return f.op("fsync", tmp, func() { n.synced = true })
	})
	if err == nil {
		err = f.Rename(tmp, path)
	}
	if err != nil {
		return errors.Join(err, f.Remove(tmp))
	}
	return f.SyncDir(filepath.Dir(path))
}

// Rename implements fsx.FS.
func (f *FS) Rename(from, to string) error {
	if filepath.Dir(from) != filepath.Dir(to) {
		return pathError("rename", from, syscall.EXDEV)
	}
	if err := f.begin("rename", to); err != nil {
		return err
	}
	defer f.mu.Unlock()
	p, base, err := f.parent("rename", from)
	if err != nil {
		return err
	}
	n := p.names[base]
	if n == nil {
		return pathError("rename", from, syscall.ENOENT)
	}
	if old := p.names[filepath.Base(to)]; old != nil && old.dir != n.dir {
		return pathError("rename", from, syscall.EISDIR)
	}
	f.change(p, change{del: base, set: filepath.Base(to), node: n})
	return nil
}

// SyncDir implements fsx.FS.
func (f *FS) SyncDir(dir string) error {
	if err := f.begin("syncdir", dir); err != nil {
		return err
	}
	defer f.mu.Unlock()
	n, err := f.find("sync", dir)
	if err != nil {
		return err
	}
	n.stable, n.pending = maps.Clone(n.names), nil
	return nil
}

// Remove implements fsx.FS. The attempt to remove a missing file is not counted as a change.
func (f *FS) Remove(path string) error {
	f.mu.Lock()
	_, err := f.find("remove", path)
	crashed := f.crashed
	f.mu.Unlock()
	if errors.Is(err, fs.ErrNotExist) && !crashed {
		return nil
	}
	if err := f.begin("remove", path); err != nil {
		return err
	}
	defer f.mu.Unlock()
	p, base, err := f.parent("remove", path)
	if err != nil || p.names[base] == nil {
		return err
	}
	if len(p.names[base].names) > 0 {
		return pathError("remove", path, syscall.ENOTEMPTY)
	}
	f.change(p, change{del: base})
	return nil
}

// read runs a function on the inode at path.
func (f *FS) read(kind, path string, dir bool, use func(*inode)) error {
	if err := f.begin(kind, path); err != nil {
		return err
	}
	defer f.mu.Unlock()
	n, err := f.find(kind, path)
	if err != nil {
		return err
	}
	if n.dir && !dir {
		return pathError(kind, path, fsx.ErrNotRegular)
	}
	if n.dir != dir {
		return pathError(kind, path, syscall.ENOTDIR)
	}
	use(n)
	return nil
}

// ReadFile implements fsx.FS.
func (f *FS) ReadFile(path string, limit int64) (b []byte, err error) {
	err = f.read("read", path, false, func(n *inode) { b = slices.Clone(n.data) })
	if int64(len(b)) > limit {
		return nil, pathError("read", path, fsx.ErrTooLong)
	}
	return b, err
}

// Size implements fsx.FS.
func (f *FS) Size(path string) (size int64, err error) {
	err = f.read("size", path, false, func(n *inode) { size = int64(len(n.data)) })
	return size, err
}

// List implements fsx.FS.
func (f *FS) List(dir string) (es []fsx.Entry, err error) {
	err = f.read("list", dir, true, func(n *inode) {
		for _, name := range slices.Sorted(maps.Keys(n.names)) {
			es = append(es, fsx.Entry{Name: name, Dir: n.names[name].dir, ModTime: n.names[name].modified})
		}
	})
	return es, err
}

// Lock implements fsx.FS. It makes no file, and is no operation.
func (f *FS) Lock(path string, patience time.Duration) (done func(), err error) {
	f.mu.Lock()
	if f.locks == nil {
		f.locks = map[string]chan struct{}{}
	}
	if f.locks[path] == nil {
		f.locks[path] = make(chan struct{}, 1)
	}
	held := f.locks[path]
	f.mu.Unlock()
	select {
	case held <- struct{}{}:
		return func() { <-held }, nil
	case <-time.After(patience):
		return nil, pathError("lock", path, syscall.EAGAIN)
	}
}

// Checksum implements fsx.FS.
func (f *FS) Checksum(ctx context.Context, path string) (crc uint32, size int64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, 0, pathError("read", path, err)
	}
	err = f.read("read", path, false, func(n *inode) { crc, size = crc32.ChecksumIEEE(n.data), int64(len(n.data)) })
	return crc, size, err
}

func pathError(op, path string, err error) error {
	return &fs.PathError{Op: op, Path: path, Err: err}
}
