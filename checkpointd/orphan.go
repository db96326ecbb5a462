package checkpointd

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/openfile"
)

// A daemon that a launcher has started outlives it for as long as there is something to save:
//
//	led -- its connection ends without a good-bye, or Gone is closed --> await
//	await   -- a launcher connects ------------------------------> led
//	await   -- orphanGrace is over ------------------------------> saveAll, at most for orphanSaves
//	saveAll -- a launcher connects ------------------------------> led; begun saves continue
//	saveAll -- all is saved, or time is over --------------------> Config.Orphaned, which ends the process
//
// A daemon that was spawned also ends when another launcher has locked the runtime directory, or that is gone.

// launchers watches over the launcher of this daemon.
type launchers struct {
	cfg     *Config
	life    *lifetime
	log     *slog.Logger
	dirInfo os.FileInfo                   // the runtime directory as it was found
	saveAll func(ctx context.Context) int // writes memory to disk until ctx ends; the number of saves left

	mu     sync.Mutex
	leads  map[*session]struct{} // connections of launchers
	orphan bool                  // the daemon waits for a launcher
}

// connect records the launcher's connection.
func (l *launchers) connect(s *session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leads[s] = struct{}{}
	l.life.notify()
}

// disconnect handles the end of a launcher's connection. A live launcher reconnects within orphanGrace; without
// Config.Gone nothing else shows its death.
func (l *launchers) disconnect(s *session) {
	l.mu.Lock()
	delete(l.leads, s)
	l.mu.Unlock()
	switch {
	case !s.bye && l.cfg.Gone == nil:
		l.await(orphanGrace)
	case s.bye && l.cfg.Spawned && l.cfg.Orphaned != nil && l.life.ctx.Err() == nil:
		l.cfg.Orphaned(s.left) // it was about to end this daemon
	}
}

// watch waits for the death of the launcher, even if another process still holds its connections.
func (l *launchers) watch() {
	select {
	case <-l.cfg.Gone:
		l.await(0)
	case <-l.life.ctx.Done():
	}
}

// connectedLocked reports whether a launcher is connected. Messages of a dead one may be read late.
func (l *launchers) connectedLocked() bool {
	select {
	case <-l.cfg.Gone:
		return false
	default:
		return len(l.leads) > 0
	}
}

func (l *launchers) connected() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.connectedLocked()
}

// await waits for a connection of a launcher. Without one it saves memory to disk, and calls Config.Orphaned.
func (l *launchers) await(patience time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.orphan || l.cfg.Orphaned == nil || l.life.ctx.Err() != nil {
		return
	}
	l.orphan = true
	l.life.wg.Go(func() {
		for {
			left, saved := l.saveOrphaned(patience)
			l.mu.Lock()
			here := l.connectedLocked()
			if saved || here || l.life.ctx.Err() != nil {
				l.orphan = false
				l.mu.Unlock()
				if saved && !here && l.life.ctx.Err() == nil {
					l.cfg.Orphaned(left)
				}
				return
			}
			l.mu.Unlock() // one came and is gone again
		}
	})
}

// saveOrphaned saves memory to disk when there is no launcher. saved is false when one connected before everything
// was saved.
func (l *launchers) saveOrphaned(patience time.Duration) (left int, saved bool) {
	ctx, cancel := context.WithTimeout(l.life.ctx, orphanSaves)
	defer cancel()
	var moved, came atomic.Bool
	if l.cfg.Spawned {
		l.life.wg.Go(func() { l.watchDirectory(ctx, func() { moved.Store(true); cancel() }) })
	}
	grace, stop := context.WithTimeout(ctx, patience)
	defer stop()
	if l.life.until(grace, l.connected) == nil {
		return 0, false
	}
	l.life.wg.Go(func() { // saving stops when one connects
		if l.life.until(ctx, l.connected) == nil {
			came.Store(true)
			cancel()
		}
	})
	if ctx.Err() == nil {
		l.log.Warn("the launcher is gone; saving what is in memory")
		left = l.saveAll(ctx)
	}
	if moved.Load() {
		left = max(left, 1)
	}
	return left, !came.Load()
}

// watchDirectory calls end when another launcher has taken the directory over: its daemon waits until this one ends,
// and then continues with the segments. It also calls end when the directory is gone: then no daemon can find them.
func (l *launchers) watchDirectory(ctx context.Context, end func()) {
	t := time.NewTicker(yieldEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
		now, err := os.Lstat(l.cfg.Dir.Path())
		switch {
		case errors.Is(err, os.ErrNotExist), err == nil && l.dirInfo != nil && !os.SameFile(now, l.dirInfo):
			l.log.Warn("the runtime directory is gone, and with it what was not written", "dir", l.cfg.Dir.Path())
			end()
			return
		case locked(filepath.Join(l.cfg.Dir.Path(), "owner")):
			l.log.Info("another launcher has taken over")
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
