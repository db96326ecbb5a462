package gpucheck

import (
	"dlrover-run/switchbox"
	"dlrover-run/switchbox/nvml/cuda"
)

// drivers is how the check reaches NVIDIA's libraries. Each is loaded when it is first needed.
type drivers struct {
	manager func() (manager, error)
	copier  func() (copier, error)
	files   string // directory of the device files, "" for none
}

// manager is NVML.
type manager interface {
	Devices() []switchbox.Device
	Files() []int   // numbers of the device files of Devices, -1 is unknown
	Driver() string // version
}

// copier is CUDA.
type copier interface {
	Version() string
	// Open prepares the device at a PCI address for copies; name is for messages.
	Open(name, pci string) (end, error)
	// Reach reports whether two devices can access each other's memory.
	Reach(a, b end) (bool, error)
	Copy(from, to end) (cuda.Rate, error)
}

// end is a device that is prepared for copies.
type end interface{ Close() }
