// Package topology reads the file of --topology-file: lines of `asw psw ip`. The file may change while jobs run, by
// being written, replaced, or reached through another link, as the files of a Kubernetes ConfigMap are.
package topology

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"syscall"
	"time"

	"dlrover-run/internal/openfile"
	"dlrover-run/rendezvous"
)

// Interval is how often the file is looked at. A change counts when it has been the same twice, so that a file is not
// read while it is being written.
const Interval = 2 * time.Second

// maxFile bounds the file, in bytes: no cluster has that many nodes.
const maxFile = 64 << 20

// File is a topology file that has been read. A nil *File is not a topology.
type File struct {
	path  string
	first rendezvous.Topology
	tried stamp // of the file when it was last read, whether it could be used or not
	fixed bool  // a pipe, which can be read once
}

// Open reads the file at path; "" gives a nil File.
func Open(path string) (*File, error) {
	if path == "" {
		return nil, nil
	}
	f := &File{path: path, tried: stampOf(path)}
	if fi, err := os.Stat(path); err == nil {
		f.fixed = !fi.Mode().IsRegular()
	}
	var err error
	f.first, err = f.read()
	return f, err
}

// First is the topology that Open has read.
func (f *File) First() rendezvous.Topology {
	if f == nil {
		return nil
	}
	return f.first
}

// Follow calls changed with the file's topology whenever it may have changed, until ctx ends. An unusable file changes
// nothing: log gets one line for each change of it.
func (f *File) Follow(ctx context.Context, log *slog.Logger, changed func(rendezvous.Topology)) {
	if f == nil || f.fixed {
		return
	}
	look := time.NewTicker(Interval)
	defer look.Stop()
	for last := f.tried; ; {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
		now := stampOf(f.path)
		if now == last && now != f.tried {
			f.tried = now
			f.reload(log, changed)
		}
		last = now
	}
}

func (f *File) reload(log *slog.Logger, changed func(rendezvous.Topology)) {
	topo, err := f.read()
	if err != nil {
		log.Warn("the topology file has changed and cannot be used; what it said before stays", "err", err)
		return
	}
	log.Info("the topology file was read again; it counts for the next world that is sealed",
		"path", f.path, "nodes", len(topo))
	changed(topo)
}

func (f *File) read() (rendezvous.Topology, error) {
	read := openfile.ReadLinked
	if f.fixed {
		read = openfile.ReadNamed
	}
	text, err := read(f.path, maxFile)
	if err != nil {
		return nil, fmt.Errorf("--topology-file: %w", err)
	}
	topo, err := rendezvous.ParseTopology(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("--topology-file %s: %w", f.path, err)
	}
	return topo, nil
}

// stamp is equal as long as a path leads to the same content. The change time catches writers that keep the
// modification time, such as rsync; the inode catches a link that leads elsewhere.
type stamp struct {
	ino           uint64
	size          int64
	mtime, change syscall.Timespec
	err           string // why there is nothing
}

func stampOf(path string) stamp {
	fi, err := os.Stat(path)
	if err != nil {
		return stamp{err: err.Error()}
	}
	st := fi.Sys().(*syscall.Stat_t)
	return stamp{ino: st.Ino, size: st.Size, mtime: st.Mtim, change: st.Ctim}
}
