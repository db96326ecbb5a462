// Package python holds the checkpoint client that training processes import.
package python

import "embed"

// Files are the packages of the client; their root is an entry of PYTHONPATH.
//
// The patterns name files, not directories: a directory would leave out __init__.py and include other files in it.
//
//go:embed dlrover/*.py dlrover/*/*.py dlrover/*/*/*.py dlrover/*/*/*/*.py dlrover_ckpt/*.py dlrover/py.typed dlrover_ckpt/py.typed
var Files embed.FS
