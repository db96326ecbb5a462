// Package python holds the Python side of warm workers: the parent that has imported a job's modules, its forks that
// become workers, and the code that records a worker's imports. The docstring of _dlrover_warm describes how they work.
//
// The tree is added to PYTHONPATH together with that of hang/shim; its sitecustomize installs both. A parent is started
// as a worker is, with the same options of the interpreter, but with Parent in place of the script.
package python

import "embed"

// Parent is the script of a parent, below the root of Files.
const Parent = "_dlrover_warm/parent.py"

// Files are the package; their root is added to PYTHONPATH.
//
//go:embed _dlrover_warm/*.py
var Files embed.FS
