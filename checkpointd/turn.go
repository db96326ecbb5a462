package checkpointd

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/openfile"
)

const (
	turnPatience = 30 * time.Second // for a worker that completes a save of its own, and may be stopped
	turnLook     = 10 * time.Millisecond
)

// turn waits until no other save of a directory is being completed on this node: each looks at what the trackers name,
// and may then move them. A worker that writes a save by itself takes its turn, too.
func (d *Daemon) turn(dir string) (done func()) {
	d.mu.Lock()
	if d.completing[dir] == nil {
		d.completing[dir] = new(sync.Mutex)
	}
	turn := d.completing[dir]
	d.mu.Unlock()
	turn.Lock()
	f := d.turnOfWorkers(dir)
	return func() {
		_ = f.Close() // nil has an error for it
		turn.Unlock()
	}
}

// turnOfWorkers locks the file by which workers of this node (engine.py) wait for us and we for them. nil: it cannot be
// had, and the worst is a tracker that goes back.
func (d *Daemon) turnOfWorkers(dir string) *os.File {
	sum := sha256.Sum256([]byte(dir))
	path := filepath.Join(d.cfg.Dir.Path(), "turn-"+hex.EncodeToString(sum[:8]))
	f, err := openfile.Open(path, os.O_CREATE|os.O_RDWR, 0o600)
	for begun := time.Now(); err == nil; time.Sleep(turnLook) {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			return f
		}
		if (errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR)) && time.Since(begun) < turnPatience &&
			d.ctx.Err() == nil {
			err = nil
		}
	}
	_ = f.Close()
	d.log.Debug("a save is completed out of turn", "dir", dir, "err", err)
	return nil
}
