// Package shim holds the Python package that reports the progress of the process that trains.
//
// It runs in every Python of a worker, by the name sitecustomize on PYTHONPATH, and gives way to the one that it
// hides. Unless DLROVER_HANG_DIR names a directory it does nothing. It waits for PyTorch to be imported, which it
// never does itself. RANK, LOCAL_RANK and WORLD_SIZE of its environment identify a process. The first one that makes
// a process group, or lets an optimizer step, claims the page of its local rank there (see page.Read).
// DLROVER_HANG_TRACER may name a process that gets permission to read its memory, where Yama allows ancestors only.
//
// A process that may write to the page can ask for a timeline: PyTorch's profiler then records steps, see hang/dump.
//
// A failure costs the job nothing but the page: the shim is quiet.
package shim

import "embed"

// Files are the shim; their root is for PYTHONPATH.
//
//go:embed sitecustomize.py _dlrover_hang/*.py
var Files embed.FS
