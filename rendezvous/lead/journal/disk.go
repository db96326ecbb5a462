package journal

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/openfile"
)

// disk is the part of a file system that the journal uses, so that a test can model its crashes.
type disk interface {
	list() ([]string, error)
	read(name string) ([]byte, error)
	// create makes a file whose content and name are durable. A crash leaves all of it or nothing under that name.
	create(name string, content []byte) (file, error)
	// open cuts a file to a size, and appends behind that.
	open(name string, size int64) (file, error)
	rename(from, to string) error
	remove(name string) error
	sync() error // makes the names durable
}

// file is an open segment.
type file interface {
	append(frame []byte) error // the frame is durable when it returns nil
	truncate(size int64) error
	close() error
}

// maxSegment bounds the file that is read: the newest records, as much again, and room for the frames.
const maxSegment = 3 * maxKept

// directory is the disk of this host.
type directory struct{ path string }

func (d directory) list() (names []string, err error) {
	entries, err := os.ReadDir(d.path)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}

func (d directory) read(name string) ([]byte, error) {
	return openfile.Read(filepath.Join(d.path, name), maxSegment)
}

func (d directory) create(name string, content []byte) (file, error) {
	path := filepath.Join(d.path, name)
	f, err := openfile.Open(path+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	s := &osFile{f, path + ".new"}
	err = s.append(content)
	if err == nil {
		s.path = path
		err = os.Rename(path+".new", path)
	}
	if err == nil {
		err = d.sync()
	}
	if err != nil {
		_ = os.Remove(path + ".new")
		return nil, errors.Join(err, f.Close())
	}
	return s, nil
}

func (d directory) open(name string, size int64) (file, error) {
	path := filepath.Join(d.path, name)
	f, err := openfile.Open(path, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	s := &osFile{f, path}
	if err := s.truncate(size); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return s, nil
}

func (d directory) rename(from, to string) error {
	return os.Rename(filepath.Join(d.path, from), filepath.Join(d.path, to))
}

func (d directory) remove(name string) error { return os.Remove(filepath.Join(d.path, name)) }

func (d directory) sync() error {
	f, err := os.OpenFile(d.path, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

type osFile struct {
	*os.File
	path string // its present name
}

func (f *osFile) append(frame []byte) error {
	if err := f.inPlace(); err != nil {
		return err
	}
	if _, err := f.Write(frame); err != nil {
		if named, ok := errors.AsType[*fs.PathError](err); ok {
			named.Path = f.path
		}
		return err
	}
	return unix.Fdatasync(int(f.Fd()))
}

// inPlace reports a file that is not found under its name any more: writes to it would be lost.
func (f *osFile) inPlace() error {
	found, err := os.Lstat(f.path)
	if err != nil {
		return err
	}
	mine, err := f.Stat()
	if err == nil && !os.SameFile(found, mine) {
		err = fmt.Errorf("%s was replaced", f.path)
	}
	return err
}

// truncate leaves the offset at the new end.
func (f *osFile) truncate(size int64) error {
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil || end == size {
		return err
	}
	if err := f.Truncate(size); err != nil {
		return err
	}
	if _, err := f.Seek(size, io.SeekStart); err != nil {
		return err
	}
	return f.Sync()
}

func (f *osFile) close() error { return f.Close() }
