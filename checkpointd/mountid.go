package checkpointd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/internal/openfile"
)

// mountIdentity are the inodes, by path, of a directory and of its parents at the time of a commit. If the directory is
// deleted, its parents keep their inodes. If its storage is unmounted, a parent has another inode.
type mountIdentity map[string]inode

type inode struct {
	Dev uint64 `json:"dev"`
	Ino uint64 `json:"ino"`
}

func inodeOf(path string) (inode, error) {
	fi, err := os.Lstat(path)
	if err != nil {
		return inode{}, err
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return inode{}, errors.ErrUnsupported
	}
	return inode{uint64(st.Dev), st.Ino}, nil
}

// mountIdentityOf returns the identity of a directory without links. Paths that cannot be read are left out.
func mountIdentityOf(dir string) mountIdentity {
	g := mountIdentity{}
	for path := dir; ; path = filepath.Dir(path) {
		if id, err := inodeOf(path); err == nil {
			g[path] = id
		}
		if path == filepath.Dir(path) {
			return g
		}
	}
}

// matches reports whether the lowest directory that still exists, of dir and its parents, has the recorded inode.
func (g mountIdentity) matches(dir string) bool {
	for path := dir; ; path = filepath.Dir(path) {
		id, err := inodeOf(path)
		if !errors.Is(err, fs.ErrNotExist) || path == filepath.Dir(path) {
			was, known := g[path]
			return err == nil && known && was == id
		}
	}
}

// mounts knows the directories that the job of this launcher has committed to, each with its identity at that time.
type mounts struct {
	log     *slog.Logger
	storage *storage
	path    string // of usedFile

	mu       sync.Mutex
	launcher string // the last one that led
	used     map[string]mountIdentity
}

// usedFile is the file of the runtime directory by which the next daemon of the same launcher knows the directories
// that were committed to.
const usedFile = "used"

type usedJSON struct {
	Launcher string                   `json:"launcher"`
	Dirs     map[string]mountIdentity `json:"dirs"`
}

func newMounts(log *slog.Logger, st *storage, path string) *mounts {
	var n usedJSON
	b, err := openfile.Read(path, maxRecord)
	if err != nil || json.Unmarshal(b, &n) != nil || n.Dirs == nil {
		n = usedJSON{Dirs: map[string]mountIdentity{}}
	}
	return &mounts{log: log, storage: st, path: path, launcher: n.Launcher, used: n.Dirs}
}

// check fails when a directory has lost all its commits and its identity does not match. Then its storage is not
// mounted, and the next mount would hide the files written now. A directory that was deleted is created again.
func (ms *mounts) check(dir string) error {
	ms.mu.Lock()
	g, known := ms.used[dir]
	ms.mu.Unlock()
	if !known || ms.storage.store.Used(dir) {
		return nil
	}
	if root, err := ms.storage.fs.Resolve(dir); err == nil && g.matches(root) {
		ms.mu.Lock()
		defer ms.mu.Unlock()
		delete(ms.used, dir) // until the next commit
		ms.keepLocked()
		ms.log.Warn("the checkpoint directory was deleted, making it anew", "dir", dir)
		return nil
	}
	return fmt.Errorf("%s has none of the checkpoints that were committed to it: mount it, or make %s to begin anew",
		dir, commit.MetaDir(dir))
}

// use records that a directory was committed to.
func (ms *mounts) use(dir string, at mountIdentity) {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	if g, known := ms.used[dir]; !known || len(g) == 0 {
		ms.used[dir] = at
		ms.keepLocked()
	}
}

// lead forgets all directories when another launcher leads: its job may have emptied them.
func (ms *mounts) lead(launcher string) {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	if launcher == "" || launcher != ms.launcher {
		ms.launcher = launcher
		clear(ms.used)
		ms.keepLocked()
	}
}

// keepLocked writes the file, or removes it when there is nothing to record.
func (ms *mounts) keepLocked() {
	if len(ms.used) == 0 {
		_ = os.Remove(ms.path)
		return
	}
	b, err := json.Marshal(usedJSON{ms.launcher, ms.used})
	if err == nil {
		err = openfile.Replace(ms.path, b, 0o600)
	}
	if err != nil {
		ms.log.Debug("the next daemon will not know what was committed to", "err", err)
	}
}
