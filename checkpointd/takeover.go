package checkpointd

import (
	"context"
	"maps"
	"path/filepath"
	"slices"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/shm"
)

// takeOver takes over from an earlier daemon: saves that the disk still waits for, and unfinished commits.
func (d *Daemon) takeOver() {
	resumed, dirs, epochs := d.loadPrepared(), map[string]bool{}, map[string]bool{}
	d.eachHeld(func(_ string, _ *segment, _ shm.Header, m shm.Meta) { dirs[m.Dir], epochs[m.Epoch] = true, true })
	for _, j := range resumed {
		dirs[j.meta.Dir], epochs[j.meta.Epoch] = true, true
	}
	d.mu.Lock()
	d.foundEpochs = slices.Collect(maps.Keys(epochs))
	d.mu.Unlock()
	for _, dir := range slices.Sorted(maps.Keys(dirs)) {
		d.recoverDir(d.ctx, dir, resumed...)
	}
	for _, j := range resumed {
		d.launch(j)
	}
	d.eachHeld(func(_ string, s *segment, h shm.Header,
		m shm.Meta) { // the other shards of an interrupted breakpoint save
		if m.Primary && slices.ContainsFunc(resumed, func(j *save) bool { return j.meta.Save == m.Save }) {
			d.start(s, h, m)
		}
	})
	d.scan()
}

// recoverDir finishes or removes interrupted commits in dir, except those of resumed saves.
func (d *Daemon) recoverDir(ctx context.Context, dir string, resumed ...*save) {
	d.mu.Lock()
	done := d.recovered[dir]
	d.recovered[dir] = true
	d.mu.Unlock()
	if done {
		return
	}
	live := func(id string) bool {
		return d.working(id) || d.workerWrites(id) || slices.ContainsFunc(resumed,
			func(j *save) bool { return j.meta.Save == id && !d.begun(j) })
	}
	res, err := bounded(ctx, func() (commit.Recovered, error) {
		defer d.lockDirectory(dir)()
		return d.store.Recover(ctx, dir, live)
	})
	if err != nil {
		d.log.Warn("cannot finish interrupted commits", "dir", dir, "err", err)
	}
	if len(res.Forward) > 0 {
		d.log.Info("finished interrupted commits", "dir", dir, "saves", res.Forward)
	}
}

// workerWrites reports whether a worker of this node is writing a save by itself: until that is over it keeps a file
// locked (inline.py).
func (d *Daemon) workerWrites(id string) bool {
	files, err := filepath.Glob(filepath.Join(d.cfg.Dir.Path(), "writing-"+id+".*"))
	return err == nil && slices.ContainsFunc(files, locked)
}

// begun reports whether a save can only be completed.
func (d *Daemon) begun(j *save) bool {
	begun, err := d.store.Begun(j.meta.Dir, j.meta.Save)
	return begun && err == nil
}

// working reports whether a save is on its way through this daemon.
func (d *Daemon) working(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.ContainsFunc(d.saves, func(j *save) bool { return j.meta.Save == id && !j.phase.terminal() })
}
