//go:build cgo && linux

package nvml

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"dlrover-run/switchbox"
)

// device is one GPU.
type device struct {
	lib     *Library
	index   int
	handle  nvml.Device
	broken  error // why there is no handle
	listens bool  // its Xids are told
}

var _ switchbox.Device = (*device)(nil)

// usable says why a function cannot be called: there is no device, or the driver is too old.
func (d *device) usable(symbol string) error {
	if d.broken != nil {
		return d.broken
	}
	if !d.lib.has(symbol) {
		return fmt.Errorf("%w: the driver has no %s", switchbox.ErrNotSupported, symbol)
	}
	return nil
}

func (d *device) Identity() switchbox.Identity {
	id := switchbox.Identity{Index: d.index}
	if d.broken != nil {
		return id
	}
	id.Name = d.text("nvmlDeviceGetName", nvml.Device.GetName)
	id.UUID = d.text("nvmlDeviceGetUUID", nvml.Device.GetUUID)
	if pci, ret := d.handle.GetPciInfo(); ret == nvml.SUCCESS {
		id.PCI = pciAddress(pci)
	}
	if d.usable("nvmlDeviceGetModuleId") == nil {
		if module, ret := d.handle.GetModuleId(); ret == nvml.SUCCESS {
			id.Module = module
		}
	}
	return id
}

func (d *device) text(symbol string, get func(nvml.Device) (string, nvml.Return)) string {
	if d.usable(symbol) != nil {
		return ""
	}
	s, ret := get(d.handle)
	if ret != nvml.SUCCESS {
		return ""
	}
	return s
}

// pciAddress is the address as CUDA and sysfs write it. Function 0 is the GPU.
func pciAddress(p nvml.PciInfo) string {
	return fmt.Sprintf("%04x:%02x:%02x.0", p.Domain, p.Bus, p.Device)
}

func (d *device) Mode() (switchbox.Mode, error) {
	if d.broken != nil {
		return switchbox.Mode{}, d.broken
	}
	var m switchbox.Mode
	if d.usable("nvmlDeviceGetMigMode") == nil {
		current, _, ret := d.handle.GetMigMode()
		if err := absent(ret); err != nil && !errors.Is(err, switchbox.ErrNotSupported) {
			return m, err
		}
		m.MIG = ret == nvml.SUCCESS && current == nvml.DEVICE_MIG_ENABLE
	}
	if d.usable("nvmlDeviceGetVirtualizationMode") == nil {
		mode, ret := d.handle.GetVirtualizationMode()
		m.Virtual = ret == nvml.SUCCESS && mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU
	}
	return m, nil
}

func (d *device) Memory() (switchbox.Memory, error) {
	m, err := d.memory()
	if err != nil {
		return m, err
	}
	if d.usable("nvmlDeviceGetComputeRunningProcesses") != nil {
		return m, nil
	}
	processes, ret := d.handle.GetComputeRunningProcesses()
	if ret != nvml.SUCCESS {
		return m, nil
	}
	for _, p := range processes {
		used := known(p.UsedGpuMemory)
		if int(p.Pid) == os.Getpid() {
			m.Own = used
			continue
		}
		m.Users = append(m.Users, switchbox.User{PID: int(p.Pid), Name: programName(int(p.Pid)), Used: used})
	}
	return m, nil
}

// memory returns the memory in use. Only the newer call keeps apart what the driver has reserved.
func (d *device) memory() (switchbox.Memory, error) {
	if d.usable("nvmlDeviceGetMemoryInfo_v2") == nil {
		if m, ret := d.handle.GetMemoryInfo_v2(); ret == nvml.SUCCESS {
			return switchbox.Memory{Total: m.Total, Used: m.Used}, nil
		}
	}
	if err := d.usable("nvmlDeviceGetMemoryInfo"); err != nil {
		return switchbox.Memory{}, err
	}
	m, ret := d.handle.GetMemoryInfo()
	return switchbox.Memory{Total: m.Total, Used: m.Used}, absent(ret)
}

// known turns the value by which NVML says that it does not know a number of bytes into 0.
func known(bytes uint64) uint64 {
	if bytes == ^uint64(0) {
		return 0
	}
	return bytes
}

// programName is of a process of this PID namespace; NVML's numbers are of the host's, so in a container there is
// often none.
func programName(pid int) string {
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(comm))
}

func (d *device) ECC() (switchbox.ECC, error) {
	var e switchbox.ECC
	if err := d.usable("nvmlDeviceGetTotalEccErrors"); err != nil {
		return e, err
	}
	mode, _, ret := d.handle.GetEccMode()
	if err := absent(ret); err != nil {
		return e, err
	}
	if e.Enabled = mode == nvml.FEATURE_ENABLED; !e.Enabled {
		return e, nil
	}
	e.Uncorrected, ret = d.handle.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	if err := absent(ret); err != nil {
		return e, err
	}
	e.Corrected, ret = d.handle.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC)
	return e, absent(ret)
}

func (d *device) Remap() (switchbox.Remap, error) {
	if d.usable("nvmlDeviceGetRemappedRows") == nil {
		_, uncorrectable, pending, failed, ret := d.handle.GetRemappedRows()
		err := absent(ret)
		if !errors.Is(err, switchbox.ErrNotSupported) {
			return switchbox.Remap{Uncorrectable: uncorrectable, Pending: pending, Failed: failed}, err
		}
	}
	return d.retiredPages()
}

// retiredPages counts retired pages: GPUs before Ampere have these instead of remapped rows.
func (d *device) retiredPages() (switchbox.Remap, error) {
	if err := d.usable("nvmlDeviceGetRetiredPagesPendingStatus"); err != nil {
		return switchbox.Remap{}, err
	}
	pages, ret := d.handle.GetRetiredPages(nvml.PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
	if err := absent(ret); err != nil {
		return switchbox.Remap{}, err
	}
	pending, ret := d.handle.GetRetiredPagesPendingStatus()
	return switchbox.Remap{Uncorrectable: len(pages), Pending: pending == nvml.FEATURE_ENABLED}, absent(ret)
}

func (d *device) PCIe() (switchbox.PCIe, error) {
	p := switchbox.PCIe{Replay: -1}
	if err := d.usable("nvmlDeviceGetCurrPcieLinkWidth"); err != nil {
		return p, err
	}
	for _, v := range []struct {
		to  *int
		get func(nvml.Device) (int, nvml.Return)
	}{
		{&p.Gen, nvml.Device.GetCurrPcieLinkGeneration}, {&p.MaxGen, nvml.Device.GetMaxPcieLinkGeneration},
		{&p.Width, nvml.Device.GetCurrPcieLinkWidth}, {&p.MaxWidth, nvml.Device.GetMaxPcieLinkWidth},
	} {
		n, ret := v.get(d.handle)
		if err := absent(ret); err != nil {
			return p, err
		}
		*v.to = n
	}
	if n, ret := d.handle.GetPcieReplayCounter(); ret == nvml.SUCCESS {
		p.Replay = int64(n)
	}
	return p, nil
}

// slowdowns are NVML's bits for what holds clocks down. Others are usual, such as the limit of the power.
var slowdowns = []struct {
	bit  uint64
	text string
}{
	{nvml.ClocksEventReasonSwThermalSlowdown | nvml.ClocksThrottleReasonHwThermalSlowdown, "its temperature"},
	{nvml.ClocksThrottleReasonHwPowerBrakeSlowdown, "its power supply"},
}

func (d *device) Clocks() (c switchbox.Clocks, err error) {
	if err := d.usable("nvmlDeviceGetClockInfo"); err != nil {
		return c, err
	}
	mhz, ret := d.handle.GetClockInfo(nvml.CLOCK_SM)
	if err := absent(ret); err != nil {
		return c, err
	}
	c.MHz = int(mhz)
	if d.usable("nvmlDeviceGetTemperature") == nil {
		if n, ret := d.handle.GetTemperature(nvml.TEMPERATURE_GPU); ret == nvml.SUCCESS {
			c.Celsius = int(n)
		}
	}
	if d.usable("nvmlDeviceGetCurrentClocksThrottleReasons") != nil { // newer drivers have it, too
		return c, nil
	}
	reasons, ret := d.handle.GetCurrentClocksThrottleReasons()
	for _, s := range slowdowns {
		if ret == nvml.SUCCESS && reasons&s.bit != 0 {
			c.Held = append(c.Held, s.text)
		}
	}
	if ret == nvml.SUCCESS && len(c.Held) == 0 && reasons&nvml.ClocksThrottleReasonHwSlowdown != 0 {
		c.Held = append(c.Held, "its hardware") // of a reason that the driver does not know
	}
	return c, nil
}

// recoveries are the actions by NVML's number.
var recoveries = []switchbox.Recovery{
	nvml.GPU_RECOVERY_ACTION_NONE:                switchbox.RecoverNothing,
	nvml.GPU_RECOVERY_ACTION_GPU_RESET:           switchbox.RecoverReset,
	nvml.GPU_RECOVERY_ACTION_NODE_REBOOT:         switchbox.RecoverReboot,
	nvml.GPU_RECOVERY_ACTION_DRAIN_P2P:           switchbox.RecoverDrainP2P,
	nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET:     switchbox.RecoverDrain,
	nvml.GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN: "recover_imex_domain",
}

func (d *device) Recovery() (switchbox.Recovery, error) {
	values, err := d.fields(0, nvml.FI_DEV_GET_GPU_RECOVERY_ACTION)
	if err != nil {
		return "", err
	}
	action, ok := values[nvml.FI_DEV_GET_GPU_RECOVERY_ACTION]
	if !ok {
		return "", switchbox.ErrNotSupported
	}
	if action >= uint64(len(recoveries)) {
		return switchbox.Recovery(fmt.Sprintf("action %d", action)), nil
	}
	return recoveries[action], nil
}

func (d *device) Xids() ([]switchbox.Xid, error) {
	if d.broken != nil {
		return nil, d.broken
	}
	if !d.listens {
		return nil, fmt.Errorf("%w: the driver tells no Xids of this device", switchbox.ErrNotSupported)
	}
	d.lib.mu.Lock()
	defer d.lib.mu.Unlock()
	d.lib.collect()
	return slices.Clone(d.lib.xids[d.index]), nil
}
