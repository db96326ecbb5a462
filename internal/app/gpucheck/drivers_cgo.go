//go:build cgo && linux

package gpucheck

import (
	"dlrover-run/switchbox/nvml"
	"dlrover-run/switchbox/nvml/cuda"
)

// system are the libraries of this machine.
var system = drivers{
	manager: func() (manager, error) { return nvml.Open() },
	copier: func() (copier, error) {
		d, err := cuda.Open(cuda.Library)
		return gpus{d}, err
	},
	files: "/dev",
}

// gpus is a CUDA driver as a copier.
type gpus struct{ *cuda.Driver }

func (g gpus) Open(name, pci string) (end, error) { return g.GPU(name, pci) }

func (g gpus) Reach(a, b end) (bool, error) { return cuda.Reach(a.(*cuda.GPU), b.(*cuda.GPU)) }

func (g gpus) Copy(from, to end) (cuda.Rate, error) {
	return cuda.Copy(from.(*cuda.GPU), to.(*cuda.GPU))
}
