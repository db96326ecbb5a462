// Package cuda copies memory between GPUs through NVIDIA's driver, which is opened at run time: nothing of CUDA is
// needed to build it, and without a driver Open says so. It needs cgo.
//
// A call into the driver may block for ever, and a broken driver may end the process. So only gpucheck, which is a
// process of its own under a deadline, uses this package.
package cuda

import (
	"errors"
	"fmt"
)

// Library is the name that Open usually opens. The dynamic loader finds it.
const Library = "libcuda.so.1"

// The errors that say why there is nothing to measure.
var (
	// ErrNoDriver: the library is not there or is too old, or it has no device.
	ErrNoDriver = errors.New("no usable CUDA driver")
	// ErrHidden: the device exists, but CUDA_VISIBLE_DEVICES or a MIG mode keeps it from this process.
	ErrHidden = errors.New("CUDA does not show this device")
	// ErrNoMemory: too little of a device's memory is free.
	ErrNoMemory = errors.New("too little memory is free")
)

// Error is the result of a call into the driver that failed.
type Error struct {
	Call string // cuMemAlloc
	Code int
	Name string // CUDA_ERROR_OUT_OF_MEMORY; "" when the driver does not know its own code
}

func (e *Error) Error() string {
	if e.Name == "" {
		return fmt.Sprintf("%s: CUDA error %d", e.Call, e.Code)
	}
	return fmt.Sprintf("%s: %s (CUDA error %d)", e.Call, e.Name, e.Code)
}

// The sizes of the two buffers that each GPU gives: Large, or small where less memory is free.
const (
	Large = 512 << 20
	small = 64 << 20
)

// How a copy is measured: the median of samples, each of maxLoops copies between two events, after warmups copies. On a
// slow path a sample has fewer copies, minLoops at least, so that it ends within maxSample.
const (
	warmups   = 4
	maxLoops  = 16
	minLoops  = 2
	samples   = 3
	maxSample = 0.5 // seconds
)

// loops is the number of copies of a sample when one copy takes so many seconds.
func loops(seconds float64) int { return max(minLoops, min(maxLoops, int(maxSample/seconds))) }

// Rate is the speed of one directed copy.
type Rate struct {
	MBps  float64 // 10^6 byte/s of payload, the median of the samples
	Low   float64 // the worst sample
	Bytes int64   // of one copy
	Moved int64   // in all copies together, warm-ups included
}
