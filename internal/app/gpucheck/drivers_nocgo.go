//go:build !cgo || !linux

package gpucheck

import (
	"fmt"

	"dlrover-run/switchbox/nvml"
	"dlrover-run/switchbox/nvml/cuda"
)

// system has no libraries: they cannot be called without cgo.
var system = drivers{
	manager: func() (manager, error) {
		return nil, fmt.Errorf("%w: gpucheck was built without cgo", nvml.ErrNoDriver)
	},
	copier: func() (copier, error) { return nil, fmt.Errorf("%w: gpucheck was built without cgo", cuda.ErrNoDriver) },
}
