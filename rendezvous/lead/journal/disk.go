package journal

import (
	"errors"
	"io"
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

// maxSegment bounds the file that is read: a snapshot, and as much again.
const maxSegment = 3 * maxFrame

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
	s := osFile{f}
	err = s.append(content)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err == nil {
		err = d.sync()
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return s, nil
}

func (d directory) open(name string, size int64) (file, error) {
	f, err := openfile.Open(filepath.Join(d.path, name), os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	s := osFile{f}
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

type osFile struct{ *os.File }

func (f osFile) append(frame []byte) error {
	if _, err := f.Write(frame); err != nil {
		return err
	}
	return unix.Fdatasync(int(f.Fd()))
}

// truncate leaves the offset at the new end.
func (f osFile) truncate(size int64) error {
	if err := f.Truncate(size); err != nil {
		return err
	}
	if _, err := f.Seek(size, io.SeekStart); err != nil {
		return err
	}
	return f.Sync()
}

func (f osFile) close() error { return f.Close() }
