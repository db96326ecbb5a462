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

	"dlrover-run/checkpointd/commit"
	"dlrover-run/internal/openfile"
)

const (
	dirLockTimeout = 30 * time.Second // for a worker that completes a save of its own, and may be stopped
	dirLockPoll    = 10 * time.Millisecond
	// claimTimeout is short: on a network file system the claim of a dead host may outlive it by a minute.
	claimTimeout = time.Second
)

// dirLocks are the locks of checkpoint directories, for this daemon and for the workers of this node.
type dirLocks struct {
	life *lifetime
	log  *slog.Logger
	path string // of the runtime directory, which has the files that workers lock

	mu   sync.Mutex
	held map[string]*sync.Mutex // by directory
	// claims are this daemon's, by directory.
	claims map[string]*claim
}

// claim is a daemon's right to change the files of a checkpoint directory. Its saves share it: the daemons of two jobs
// do not.
type claim struct {
	mu    sync.Mutex
	saves int
	file  *os.File // nil: it could not be had
}

// claim waits until no other job commits a save to a directory. The files would be of one job, and the manifest of the
// other, if both did so at the same moment.
func (l *dirLocks) claim(dir string) (done func()) {
	l.mu.Lock()
	c := l.claims[dir]
	if c == nil {
		c = new(claim)
		l.claims[dir] = c
	}
	l.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.saves++; c.saves == 1 {
		c.file = l.take(dir, filepath.Join(commit.MetaDir(dir), "claim"), claimTimeout)
	}
	return c.end
}

func (c *claim) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.saves--; c.saves == 0 {
		_ = c.file.Close() // nil has an error for it
	}
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
	// Workers of this node (engine.py) lock this file while they complete a save. Without it a tracker may go back.
	sum := sha256.Sum256([]byte(dir))
	f := l.take(dir, filepath.Join(l.path, "turn-"+hex.EncodeToString(sum[:8])), dirLockTimeout)
	return func() {
		_ = f.Close() // nil has an error for it
		lock.Unlock()
	}
}

// take locks a file for a directory; nil: it cannot be locked, and the save is completed without.
func (l *dirLocks) take(dir, path string, most time.Duration) *os.File {
	f, err := openfile.Open(path, os.O_CREATE|os.O_RDWR, 0o600)
	for begun := time.Now(); err == nil; time.Sleep(dirLockPoll) {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			return f
		}
		if (errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR)) && time.Since(begun) < most &&
			l.life.ctx.Err() == nil {
			err = nil
		}
	}
	_ = f.Close()
	l.log.Debug("a save is completed out of turn", "dir", dir, "err", err)
	return nil
}
