package checkpointd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
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

// checkMounted fails when a directory has lost all its commits and its identity does not match: its storage is not
// mounted, and files written now would be hidden by the next mount. A directory that was deleted is created again.
func (d *Daemon) checkMounted(dir string) error {
	d.mu.Lock()
	g, known := d.used[dir]
	d.mu.Unlock()
	if !known || d.store.Used(dir) {
		return nil
	}
	if root, err := d.cfg.FS.Resolve(dir); err == nil && g.matches(root) {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.used, dir) // until the next commit
		d.keepUsedLocked()
		d.log.Warn("the checkpoint directory was deleted, making it anew", "dir", dir)
		return nil
	}
	return fmt.Errorf("%s has none of the checkpoints that were committed to it: mount it, or make %s to begin anew",
		dir, commit.MetaDir(dir))
}

// recordMount records the mount identity of j's directory while j is written: after the commit it may have changed.
func (d *Daemon) recordMount(j *save) {
	root, err := d.cfg.FS.Resolve(j.meta.Dir)
	if err != nil {
		return // then nothing bears it
	}
	g := mountIdentityOf(root)
	d.mu.Lock()
	defer d.mu.Unlock()
	j.mount = g
}

// deleted reports whether the directory of j was deleted since j was written.
func (d *Daemon) deleted(j *save) bool {
	d.mu.Lock()
	g := j.mount
	d.mu.Unlock()
	root, err := d.cfg.FS.Resolve(j.meta.Dir)
	return err == nil && !d.store.Used(j.meta.Dir) && g.matches(root)
}

// useLocked records that the directory of j was committed to.
func (d *Daemon) useLocked(j *save) {
	if g, known := d.used[j.meta.Dir]; !known || len(g) == 0 {
		d.used[j.meta.Dir] = j.mount
		d.keepUsedLocked()
	}
}

// usedFile is the file of the runtime directory by which the next daemon of the same launcher knows the directories
// that were committed to.
const usedFile = "used"

type usedJSON struct {
	Launcher string                   `json:"launcher"`
	Dirs     map[string]mountIdentity `json:"dirs"`
}

// keepUsedLocked writes the file, or removes it when there is nothing to record.
func (d *Daemon) keepUsedLocked() {
	path := filepath.Join(d.cfg.Dir.Path(), usedFile)
	if len(d.used) == 0 {
		_ = os.Remove(path)
		return
	}
	b, err := json.Marshal(usedJSON{d.launcher, d.used})
	if err == nil {
		err = openfile.Replace(path, b, 0o600)
	}
	if err != nil {
		d.log.Debug("the next daemon will not know what was committed to", "err", err)
	}
}

func (d *Daemon) readUsed() (launcher string, used map[string]mountIdentity) {
	var n usedJSON
	b, err := openfile.Read(filepath.Join(d.cfg.Dir.Path(), usedFile), maxRecord)
	if err != nil || json.Unmarshal(b, &n) != nil || n.Dirs == nil {
		return "", map[string]mountIdentity{}
	}
	return n.Launcher, n.Dirs
}
