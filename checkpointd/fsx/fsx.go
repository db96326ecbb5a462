// Package fsx writes checkpoints to a file system so that they survive a crash, and reads them back.
//
// FS has exactly the operations that the commit protocol needs, so that package crashfs can model every one of them. OS
// is the real thing.
package fsx

import (
	"context"
	"errors"
	"time"
)

var (
	// ErrNotRegular is the refusal to read a pipe, a device or a directory.
	ErrNotRegular = errors.New("not a regular file")
	// ErrTooLong is the refusal to read a file that is longer than it may be.
	ErrTooLong = errors.New("too long")
)

// Source is the content of a file to be written: bytes in shared memory. Copies into it may still be going on.
type Source interface {
	// Len is the size of the file.
	Len() int64
	// Bytes is the whole content. If it starts at a page boundary and its capacity is a multiple of 4096 bytes, the
	// storage reads it without a copy. Bytes between Len and the capacity are not kept.
	Bytes() []byte
	// Ready waits until Bytes()[:end] is final and its next part may be written.
	Ready(ctx context.Context, end int64) error
}

// Entry is one name in a directory. Dir is false for a link, even to a directory.
type Entry struct {
	Name    string
	Dir     bool
	ModTime time.Time
	Size    int64
	Inode   uint64 // 0 where there are none
}

// FS is a file system. Paths are absolute and clean. No operation follows a symbolic link, neither in the directories
// of a path nor at its end: it fails instead. A directory that a person has named may be reached through links; use the
// path that Resolve returns. Errors wrap those of the system, so that errors.Is finds fs.ErrNotExist, syscall.ENOSPC
// and so on.
type FS interface {
	// Resolve returns dir without links. A part that does not exist yet is kept as it is.
	Resolve(dir string) (string, error)
	// MkdirAll makes a directory and its missing parents. The names that it adds are durable.
	MkdirAll(dir string) error
	// WriteFrom writes a new file in place of any file of that name, and makes its content durable; the name is durable
	// after SyncDir. A file that does not fit fails with ENOSPC (or EDQUOT) before a byte is written. After an error the
	// file is gone, as far as the system allows.
	WriteFrom(ctx context.Context, path string, src Source) error
	// WriteFile replaces a small file: after a crash it has the old content or the new. When it returns, content and name
	// are durable. A crash may leave another file in the directory for which Temporary is true.
	WriteFile(path string, data []byte) error
	// Rename replaces to, within one directory. It is durable after SyncDir.
	Rename(from, to string) error
	// SyncDir makes the names in dir durable.
	SyncDir(dir string) error
	// Remove removes a file or an empty directory; a missing one is no error. It is durable after SyncDir.
	Remove(path string) error
	// ReadFile returns the content of a file of at most limit bytes; of a longer one it reads nothing (ErrTooLong).
	ReadFile(path string, limit int64) ([]byte, error)
	// Size returns the size of a file.
	Size(path string) (int64, error)
	// List returns the names in a directory, sorted.
	List(dir string) ([]Entry, error)
	// Lock takes the lock of a file against all other holders, also on other hosts, and makes the file if it is not there.
	// The lock ends with done, and with the process. An error after patience: another one has it. ETIMEDOUT: the storage
	// does not answer. Any other: it has no locks.
	Lock(path string, patience time.Duration) (done func(), err error)
	// Checksum reads a whole file and returns its CRC-32 (IEEE) and its size.
	Checksum(ctx context.Context, path string) (crc uint32, size int64, err error)
}
