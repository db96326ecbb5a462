//go:build cgo && linux

package nvml

import (
	"errors"
	"fmt"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"dlrover-run/switchbox"
)

// Library is NVML, initialised.
type Library struct {
	api     nvml.Interface
	devices []*device

	mu     sync.Mutex
	events nvml.EventSet           // nil: the driver has none
	xids   map[int][]switchbox.Xid // by device
}

// Open loads and initialises the system's NVML (libnvidia-ml.so.1) and finds its devices. From here on the driver's
// errors (Xids) are noted. The error is ErrNoDriver, or the driver's own.
func Open() (*Library, error) { return open(nvml.New()) }

func open(api nvml.Interface) (*Library, error) {
	if ret := api.Init(); ret != nvml.SUCCESS {
		return nil, initError(ret)
	}
	l := &Library{api: api, xids: map[int][]switchbox.Xid{}}
	n, ret := api.DeviceGetCount()
	if ret != nvml.SUCCESS {
		l.Close()
		return nil, fmt.Errorf("NVML cannot count the devices: %w", ret)
	}
	for i := range n {
		d := &device{lib: l, index: i}
		d.handle, ret = api.DeviceGetHandleByIndex(i)
		d.broken = noHandle(ret)
		l.devices = append(l.devices, d)
	}
	l.listen()
	return l, nil
}

func initError(ret nvml.Return) error {
	switch ret {
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return fmt.Errorf("%w: libnvidia-ml.so.1 cannot be loaded", ErrNoDriver)
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return fmt.Errorf("%w: the kernel module is not loaded (%w)", ErrNoDriver, ret)
	case nvml.ERROR_NO_PERMISSION:
		return fmt.Errorf("%w: this process may not use it (%w)", ErrNoDriver, ret)
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return fmt.Errorf("NVML and the kernel module are of different versions; load the matching module or reboot (%w)",
			ret)
	default:
		return fmt.Errorf("NVML cannot be initialised: %w", ret)
	}
}

// Close gives the library back. Its Devices must not be used any more.
func (l *Library) Close() {
	if l.events != nil {
		l.events.Free()
	}
	l.api.Shutdown()
}

// Devices are those that this process may use, in the driver's order. One of which the driver gives no handle is among
// them and says why at every call.
func (l *Library) Devices() []switchbox.Device {
	var all []switchbox.Device
	for _, d := range l.devices {
		if !errors.Is(d.broken, switchbox.ErrNotSupported) {
			all = append(all, d)
		}
	}
	return all
}

// Files are the numbers N of the device files /dev/nvidiaN of the Devices, -1 where the driver does not say.
func (l *Library) Files() []int {
	var all []int
	for _, d := range l.devices {
		n, ret := -1, nvml.ERROR_NOT_SUPPORTED
		if d.usable("nvmlDeviceGetMinorNumber") == nil {
			n, ret = d.handle.GetMinorNumber()
		}
		if ret != nvml.SUCCESS {
			n = -1
		}
		all = append(all, n)
	}
	return all
}

// Driver is the version of the driver, such as 550.54.15; "" when it does not say.
func (l *Library) Driver() string {
	v, ret := l.api.SystemGetDriverVersion()
	if ret != nvml.SUCCESS {
		return ""
	}
	return v
}

// has says whether the library on this machine has a function.
func (l *Library) has(symbol string) bool { return l.api.Extensions().LookupSymbol(symbol) == nil }

// listen asks to be told of Xids from now on. The kernel's log has the earlier ones.
func (l *Library) listen() {
	if !l.has("nvmlEventSetCreate") {
		return
	}
	set, ret := l.api.EventSetCreate()
	if ret != nvml.SUCCESS {
		return
	}
	for _, d := range l.devices {
		d.listens = d.broken == nil && d.handle.RegisterEvents(nvml.EventTypeXidCriticalError, set) == nvml.SUCCESS
	}
	l.events = set
}

// maxEvents bounds the events that are read at once from a driver that reports errors without end.
const maxEvents = 64

// collect takes the events that have come and files them by device.
func (l *Library) collect() {
	for range maxEvents {
		e, ret := l.events.Wait(0)
		if ret != nvml.SUCCESS {
			return
		}
		i, ret := e.Device.GetIndex()
		if ret != nvml.SUCCESS || e.EventType != nvml.EventTypeXidCriticalError {
			continue
		}
		l.xids[i] = append(l.xids[i], switchbox.Xid{Number: int(e.EventData), Text: xidText(e.EventData)})
	}
}

// failure makes an error of NVML's result; nil for success.
func failure(ret nvml.Return) error {
	switch ret {
	case nvml.SUCCESS:
		return nil
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_ARGUMENT_VERSION_MISMATCH,
		nvml.ERROR_DEPRECATED, nvml.ERROR_NO_PERMISSION, nvml.ERROR_VGPU_ECC_NOT_SUPPORTED:
		return fmt.Errorf("%w: %w", switchbox.ErrNotSupported, ret)
	case nvml.ERROR_GPU_IS_LOST, nvml.ERROR_RESET_REQUIRED, nvml.ERROR_IRQ_ISSUE, nvml.ERROR_INSUFFICIENT_POWER:
		return fmt.Errorf("%w: %w", switchbox.ErrLost, ret)
	default:
		return ret
	}
}

// noHandle is failure for the call that gives a device's handle: of a device that this process may use there is one.
func noHandle(ret nvml.Return) error {
	err := failure(ret)
	if err == nil || errors.Is(err, switchbox.ErrNotSupported) || isLost(err) {
		return err
	}
	return fmt.Errorf("%w: NVML gives no handle: %w", switchbox.ErrLost, err)
}

// absent is failure for calls where an argument, such as a link's number, that the device does not know means that
// there is no such thing.
func absent(ret nvml.Return) error {
	if ret == nvml.ERROR_INVALID_ARGUMENT {
		ret = nvml.ERROR_NOT_SUPPORTED
	}
	return failure(ret)
}

// xidText explains the more frequent Xids; "" for others.
func xidText(number uint64) string {
	return map[uint64]string{
		13:  "graphics engine exception, usually of the program",
		31:  "GPU memory page fault, usually of the program",
		43:  "GPU stopped processing, usually for the program's fault",
		45:  "work was removed, usually after an earlier error",
		48:  "uncorrectable memory error",
		61:  "internal microcontroller breakpoint",
		62:  "internal microcontroller halt",
		63:  "memory row was remapped or page retired",
		64:  "memory row could not be remapped or page retired",
		74:  "NVLink error",
		79:  "GPU has fallen off the bus",
		92:  "high rate of corrected memory errors",
		94:  "contained uncorrectable memory error",
		95:  "uncontained uncorrectable memory error",
		119: "GSP firmware does not answer",
		120: "GSP firmware error",
	}[number]
}
