// Package shim holds the Python package that tells of the progress of the process that trains.
//
// It runs in every Python of a worker, by the name sitecustomize on PYTHONPATH, and gives way to the one that it hides.
// Unless DLROVER_HANG_DIR names a directory it does nothing. It waits for PyTorch to be imported, which it never does
// itself; the process that then makes a process group, or lets an optimizer step, as RANK, LOCAL_RANK and WORLD_SIZE of
// its environment, claims the page of its local rank there (see hang.ReadPage). DLROVER_HANG_TRACER may name a process
// that is let read its memory, where Yama allows ancestors only.
//
// Whoever may write to the page can ask for a timeline: PyTorch's profiler then records steps, see hang/dump.
//
// What it cannot do costs the job nothing but the page: it is quiet.
package shim

import "embed"

// Files are the shim; their root goes on PYTHONPATH.
//
//go:embed sitecustomize.py _dlrover_hang/*.py
var Files embed.FS
