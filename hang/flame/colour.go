package flame

import (
	"fmt"
	"hash/fnv"
	"path"
	"strings"

	"dlrover-run/hang"
	"dlrover-run/hang/merge"
)

// colour separates PyTorch and NCCL (green), other C++ (yellow), Python (aqua) and states of processes (purple) from
// the rest (red), as xpu_timer's pictures do. The same function has the same shade in every picture.
func colour(n *merge.Node) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(n.Frame.Func))
	shade := int(h.Sum32() % 40)
	switch f := n.Frame; {
	case strings.Contains(f.File, "/torch") || strings.Contains(f.Func, "nccl") || strings.Contains(f.File, "nccl"),
		strings.Contains(f.File, "/libtorch"), strings.Contains(f.File, "/libc10"):
		return rgb(80+shade, 200+shade, 80+shade)
	case strings.Contains(f.Func, "::"):
		return rgb(190+shade, 190+shade, 50)
	case isPython(f):
		return rgb(80+shade, 180+shade, 190+shade)
	case n.State:
		return rgb(190+shade, 100+shade, 210)
	}
	return rgb(210+shade, 90+shade, 80+shade)
}

// isPython reports a module, or the interpreter's own source.
func isPython(f hang.Frame) bool {
	switch ext := path.Ext(f.File); ext {
	case ".py":
		return true
	case ".c", ".h":
		return strings.Contains(strings.ToLower(f.File), "python")
	}
	return false
}

func rgb(r, g, b int) string { return fmt.Sprintf("#%02x%02x%02x", r, g, b) }
