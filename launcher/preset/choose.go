package preset

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
)

// mark is a module that indicates a preset.
type mark struct {
	preset string
	module string
	alone  bool // many scripts with this mark alone are one process
}

// marks are modules by which a script is known to need a preset. The ones that only jobs of several processes have
// count before those of a framework as such: many scripts read their data with another one.
var marks = []mark{
	{preset: "deepspeed", module: "deepspeed"},
	{preset: "mindspore", module: "mindspore"},
	{preset: "paddle", module: "paddle.distributed"},
	{preset: "tensorflow", module: "tensorflow.distribute"},
	{preset: "jax", module: "jax.distributed"},
	{preset: "torchft", module: "torchft"},
	{preset: "mpi", module: "horovod"},
	{preset: "mpi", module: "mpi4py"},
	{preset: "torch", module: "torch"},
	{preset: "torch", module: "lightning"},
	{preset: "torch", module: "pytorch_lightning"},
	{preset: "torch", module: "accelerate"},
	{preset: "paddle", module: "paddle", alone: true},
	{preset: "jax", module: "jax", alone: true},
	{preset: "tensorflow", module: "tensorflow"},
}

// Choose picks the preset for a script with such imports, and the import that decided; false if none is a mark.
func Choose(found []Import) (preset string, by Import, ok bool) {
	m, by, ok := choose(found)
	return m.preset, by, ok
}

func choose(found []Import) (mark, Import, bool) {
	for _, m := range marks {
		if i := importOf(found, m.module); i >= 0 {
			return m, found[i], true
		}
	}
	return mark{}, Import{}, false
}

// importOf is the first of found that is module or in it; -1 if none is.
func importOf(found []Import, module string) int {
	return slices.IndexFunc(found, func(i Import) bool {
		rest, ok := strings.CutPrefix(i.Name, module)
		return ok && (rest == "" || rest[0] == '.')
	})
}

// Misfit returns in one line why workers of a script with such imports would not find each other with the preset; "" if
// there is no reason. workers is the number of all of them.
func Misfit(preset string, found []Import, workers int) string {
	m, by, ok := choose(found)
	if !ok || m.alone || workers < 2 || preset == "mpi" || slices.Contains(ofTorch, m.preset) || uses(found, preset) {
		return ""
	}
	return fmt.Sprintf("line %d of the script (%s) speaks for --preset=%s: with --preset=%s its %d workers do not know "+
		"of each other, and would fail or be %d jobs of one replica", by.Line, by.Text, m.preset, preset, workers, workers)
}

// ofTorch are the presets that hold torch's environment.
var ofTorch = []string{"torch", "deepspeed", "mpi", "torchft"}

// StartsMPI finds the import of a library that calls MPI_Init, which needs more than variables.
func StartsMPI(found []Import) (by Import, ok bool) {
	for _, module := range []string{"mpi4py", "horovod"} {
		if i := importOf(found, module); i >= 0 {
			return found[i], true
		}
	}
	return Import{}, false
}

// uses reports whether a script has a module of the preset's, or of torch for presets with torch's environment.
func uses(found []Import, preset string) bool {
	for _, m := range marks {
		if (m.preset == preset || slices.Contains(ofTorch, preset) && m.preset == "torch") && importOf(found, m.module) >= 0 {
			return true
		}
	}
	return false
}

// Telling reports whether a script may have imports that contradict torch's preset: it costs less than Imports.
func Telling(src []byte) bool {
	return slices.ContainsFunc([]string{"tensorflow", "mindspore", "paddle", "jax"}, func(name string) bool {
		return bytes.Contains(src, []byte(name))
	})
}
