package checkpointd

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"

	"dlrover-run/checkpointd/commit"
)

// recovery finishes or removes the commits that crashed processes have left in checkpoint directories.
type recovery struct {
	log     *slog.Logger
	storage *storage
	locks   *dirLocks
	path    string // of the runtime directory

	mu   sync.Mutex
	done map[string]bool // directories recovered since the world last changed
}

// reset makes every directory due again.
func (r *recovery) reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done = map[string]bool{}
}

// recover finishes or removes interrupted commits in dir, except those of live saves.
func (r *recovery) recover(ctx context.Context, dir string, live func(id string) bool) {
	r.mu.Lock()
	done := r.done[dir]
	r.done[dir] = true
	r.mu.Unlock()
	if done {
		return
	}
	res, err := bounded(ctx, func() (commit.Recovered, error) {
		defer r.locks.lock(dir)()
		return r.storage.store.Recover(ctx, dir, func(id string) bool { return live(id) || r.workerWrites(id) })
	})
	if err != nil {
		r.log.Warn("cannot finish interrupted commits", "dir", dir, "err", err)
	}
	if len(res.Forward) > 0 {
		r.log.Info("finished interrupted commits", "dir", dir, "saves", res.Forward)
	}
}

// workerWrites reports whether a worker of this node is writing a save by itself: until that is over it keeps a file
// locked (inline.py).
func (r *recovery) workerWrites(id string) bool {
	files, err := filepath.Glob(filepath.Join(r.path, "writing-"+id+".*"))
	return err == nil && slices.ContainsFunc(files, locked)
}
