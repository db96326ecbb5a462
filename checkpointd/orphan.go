package checkpointd

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/openfile"
)

// A daemon that a launcher has started outlives it for as long as there is something to save:
//
//	led -- its connection ends without a good-bye, or Gone is closed --> awaitLauncher
//	awaitLauncher -- a launcher connects ------------------------------> led
//	awaitLauncher -- orphanGrace is over ------------------------------> saveAll, at most for orphanSaves
//	saveAll       -- a launcher connects ------------------------------> led; begun saves continue
//	saveAll       -- all is saved, or time is over --------------------> Config.Orphaned, which ends the process
//
// A daemon that was spawned also ends when another launcher has locked the runtime directory, or that is gone.

// launcherConnected records the launcher's connection. The job of another launcher may have emptied its directory; the
// same launcher has only reconnected.
func (d *Daemon) launcherConnected(s *session, launcher string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.leaders[s] = struct{}{}
	if launcher == "" || launcher != d.launcher {
		d.launcher = launcher
		clear(d.used)
		d.keepUsedLocked()
	}
	d.changedLocked()
}

// launcherDisconnected handles the end of a launcher's connection. A live launcher reconnects within orphanGrace;
// without Config.Gone nothing else shows its death.
func (d *Daemon) launcherDisconnected(s *session) {
	d.mu.Lock()
	delete(d.leaders, s)
	d.mu.Unlock()
	switch {
	case !s.bye && d.cfg.Gone == nil:
		d.awaitLauncher(orphanGrace)
	case s.bye && d.cfg.Spawned && d.cfg.Orphaned != nil && d.ctx.Err() == nil:
		d.cfg.Orphaned(s.left) // it was about to end this daemon
	}
}

// watchLauncher waits for the death of the launcher, even if another process still holds its connections.
func (d *Daemon) watchLauncher() {
	select {
	case <-d.cfg.Gone:
		d.awaitLauncher(0)
	case <-d.ctx.Done():
	}
}

// launcherConnectedLocked reports whether a launcher is connected. Messages of a dead one may be read late.
func (d *Daemon) launcherConnectedLocked() bool {
	select {
	case <-d.cfg.Gone:
		return false
	default:
		return len(d.leaders) > 0
	}
}

// awaitLauncher waits for a connection of a launcher. Without one it saves memory to disk, and calls
// Config.Orphaned.
func (d *Daemon) awaitLauncher(patience time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.orphan || d.cfg.Orphaned == nil || d.ctx.Err() != nil {
		return
	}
	d.orphan = true
	d.wg.Go(func() {
		for {
			left, saved := d.saveOrphaned(patience)
			d.mu.Lock()
			here := d.launcherConnectedLocked()
			if saved || here || d.ctx.Err() != nil {
				d.orphan = false
				d.mu.Unlock()
				if saved && !here && d.ctx.Err() == nil {
					d.cfg.Orphaned(left)
				}
				return
			}
			d.mu.Unlock() // one came and is gone again
		}
	})
}

// saveOrphaned saves memory to disk when there is no launcher. saved is false when one connected before everything
// was saved.
func (d *Daemon) saveOrphaned(patience time.Duration) (left int, saved bool) {
	ctx, cancel := context.WithTimeout(d.ctx, orphanSaves)
	defer cancel()
	var moved, came atomic.Bool
	if d.cfg.Spawned {
		d.wg.Go(func() { d.watchDirectory(ctx, func() { moved.Store(true); cancel() }) })
	}
	grace, stop := context.WithTimeout(ctx, patience)
	defer stop()
	if d.until(grace, d.launcherConnectedLocked) == nil {
		return 0, false
	}
	d.wg.Go(func() { // saving stops when one connects
		if d.until(ctx, d.launcherConnectedLocked) == nil {
			came.Store(true)
			cancel()
		}
	})
	if ctx.Err() == nil {
		d.log.Warn("the launcher is gone; saving what is in memory")
		left = d.saveAll(ctx)
	}
	if moved.Load() {
		left = max(left, 1)
	}
	return left, !came.Load()
}

// saveAll writes memory to disk, after the saves of an earlier daemon, until ctx ends.
func (d *Daemon) saveAll(ctx context.Context) (left int) {
	select {
	case <-d.takenOver:
	case <-ctx.Done():
		return 1
	}
	d.Breakpoint("the launcher is gone", false)
	return d.Drain(ctx, orphanSaves)
}

// watchDirectory calls end when another launcher has taken the directory over: its daemon waits until this one ends,
// and then continues with the segments. It also calls end when the directory is gone: then no daemon can find them.
func (d *Daemon) watchDirectory(ctx context.Context, end func()) {
	t := time.NewTicker(yieldEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
		now, err := os.Lstat(d.cfg.Dir.Path())
		switch {
		case errors.Is(err, os.ErrNotExist), err == nil && d.dirInfo != nil && !os.SameFile(now, d.dirInfo):
			d.log.Warn("the runtime directory is gone, and with it what was not written", "dir", d.cfg.Dir.Path())
			end()
			return
		case locked(filepath.Join(d.cfg.Dir.Path(), "owner")):
			d.log.Info("another launcher has taken over")
			end()
			return
		}
	}
}

// locked reports whether another process has locked a file.
func locked(path string) bool {
	f, err := openfile.Open(path, os.O_RDONLY, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}
