// Package shm reads the shared-memory segments that training processes save their checkpoints into.
//
// A worker lays out the bytes of its checkpoint files in a segment, a file in a runtime directory on a tmpfs. The
// daemon maps the segment, pins it with a shared lock, completes the checksums that the worker left open, and hands out
// the bytes without copying them. Another process writes these files, so nothing in them is trusted: every number is
// checked before it is used.
//
// Keep segments open: the first read of a new mapping costs about 0.2 s per GiB for page faults, and populating it in
// advance costs the same; later reads run at the speed of memory.
package shm

import (
	"errors"
	"runtime/debug"
)

const (
	pageSize   = 4096
	headerSize = 4096
	// MaxMeta is the largest description of a save in a segment, in bytes.
	MaxMeta = 16 << 20
)

var (
	// ErrOwned reports that a living process owns the runtime directory.
	ErrOwned = errors.New("a running process owns it")
	// ErrBusy reports that the worker is writing the segment, or to a writer that it is being read.
	ErrBusy = errors.New("segment is in use")
	// ErrIncomplete reports that there is no complete save in the segment: it is new, or its writer died in the middle.
	ErrIncomplete = errors.New("segment holds no complete save")
	// ErrDamaged reports that the content of the segment contradicts itself.
	ErrDamaged = errors.New("segment is damaged")
	// ErrUnfit reports that a copy cannot take over the file of a segment.
	ErrUnfit = errors.New("segment has another size or content, or its file has lost its name")
	// ErrClosed reports that the segment was closed.
	ErrClosed = errors.New("segment is closed")
)

// guard runs f, which reads a mapping. A file that shrinks, or a hole that the full tmpfs cannot fill, would kill the
// process with SIGBUS; here it becomes an error.
func guard(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch r := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			err = errShrunk
		default:
			panic(r)
		}
	}()
	return f()
}
