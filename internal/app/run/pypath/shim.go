package pypath

import (
	"dlrover-run/hang/shim"
	"dlrover-run/internal/pytree"
)

// Shim reports steps, collectives and phases from within the workers. Its sitecustomize runs the user's, so
// Python has to find it first.
var Shim = Tree{
	Source: pytree.Source{Name: "hang-shim", Files: shim.Files},
	What:   "shim of hang detection", Loss: "hangs are found from outside only",
}
