package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/cmd/internal/pytree"
)

// pythonTree is a tree of packages within this program that workers import.
type pythonTree struct {
	pytree.Source
	what  string // for people
	loss  string // what workers lack without it
	after bool   // what the user's PYTHONPATH has comes first
}

// pythonPath is the PYTHONPATH of the workers: the user's, with trees of ours before and after it. A tree is put on
// disk when it is asked for, once, where all launchers of this user have it, or else in a temporary directory.
type pythonPath struct {
	shmDir        string
	log           *slog.Logger
	known         []string // names of the trees that were asked for
	before, after []string
	releases      []func() error
	wg            sync.WaitGroup // tidy
}

// add puts a tree on the path. A launcher that can write nowhere says so and goes on.
func (p *pythonPath) add(t pythonTree) {
	if slices.Contains(p.known, t.Name) {
		return
	}
	p.known = append(p.known, t.Name)
	dir, err := p.place(t)
	switch {
	case err != nil:
		p.log.Warn("no place for the "+t.what+": "+t.loss, "shm_dir", p.shmDir, "err", err)
	case t.after:
		p.after = append(p.after, dir)
	default:
		p.before = append(p.before, dir)
	}
}

func (p *pythonPath) place(t pythonTree) (dir string, err error) {
	if base, err := shm.UserDir(p.shmDir); err == nil {
		tree, err := t.Take(base)
		if err == nil {
			p.releases = append(p.releases, tree.Release)
			return tree.Dir(), nil
		}
		p.log.Warn("no room for the "+t.what+" in shared memory", "shm_dir", p.shmDir, "err", err)
	}
	temporary, err := os.MkdirTemp("", "dlrover-python-")
	if err != nil {
		return "", err
	}
	p.releases = append(p.releases, func() error { return os.RemoveAll(temporary) })
	dir = filepath.Join(temporary, t.Name)
	return dir, t.Extract(dir)
}

// environ sets PYTHONPATH in an environment block, unless nothing is to be added to it.
func (p *pythonPath) environ(env []string) []string {
	if len(p.before)+len(p.after) == 0 {
		return env
	}
	path := slices.Clone(p.before)
	for _, kv := range slices.Backward(env) {
		if user, ok := strings.CutPrefix(kv, "PYTHONPATH="); ok {
			if user != "" {
				path = append(path, user)
			}
			break
		}
	}
	return append(env, "PYTHONPATH="+strings.Join(append(path, p.after...), string(os.PathListSeparator)))
}

// treeAge is how long the trees of other versions are kept.
const treeAge = 10 * time.Minute

// tidy removes, in the background, what launchers of other versions have left.
func (p *pythonPath) tidy() {
	p.wg.Go(func() {
		base, err := shm.UserDir(p.shmDir)
		if err == nil {
			err = pytree.Tidy(base, treeAge)
		}
		if err != nil {
			p.log.Debug("remove the Python packages of other versions", "err", err)
		}
	})
}

func (p *pythonPath) close() {
	p.wg.Wait()
	for _, release := range p.releases {
		_ = release()
	}
}
