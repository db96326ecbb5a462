package checkpointd

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/openfile"
)

const (
	dirLockTimeout = 30 * time.Second // for a worker that completes a save of its own, and may be stopped
	dirLockPoll    = 10 * time.Millisecond
)

// dirLocks are the locks of checkpoint directories, for this daemon and for the workers of this node.
type dirLocks struct {
	life *lifetime
	log  *slog.Logger
	path string // of the runtime directory, which has the files that workers lock

	mu   sync.Mutex
	held map[string]*sync.Mutex // by directory
}

// lock waits until no other save of a directory is being completed on this node: each reads the trackers, and
// may then move them. A worker that writes a save by itself takes the same lock.
func (l *dirLocks) lock(dir string) (done func()) {
	l.mu.Lock()
	if l.held[dir] == nil {
		l.held[dir] = new(sync.Mutex)
	}
	lock := l.held[dir]
	l.mu.Unlock()
	lock.Lock()
	f := l.lockAgainstWorkers(dir)
	return func() {
		_ = f.Close() // nil has an error for it
		lock.Unlock()
	}
}

// lockAgainstWorkers takes the file lock that workers of this node (engine.py) hold while they complete a save. nil:
// the lock cannot be had; at worst a tracker goes back.
func (l *dirLocks) lockAgainstWorkers(dir string) *os.File {
	sum := sha256.Sum256([]byte(dir))
	path := filepath.Join(l.path, "turn-"+hex.EncodeToString(sum[:8]))
	f, err := openfile.Open(path, os.O_CREATE|os.O_RDWR, 0o600)
	for begun := time.Now(); err == nil; time.Sleep(dirLockPoll) {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			return f
		}
		if (errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR)) && time.Since(begun) < dirLockTimeout &&
			l.life.ctx.Err() == nil {
			err = nil
		}
	}
	_ = f.Close()
	l.log.Debug("a save is completed out of turn", "dir", dir, "err", err)
	return nil
}
