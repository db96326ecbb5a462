// Package pypath puts Python packages of this program on the workers' PYTHONPATH.
package pypath

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/pytree"
	"dlrover-run/internal/tempdir"
)

// Tree is a tree of packages within this program that workers import.
type Tree struct {
	pytree.Source
	What  string // for people
	Loss  string // the loss for workers without it
	After bool   // it comes after the user's PYTHONPATH
}

// Path is the PYTHONPATH of the workers: the user's, with trees of ours before and after it. A tree is written
// once, in the background, on the first request: into the cache of this user, or else into a temporary directory.
// Add and Environ belong to one goroutine.
type Path struct {
	shmDir string
	log    *slog.Logger
	trees  []*placedTree
	wg     sync.WaitGroup // those that are being put on disk
	tidier sync.WaitGroup
	env    []string
}

// New returns a Path whose cache is below shmDir.
func New(shmDir string, log *slog.Logger) *Path { return &Path{shmDir: shmDir, log: log} }

// placedTree is a tree on disk, once its goroutine has ended.
type placedTree struct {
	Tree
	dir     string // "": it has no place
	release func() error
}

// Add puts a tree on the path. A launcher that can write nowhere logs that and continues.
func (p *Path) Add(t Tree) {
	if slices.ContainsFunc(p.trees, func(o *placedTree) bool { return o.Name == t.Name }) {
		return
	}
	placed := &placedTree{Tree: t, release: func() error { return nil }}
	p.trees = append(p.trees, placed)
	p.wg.Go(func() { p.place(placed) })
}

func (p *Path) place(t *placedTree) {
	base, err := shm.UserDir(p.shmDir)
	if err == nil {
		tree, err := t.Take(base)
		if err == nil {
			t.dir, t.release = tree.Dir(), tree.Release
			return
		}
		p.log.Warn("no room for the "+t.What+" in shared memory", "shm_dir", p.shmDir, "err", err)
	}
	if err := t.temporary(); err != nil {
		p.log.Warn("no place for the "+t.What+": "+t.Loss, "shm_dir", p.shmDir, "err", err)
	}
}

func (t *placedTree) temporary() error {
	root, err := tempdir.Make("dlrover-python-")
	if err != nil {
		return err
	}
	t.release = func() error { return os.RemoveAll(root) }
	dir := filepath.Join(root, t.Name)
	if err := t.Extract(dir); err != nil {
		return err
	}
	t.dir = dir
	return nil
}

// Environ sets PYTHONPATH in an environment block, unless there is nothing to add. It waits for the writes of Add.
func (p *Path) Environ(env []string) []string {
	p.wg.Wait()
	var before, after []string
	for _, t := range p.trees {
		switch {
		case t.dir == "":
		case t.After:
			after = append(after, t.dir)
		default:
			before = append(before, t.dir)
		}
	}
	if len(before)+len(after) == 0 {
		return env
	}
	for _, kv := range slices.Backward(env) {
		if user, ok := strings.CutPrefix(kv, "PYTHONPATH="); ok {
			if user != "" {
				before = append(before, user)
			}
			break
		}
	}
	return append(env, "PYTHONPATH="+strings.Join(append(before, after...), string(os.PathListSeparator)))
}

// Dir is where a tree is, after Environ; "": it has no place.
func (p *Path) Dir(name string) string {
	for _, t := range p.trees {
		if t.Name == name {
			return t.dir
		}
	}
	return ""
}

// SetImportEnv sets the variables for a process that only imports: they have the trees do their work in it.
func (p *Path) SetImportEnv(env ...string) { p.env = env }

// ImportEnv are the variables of SetImportEnv.
func (p *Path) ImportEnv() []string { return p.env }

// treeAge is how long the trees of other versions are kept.
const treeAge = 10 * time.Minute

// Tidy removes, in the background, the trees of launchers of other versions.
func (p *Path) Tidy() {
	p.tidier.Go(func() {
		base, err := shm.UserDir(p.shmDir)
		if err == nil {
			err = pytree.Tidy(base, treeAge)
		}
		if err != nil {
			p.log.Debug("remove the Python packages of other versions", "err", err)
		}
	})
}

// Close removes temporary trees, and gives up those of the cache.
func (p *Path) Close() {
	p.wg.Wait()
	p.tidier.Wait()
	for _, t := range p.trees {
		_ = t.release()
	}
}
