// Package nvml turns NVIDIA's management library into switchbox.Devices. It needs cgo; without it there is nothing
// here.
//
// The library is opened at run time. Functions that an older driver may lack are looked up before they are called,
// because a call of a missing function ends the process; the device then says switchbox.ErrNotSupported. A call may
// block for as long as the driver does: only gpucheck, a process of its own under a deadline, uses this package.
package nvml

import "errors"

// ErrNoDriver: there is no NVIDIA driver here that this process may use, so there is nothing to check.
var ErrNoDriver = errors.New("no NVIDIA driver")
