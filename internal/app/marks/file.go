package marks

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/app/nodehealth"
	"dlrover-run/internal/openfile"
)

// The names in the directory.
const (
	fileName  = "nodes.json"
	tempName  = "nodes.json.new"
	lockName  = "nodes.lock"
	probeName = "nodes.probe"
)

// file is nodes.json in a directory that no other process writes to while the lock is held.
type file struct {
	dir  string
	lock *os.File

	mu     sync.Mutex // of the probes
	probed time.Time
	bad    error
}

// openFile takes the directory, which it makes if need be.
func openFile(dir string) (*file, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data directory %s: %w; give one that can be made, or is there", dir, err)
	}
	lock, err := openfile.Open(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %w; give one that this user may write to", dir, err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = errors.New("another dlrover-master uses it; end that one, or give this one a directory of its own")
		}
		return nil, fmt.Errorf("data directory %s: %w", dir, err)
	}
	return &file{dir: dir, lock: lock}, nil
}

func (f *file) close() { _ = f.lock.Close() }

func (f *file) path() string { return filepath.Join(f.dir, fileName) }

// load reads the Registry, a new one if there is no file.
func (f *file) load(policy nodehealth.Config) (*nodehealth.Registry, error) {
	data, err := openfile.Read(f.path(), nodehealth.MaxSnapshot)
	if errors.Is(err, os.ErrNotExist) {
		return nodehealth.New(policy), nil
	}
	var registry *nodehealth.Registry
	if err == nil {
		registry, err = nodehealth.Restore(policy, data)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w; nothing was changed: move the file away to begin anew, or put a good one there",
			f.path(), err)
	}
	return registry, nil
}

// take returns the write of a Registry as it is now.
func (f *file) take(g *nodehealth.Registry) (write func() error, err error) {
	data, err := g.Snapshot()
	return func() error { return f.save(data) }, err
}

// save replaces the file. After an error the old one is still there.
func (f *file) save(data []byte) error {
	temp := filepath.Join(f.dir, tempName)
	if err := replace(temp, data); err != nil {
		_ = os.Remove(temp)
		return err
	}
	if err := os.Rename(temp, f.path()); err != nil {
		return err
	}
	return syncDir(f.dir)
}

// replace makes a file anew with data, on the disk.
func replace(path string, data []byte) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) { // of a daemon that was killed
		return err
	}
	out, err := openfile.Open(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = out.Write(data)
	if err == nil {
		err = out.Sync()
	}
	return errors.Join(err, out.Close())
}

// syncDir puts the names in a directory on the disk.
func syncDir(dir string) error {
	d, err := os.OpenFile(dir, unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// probeEvery bounds how often the directory is tried: any caller may ask for that.
const probeEvery = 2 * time.Second

// probe reports why the directory cannot be written to.
func (f *file) probe() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if now := time.Now(); f.probed.IsZero() || now.Sub(f.probed) >= probeEvery {
		f.probed = now
		path := filepath.Join(f.dir, probeName)
		f.bad = replace(path, []byte("ok\n"))
		_ = os.Remove(path)
	}
	return f.bad
}
