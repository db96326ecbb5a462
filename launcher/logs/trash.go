package logs

import (
	"io/fs"
	"log/slog"
	"path/filepath"
	"sync"
	"time"
)

// trashGrace is how long a restart, or the end, waits for the removal of an empty directory.
const trashGrace = time.Second

// trash removes directories without content, one at a time and in its own goroutine. Removing takes as long as the file
// system likes, and neither a restart nor a stop may hang on it. After the first removal that takes longer than
// trashGrace nothing more is removed, or waited for; its goroutine ends when the file system answers.
type trash struct {
	remove func(dir string) error
	log    *slog.Logger

	mu   sync.Mutex
	dir  string        // that is being removed, or was
	gone chan struct{} // closed when its removal has ended; nil before the first
	slow bool
}

// put removes dir unless a non-empty file is in it. The caller waits for the removal before this one: otherwise
// directories made faster than they are removed would pile up.
func (t *trash) put(dir string) {
	if !t.empty() {
		return
	}
	gone := make(chan struct{})
	t.mu.Lock()
	t.dir, t.gone = dir, gone
	t.mu.Unlock()
	go func() {
		defer close(gone)
		if hasContent(dir) {
			return
		}
		if err := t.remove(dir); err != nil {
			t.log.Debug("cannot remove an empty log directory", "dir", dir, "err", err)
		}
	}()
}

// empty waits for the last removal; false if that takes too long.
func (t *trash) empty() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.gone == nil || t.slow {
		return !t.slow
	}
	select {
	case <-t.gone:
	case <-time.After(trashGrace):
		t.slow = true
		t.log.Warn("removing an empty log directory takes too long: it and those after it are left", "dir", t.dir)
	}
	return !t.slow
}

// hasContent reports whether a non-empty file is under dir, or may be.
func hasContent(dir string) bool {
	found := false
	err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err == nil && info.Size() > 0 {
			found = true
			return fs.SkipAll
		}
		return err
	})
	return found || err != nil
}
