package checkpointd

import (
	"errors"
	"io/fs"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// lanes bound how many shards are written to one mount at a time. So slow storage delays no save to other storage.
type lanes struct {
	local int // on a local file system

	mu      sync.Mutex
	byMount map[uint64]chan struct{} // by device number; each has room for the shards that are being written
}

func newLanes(local int) *lanes { return &lanes{local: local, byMount: map[uint64]chan struct{}{}} }

// of returns the lane of a directory without links, which may not exist yet. It asks the storage, which may hang.
func (l *lanes) of(dir string) (chan struct{}, error) {
	id, err := inodeOf(dir)
	for errors.Is(err, fs.ErrNotExist) && dir != filepath.Dir(dir) {
		dir = filepath.Dir(dir)
		id, err = inodeOf(dir)
	}
	if err != nil {
		return nil, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return nil, &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return l.lane(id.Dev, uint32(st.Type)), nil
}

func (l *lanes) lane(dev uint64, kind uint32) chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byMount[dev] == nil {
		l.byMount[dev] = make(chan struct{}, l.writers(kind))
	}
	return l.byMount[dev]
}

// writers is one where a mount has one connection to its server: several files would share it, and all end later.
func (l *lanes) writers(kind uint32) int {
	switch kind {
	case unix.NFS_SUPER_MAGIC, unix.SMB_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC, unix.CIFS_SUPER_MAGIC, unix.V9FS_MAGIC,
		unix.FUSE_SUPER_MAGIC:
		return 1
	}
	return l.local
}
