//go:build cgo && linux

package nvml

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxh100"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"
	"github.com/stretchr/testify/require"

	"dlrover-run/switchbox"
)

// box is a healthy machine of eight H100 whose functions a test may replace.
type box struct {
	*server.Server
	gpus   []*server.Device
	fields []map[[2]uint32]uint64 // by device, field and scope
	lacks  map[string]bool        // functions that the driver is too old for
	events []nvml.EventData
}

const hopperLinks = 18

func newBox() *box {
	b := &box{Server: dgxh100.New(), lacks: map[string]bool{"nvmlDeviceGetGpuFabricInfoV": true}}
	b.LookupSymbolFunc = func(symbol string) error {
		if b.lacks[symbol] {
			return errors.New("undefined symbol: " + symbol)
		}
		return nil
	}
	set := &mock.EventSet{
		WaitFunc: func(uint32) (nvml.EventData, nvml.Return) {
			if len(b.events) == 0 {
				return nvml.EventData{}, nvml.ERROR_TIMEOUT
			}
			e := b.events[0]
			b.events = b.events[1:]
			return e, nvml.SUCCESS
		},
		FreeFunc: func() nvml.Return { return nvml.SUCCESS },
	}
	b.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) { return set, nvml.SUCCESS }
	for i, d := range b.Devices {
		b.gpus = append(b.gpus, d.(*server.Device))
		b.fields = append(b.fields, map[[2]uint32]uint64{
			{nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX, allLinks}: 100, {nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX, allLinks}: 200,
			{nvml.FI_DEV_GET_GPU_RECOVERY_ACTION, 0}: 0,
		})
		b.healthy(i)
	}
	return b
}

// healthy sets what the mock leaves out, as an H100 behind switches says it.
func (b *box) healthy(i int) {
	g := b.gpus[i]
	g.GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) {
		return nvml.PciInfo{Domain: 0, Bus: uint32(0x1b + i), Device: 0}, nvml.SUCCESS
	}
	g.GetModuleIdFunc = func() (int, nvml.Return) { return i + 1, nvml.SUCCESS }
	g.GetVirtualizationModeFunc = func() (nvml.GpuVirtualizationMode, nvml.Return) {
		return nvml.GPU_VIRTUALIZATION_MODE_PASSTHROUGH, nvml.SUCCESS
	}
	b.memory(g)
	b.links(i)
	g.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) {
		return nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_COMPLETED}, nvml.SUCCESS
	}
	g.GetP2PStatusFunc = func(nvml.Device, nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
		return nvml.P2P_STATUS_OK, nvml.SUCCESS
	}
	number := func(n int) func() (int, nvml.Return) { return func() (int, nvml.Return) { return n, nvml.SUCCESS } }
	g.GetCurrPcieLinkGenerationFunc, g.GetMaxPcieLinkGenerationFunc = number(5), number(5)
	g.GetCurrPcieLinkWidthFunc, g.GetMaxPcieLinkWidthFunc = number(16), number(16)
	g.GetPcieReplayCounterFunc = number(3)
	g.GetClockInfoFunc = func(nvml.ClockType) (uint32, nvml.Return) { return 1980, nvml.SUCCESS }
	g.GetTemperatureFunc = func(nvml.TemperatureSensors) (uint32, nvml.Return) { return 60, nvml.SUCCESS }
	g.GetCurrentClocksThrottleReasonsFunc = func() (uint64, nvml.Return) {
		return nvml.ClocksThrottleReasonSwPowerCap, nvml.SUCCESS
	}
	g.RegisterEventsFunc = func(uint64, nvml.EventSet) nvml.Return { return nvml.SUCCESS }
}

func (b *box) memory(g *server.Device) {
	g.GetMemoryInfo_v2Func = func() (nvml.Memory_v2, nvml.Return) {
		return nvml.Memory_v2{Total: 80 << 30, Reserved: 1 << 29, Used: 5 << 20}, nvml.SUCCESS
	}
	g.GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) { return nil, nvml.SUCCESS }
	g.GetEccModeFunc = func() (nvml.EnableState, nvml.EnableState, nvml.Return) {
		return nvml.FEATURE_ENABLED, nvml.FEATURE_ENABLED, nvml.SUCCESS
	}
	g.GetTotalEccErrorsFunc = func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) {
		return 0, nvml.SUCCESS
	}
	g.GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) { return 0, 0, false, false, nvml.SUCCESS }
}

func (b *box) links(i int) {
	g := b.gpus[i]
	known := func(link int) nvml.Return {
		if link >= hopperLinks {
			return nvml.ERROR_INVALID_ARGUMENT
		}
		return nvml.SUCCESS
	}
	g.GetNvLinkStateFunc = func(link int) (nvml.EnableState, nvml.Return) { return nvml.FEATURE_ENABLED, known(link) }
	g.GetNvLinkVersionFunc = func(link int) (uint32, nvml.Return) { return 4, known(link) }
	g.GetNvLinkRemoteDeviceTypeFunc = func(link int) (nvml.IntNvLinkDeviceType, nvml.Return) {
		return nvml.NVLINK_DEVICE_TYPE_SWITCH, known(link)
	}
	g.GetNvLinkRemotePciInfoFunc = func(link int) (nvml.PciInfo, nvml.Return) {
		return nvml.PciInfo{Bus: uint32(link % 4), Device: 2}, known(link)
	}
	g.GetNvLinkErrorCounterFunc = func(int, nvml.NvLinkErrorCounter) (uint64, nvml.Return) {
		return 0, nvml.ERROR_NOT_SUPPORTED
	}
	for link := range uint32(hopperLinks) {
		b.fields[i][[2]uint32{nvml.FI_DEV_NVLINK_GET_SPEED, link}] = 26562
		for _, id := range []uint32{nvml.FI_DEV_NVLINK_ERROR_DL_REPLAY, nvml.FI_DEV_NVLINK_ERROR_DL_RECOVERY,
			nvml.FI_DEV_NVLINK_ERROR_DL_CRC} {
			b.fields[i][[2]uint32{id, link}] = 0
		}
	}
	g.GetFieldValuesFunc = func(values []nvml.FieldValue) nvml.Return {
		for k, v := range values {
			n, ok := b.fields[i][[2]uint32{v.FieldId, v.ScopeId}]
			if !ok {
				continue // what this driver does not know it leaves alone
			}
			values[k].NvmlReturn, values[k].ValueType = uint32(nvml.SUCCESS), uint32(nvml.VALUE_TYPE_UNSIGNED_LONG_LONG)
			binary.NativeEndian.PutUint64(values[k].Value[:], n)
		}
		return nvml.SUCCESS
	}
}

// open opens the machine as it is now.
func (b *box) open(t *testing.T) []switchbox.Device {
	t.Helper()
	l, err := open(b)
	require.NoError(t, err)
	t.Cleanup(l.Close)
	return l.Devices()
}

// must is the value of a call that has to succeed.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestHealthyBox(t *testing.T) {
	b := newBox()
	devices := b.open(t)
	require.Len(t, devices, 8)
	d := devices[3]
	require.Equal(t, switchbox.Identity{Index: 3, Name: "NVIDIA H100 80GB HBM3", UUID: b.gpus[3].UUID,
		PCI: "0000:1e:00.0", Module: 4},
		d.Identity())
	require.Equal(t, switchbox.Mode{}, must(d.Mode()), "passed through as a whole is not virtual")
	require.Equal(t, hopperLinks, must(d.Links()), "not the 36 of the header")
	require.Equal(t, switchbox.Link{Active: true, Version: 4, MBps: 26562, Remote: switchbox.RemoteSwitch,
		PCI: "0000:01:02.0"},
		must(d.Link(17)))
	require.Equal(t, switchbox.LinkErrors{RecoveryFailed: -1}, must(d.LinkErrors(0)))
	require.Equal(t, switchbox.Traffic{Sent: 100 << 10, Received: 200 << 10}, must(d.Traffic()), "KiB became bytes")
	require.Equal(t, switchbox.Fabric{State: switchbox.FabricCompleted}, must(d.Fabric()), "an UUID of zeros is none")
	require.Equal(t, switchbox.Peer{Read: "OK", Write: "OK", NVLink: "OK"}, must(d.Peer(0)))
	require.Equal(t, switchbox.Memory{Total: 80 << 30, Used: 5 << 20}, must(d.Memory()))
	require.Equal(t, switchbox.ECC{Enabled: true}, must(d.ECC()))
	require.Equal(t, switchbox.Remap{}, must(d.Remap()))
	require.Equal(t, switchbox.PCIe{Gen: 5, MaxGen: 5, Width: 16, MaxWidth: 16, Replay: 3}, must(d.PCIe()))
	require.Equal(t, switchbox.Clocks{MHz: 1980, Celsius: 60}, must(d.Clocks()), "the limit of its power is usual")
	require.Equal(t, switchbox.RecoverNothing, must(d.Recovery()))
	require.Empty(t, must(d.Xids()))
}

func TestClocks(t *testing.T) {
	for name, c := range map[string]struct {
		reasons uint64
		ret     nvml.Return
		want    []string
	}{
		"no work":         {nvml.ClocksThrottleReasonGpuIdle, nvml.SUCCESS, nil},
		"hot":             {nvml.ClocksThrottleReasonHwThermalSlowdown | 8, nvml.SUCCESS, []string{"its temperature"}},
		"warm":            {nvml.ClocksThrottleReasonSwThermalSlowdown, nvml.SUCCESS, []string{"its temperature"}},
		"no power":        {nvml.ClocksThrottleReasonHwPowerBrakeSlowdown | 8, nvml.SUCCESS, []string{"its power supply"}},
		"of unknown kind": {nvml.ClocksThrottleReasonHwSlowdown, nvml.SUCCESS, []string{"its hardware"}},
		"unknown":         {0xff, nvml.ERROR_NOT_SUPPORTED, nil},
	} {
		b := newBox()
		b.gpus[0].GetCurrentClocksThrottleReasonsFunc = func() (uint64, nvml.Return) { return c.reasons, c.ret }
		require.Equal(t, switchbox.Clocks{MHz: 1980, Celsius: 60, Held: c.want}, must(b.open(t)[0].Clocks()), name)
	}
	b := newBox()
	b.lacks["nvmlDeviceGetCurrentClocksThrottleReasons"], b.lacks["nvmlDeviceGetTemperature"] = true, true
	require.Equal(t, switchbox.Clocks{MHz: 1980}, must(b.open(t)[0].Clocks()))
}

func TestLinkDown(t *testing.T) {
	b := newBox()
	b.gpus[0].GetNvLinkStateFunc = func(link int) (nvml.EnableState, nvml.Return) {
		switch {
		case link == 5:
			return nvml.FEATURE_DISABLED, nvml.SUCCESS
		case link >= 12:
			return 0, nvml.ERROR_NOT_SUPPORTED
		}
		return nvml.FEATURE_ENABLED, nvml.SUCCESS
	}
	d := b.open(t)[0]
	require.Equal(t, 12, must(d.Links()))
	require.Equal(t, switchbox.Link{}, must(d.Link(5)))
	require.True(t, must(d.Link(4)).Active)
}

func TestLinksWithoutNVLink(t *testing.T) {
	b := newBox()
	b.gpus[0].GetNvLinkStateFunc = func(int) (nvml.EnableState, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
	clear(b.fields[0])
	d := b.open(t)[0]
	require.Zero(t, must(d.Links()))
	_, err := d.Traffic()
	require.ErrorIs(t, err, switchbox.ErrNotSupported)
}

// A driver that knows every link number must not be asked for ever.
func TestLinksAreBounded(t *testing.T) {
	b := newBox()
	b.gpus[0].GetNvLinkStateFunc = func(int) (nvml.EnableState, nvml.Return) { return nvml.FEATURE_ENABLED, nvml.SUCCESS }
	require.Equal(t, 36, must(b.open(t)[0].Links()))
}

func TestRemoteEnds(t *testing.T) {
	for kind, want := range map[nvml.IntNvLinkDeviceType]switchbox.Remote{
		nvml.NVLINK_DEVICE_TYPE_GPU: switchbox.RemoteGPU, nvml.NVLINK_DEVICE_TYPE_SWITCH: switchbox.RemoteSwitch,
		nvml.NVLINK_DEVICE_TYPE_IBMNPU: switchbox.RemoteCPU, nvml.NVLINK_DEVICE_TYPE_UNKNOWN: switchbox.RemoteUnknown,
	} {
		b := newBox()
		b.gpus[0].GetNvLinkRemoteDeviceTypeFunc = func(int) (nvml.IntNvLinkDeviceType, nvml.Return) {
			return kind, nvml.SUCCESS
		}
		require.Equal(t, want, must(b.open(t)[0].Link(0)).Remote)
	}
}

// Blackwell has none of the counters of earlier generations.
func TestCountersOfNVLink5(t *testing.T) {
	b := newBox()
	clear(b.fields[0])
	for link := range uint32(hopperLinks) {
		b.fields[0][[2]uint32{nvml.FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS, link}] = 2
		b.fields[0][[2]uint32{nvml.FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS, link}] = 1
		b.fields[0][[2]uint32{nvml.FI_DEV_NVLINK_COUNT_RCV_ERRORS, link}] = 7
		b.fields[0][[2]uint32{nvml.FI_DEV_NVLINK_COUNT_XMIT_BYTES, link}] = 1000
		b.fields[0][[2]uint32{nvml.FI_DEV_NVLINK_COUNT_RCV_BYTES, link}] = 10
		b.fields[0][[2]uint32{nvml.FI_DEV_NVLINK_SPEED_MBPS_COMMON, link}] = 53125
	}
	d := b.open(t)[0]
	require.Equal(t, switchbox.LinkErrors{Replay: -1, Recovery: 2, RecoveryFailed: 1, CRC: 7}, must(d.LinkErrors(3)))
	require.Equal(t, switchbox.Traffic{Sent: 18000, Received: 180}, must(d.Traffic()))
	require.Equal(t, 53125, must(d.Link(0)).MBps)
}

// Drivers before the fields had a call for every counter.
func TestCountersOfOldDrivers(t *testing.T) {
	b := newBox()
	b.lacks["nvmlDeviceGetFieldValues"] = true
	b.gpus[0].GetNvLinkErrorCounterFunc = func(_ int, c nvml.NvLinkErrorCounter) (uint64, nvml.Return) {
		return 10 + uint64(c), nvml.SUCCESS
	}
	devices := b.open(t)
	require.Equal(t, switchbox.LinkErrors{Replay: 10, Recovery: 11, RecoveryFailed: -1, CRC: 12},
		must(devices[0].LinkErrors(0)))
	_, err := devices[1].LinkErrors(0)
	require.ErrorIs(t, err, switchbox.ErrNotSupported, "no counter at all")
	_, err = devices[0].Traffic()
	require.ErrorIs(t, err, switchbox.ErrNotSupported)
	_, err = devices[0].Recovery()
	require.ErrorContains(t, err, "the driver has no nvmlDeviceGetFieldValues")
}

func TestNumbersOfFields(t *testing.T) {
	value := func(kind nvml.ValueType, bits uint64) nvml.FieldValue {
		v := nvml.FieldValue{ValueType: uint32(kind)}
		binary.NativeEndian.PutUint64(v.Value[:], bits)
		return v
	}
	for _, c := range []struct {
		v    nvml.FieldValue
		want uint64
		ok   bool
	}{
		{value(nvml.VALUE_TYPE_UNSIGNED_INT, 0xffffffff_00000007), 7, true},
		{value(nvml.VALUE_TYPE_UNSIGNED_INT, math.MaxUint32), 0, false},
		{value(nvml.VALUE_TYPE_UNSIGNED_LONG, 1<<40), 1 << 40, true},
		{value(nvml.VALUE_TYPE_UNSIGNED_LONG_LONG, math.MaxUint64), 0, false},
		{value(nvml.VALUE_TYPE_SIGNED_LONG_LONG, 5), 5, true},
		{value(nvml.VALUE_TYPE_SIGNED_INT, 0xffffffff), 0, false},
		{value(nvml.VALUE_TYPE_SIGNED_INT, 5), 5, true},
		{value(nvml.VALUE_TYPE_UNSIGNED_SHORT, 0xf0009), 9, true},
		{value(nvml.VALUE_TYPE_DOUBLE, math.Float64bits(2.5)), 2, true},
		{value(nvml.VALUE_TYPE_DOUBLE, math.Float64bits(math.NaN())), 0, false},
		{nvml.FieldValue{NvmlReturn: uint32(nvml.ERROR_NOT_SUPPORTED)}, 0, false},
	} {
		n, ok := number(c.v)
		require.Equal(t, c.ok, ok, "%+v", c.v)
		if ok {
			require.Equal(t, c.want, n, "%+v", c.v)
		}
	}
}

// The links are active at full speed, and yet nothing can use them.
func TestUnregisteredFabric(t *testing.T) {
	for _, c := range []struct {
		info nvml.GpuFabricInfo
		want switchbox.Fabric
	}{
		{nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_NOT_SUPPORTED},
			switchbox.Fabric{State: switchbox.FabricNotSupported}},
		{nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_NOT_STARTED, Status: 3},
			switchbox.Fabric{State: switchbox.FabricNotStarted}},
		{nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_IN_PROGRESS}, switchbox.Fabric{State: switchbox.FabricInProgress}},
		{nvml.GpuFabricInfo{State: 9}, switchbox.Fabric{State: "state 9"}},
		{
			nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_COMPLETED, Status: uint32(nvml.ERROR_IN_USE)},
			switchbox.Fabric{State: switchbox.FabricCompleted, Status: "ERROR_IN_USE"},
		},
		{
			nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_COMPLETED, CliqueId: 7, ClusterUuid: [16]uint8{0xde, 0xad, 15: 1}},
			switchbox.Fabric{State: switchbox.FabricCompleted, Cluster: "dead0000-0000-0000-0000-000000000001", Clique: 7},
		},
	} {
		b := newBox()
		b.gpus[2].GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) { return c.info, nvml.SUCCESS }
		require.Equal(t, c.want, must(b.open(t)[2].Fabric()))
	}
}

func TestFabricThatIsNotSupported(t *testing.T) {
	b := newBox()
	b.gpus[0].GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) {
		return nvml.GpuFabricInfo{}, nvml.ERROR_NOT_SUPPORTED
	}
	_, err := b.open(t)[0].Fabric()
	require.ErrorIs(t, err, switchbox.ErrNotSupported)
	b.lacks["nvmlDeviceGetGpuFabricInfo"] = true
	_, err = b.open(t)[1].Fabric()
	require.ErrorContains(t, err, "the driver knows no fabric")
}

func TestHealthMask(t *testing.T) {
	for _, c := range []struct {
		mask    uint32
		summary uint8
		want    switchbox.Fabric
	}{
		{0, 0, switchbox.Fabric{}},
		{2 | 2<<2 | 2<<4 | 2<<6 | 1<<8 | 1<<12, 1, switchbox.Fabric{}}, // all is well, in every part
		{1, 0, switchbox.Fabric{Degraded: true}},
		{1 << 2, 0, switchbox.Fabric{Recovering: true}},
		{1 << 4, 0, switchbox.Fabric{Unhealthy: true}},
		{1 << 6, 0, switchbox.Fabric{Timeouts: true}},
		{5 << 8, 0, switchbox.Fabric{Misconfigured: true}},
		{8 << 8, 0, switchbox.Fabric{Misconfigured: true}},
		{2 << 12, 0, switchbox.Fabric{Misconfigured: true}},
		{0, nvml.GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY, switchbox.Fabric{Unhealthy: true}},
		{0, nvml.GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY, switchbox.Fabric{Degraded: true}},
	} {
		c.want.State = switchbox.FabricCompleted
		require.Equal(t, c.want, fabric(fabricInfo{State: nvml.GPU_FABRIC_STATE_COMPLETED, HealthMask: c.mask,
			HealthSummary: c.summary}),
			"%#x %d", c.mask, c.summary)
	}
}

func TestPeers(t *testing.T) {
	b := newBox()
	b.gpus[0].GetP2PStatusFunc = func(_ nvml.Device, i nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
		return map[nvml.GpuP2PCapsIndex]nvml.GpuP2PStatus{
			nvml.P2P_CAPS_INDEX_READ:   nvml.P2P_STATUS_CHIPSET_NOT_SUPPORTED,
			nvml.P2P_CAPS_INDEX_WRITE:  nvml.P2P_STATUS_DISABLED_BY_REGKEY,
			nvml.P2P_CAPS_INDEX_NVLINK: nvml.P2P_STATUS_NOT_SUPPORTED,
		}[i], nvml.SUCCESS
	}
	d := b.open(t)[0]
	require.Equal(t, switchbox.Peer{Read: "CNS", Write: "DR", NVLink: "NS"}, must(d.Peer(1)))
	for _, other := range []int{-1, 8} {
		_, err := d.Peer(other)
		require.ErrorContains(t, err, fmt.Sprintf("there is no device %d", other))
	}
	for s, want := range map[nvml.GpuP2PStatus]switchbox.P2P{
		nvml.P2P_STATUS_GPU_NOT_SUPPORTED: "GNS", nvml.P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED: "TNS",
		nvml.P2P_STATUS_UNKNOWN: "U", 77: "U",
	} {
		require.Equal(t, want, p2p(s))
	}
}

func TestMemoryInUse(t *testing.T) {
	b := newBox()
	b.gpus[0].GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		return []nvml.ProcessInfo{
			{Pid: uint32(os.Getpid()), UsedGpuMemory: 3}, {Pid: 1, UsedGpuMemory: math.MaxUint64}, {Pid: 1 << 30,
				UsedGpuMemory: 9},
		}, nvml.SUCCESS
	}
	m := must(b.open(t)[0].Memory())
	require.EqualValues(t, 3, m.Own)
	require.Len(t, m.Users, 2)
	require.EqualValues(t, 0, m.Users[0].Used, "not known in MIG mode and in containers")
	require.NotEmpty(t, m.Users[0].Name)
	require.Equal(t, switchbox.User{PID: 1 << 30, Used: 9}, m.Users[1])
	b.gpus[0].GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		return nil, nvml.ERROR_NO_PERMISSION
	}
	require.Empty(t, must(b.open(t)[0].Memory()).Users, "the sum is there all the same")
	b.lacks["nvmlDeviceGetMemoryInfo_v2"] = true
	b.gpus[0].MemoryInfo.Used = 1 << 30
	require.EqualValues(t, 1<<30, must(b.open(t)[0].Memory()).Used)
}

func TestMemoryErrors(t *testing.T) {
	b := newBox()
	b.gpus[0].GetTotalEccErrorsFunc = func(k nvml.MemoryErrorType, c nvml.EccCounterType) (uint64, nvml.Return) {
		require.Equal(t, nvml.EccCounterType(nvml.VOLATILE_ECC), c)
		return 4 + uint64(k), nvml.SUCCESS
	}
	b.gpus[0].GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) { return 3, 2, true, true, nvml.SUCCESS }
	b.gpus[1].GetEccModeFunc = func() (nvml.EnableState, nvml.EnableState, nvml.Return) { return 0, 0, nvml.SUCCESS }
	b.gpus[2].GetEccModeFunc = func() (nvml.EnableState, nvml.EnableState, nvml.Return) {
		return 0, 0, nvml.ERROR_NOT_SUPPORTED
	}
	devices := b.open(t)
	require.Equal(t, switchbox.ECC{Enabled: true, Corrected: 4, Uncorrected: 5}, must(devices[0].ECC()))
	require.Equal(t, switchbox.Remap{Uncorrectable: 2, Pending: true, Failed: true}, must(devices[0].Remap()))
	require.Equal(t, switchbox.ECC{}, must(devices[1].ECC()))
	_, err := devices[2].ECC()
	require.ErrorIs(t, err, switchbox.ErrNotSupported)
}

func TestRetiredPagesBeforeAmpere(t *testing.T) {
	b := newBox()
	b.gpus[0].GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) {
		return 0, 0, false, false, nvml.ERROR_NOT_SUPPORTED
	}
	b.gpus[0].GetRetiredPagesFunc = func(nvml.PageRetirementCause) ([]uint64, nvml.Return) {
		return []uint64{1, 2}, nvml.SUCCESS
	}
	b.gpus[0].GetRetiredPagesPendingStatusFunc = func() (nvml.EnableState, nvml.Return) {
		return nvml.FEATURE_ENABLED, nvml.SUCCESS
	}
	require.Equal(t, switchbox.Remap{Uncorrectable: 2, Pending: true}, must(b.open(t)[0].Remap()))
}

func TestRecoveryActions(t *testing.T) {
	b := newBox()
	d := b.open(t)[0]
	for action, want := range []switchbox.Recovery{
		switchbox.RecoverNothing, switchbox.RecoverReset, switchbox.RecoverReboot, switchbox.RecoverDrainP2P,
		switchbox.RecoverDrain,
		"recover_imex_domain", "action 6",
	} {
		b.fields[0][[2]uint32{nvml.FI_DEV_GET_GPU_RECOVERY_ACTION, 0}] = uint64(action)
		require.Equal(t, want, must(d.Recovery()))
	}
	delete(b.fields[0], [2]uint32{nvml.FI_DEV_GET_GPU_RECOVERY_ACTION, 0})
	_, err := d.Recovery()
	require.ErrorIs(t, err, switchbox.ErrNotSupported)
}

func TestXidsAreFiledByDevice(t *testing.T) {
	b := newBox()
	b.gpus[5].RegisterEventsFunc = func(uint64, nvml.EventSet) nvml.Return { return nvml.ERROR_NOT_SUPPORTED }
	devices := b.open(t)
	b.events = []nvml.EventData{
		{Device: b.gpus[1], EventType: nvml.EventTypeXidCriticalError, EventData: 79},
		{Device: b.gpus[2], EventType: nvml.EventTypeXidCriticalError, EventData: 74},
		{Device: b.gpus[1], EventType: nvml.EventTypeXidCriticalError, EventData: 7777},
		{Device: b.gpus[1], EventType: nvml.EventTypeGpuUnavailableError},
	}
	require.Empty(t, must(devices[0].Xids()))
	require.Equal(t, []switchbox.Xid{{Number: 79, Text: "GPU has fallen off the bus"}, {Number: 7777}},
		must(devices[1].Xids()))
	require.Len(t, must(devices[2].Xids()), 1)
	require.Len(t, must(devices[1].Xids()), 2, "once more")
	_, err := devices[5].Xids()
	require.ErrorIs(t, err, switchbox.ErrNotSupported)
}

// A storm of events must not keep the check from its end.
func TestXidStormIsBounded(t *testing.T) {
	b := newBox()
	devices := b.open(t)
	for range 1000 {
		b.events = append(b.events, nvml.EventData{Device: b.gpus[0], EventType: nvml.EventTypeXidCriticalError,
			EventData: 74})
	}
	require.Len(t, must(devices[0].Xids()), maxEvents)
}

func TestMIGAndVirtual(t *testing.T) {
	b := newBox()
	b.gpus[0].MigMode = nvml.DEVICE_MIG_ENABLE
	b.gpus[1].GetVirtualizationModeFunc = func() (nvml.GpuVirtualizationMode, nvml.Return) {
		return nvml.GPU_VIRTUALIZATION_MODE_VGPU, nvml.SUCCESS
	}
	b.gpus[2].GetMigModeFunc = func() (int, int, nvml.Return) { return 0, 0, nvml.ERROR_NOT_SUPPORTED }
	devices := b.open(t)
	require.Equal(t, switchbox.Mode{MIG: true}, must(devices[0].Mode()))
	require.Equal(t, switchbox.Mode{Virtual: true}, must(devices[1].Mode()))
	require.Equal(t, switchbox.Mode{}, must(devices[2].Mode()))
}

// Every call of a device that NVML gives no handle for says why, none of them panics, and no other device suffers.
func TestDeviceWithoutAHandle(t *testing.T) {
	for ret, want := range map[nvml.Return]string{
		nvml.ERROR_GPU_IS_LOST:        "Mode: the driver refuses the device: ERROR_GPU_IS_LOST",
		nvml.ERROR_RESET_REQUIRED:     "Mode: the driver refuses the device: ERROR_RESET_REQUIRED",
		nvml.ERROR_INSUFFICIENT_POWER: "Mode: the driver refuses the device: ERROR_INSUFFICIENT_POWER",
		nvml.ERROR_UNKNOWN:            "Mode: the driver refuses the device: NVML gives no handle: ERROR_UNKNOWN",
	} {
		b := newBox()
		handle := b.DeviceGetHandleByIndexFunc
		b.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
			if i == 6 {
				return nil, ret
			}
			return handle(i)
		}
		devices := b.open(t)
		require.Len(t, devices, 8, "it is not forgotten")
		require.Equal(t, switchbox.Identity{Index: 6}, devices[6].Identity())
		all := switchbox.Read(devices, nil)
		require.Equal(t, want, all[6].Lost)
		require.Empty(t, all[0].Lost)
		require.Len(t, switchbox.Judge(all), 1)
		for call, err := range errorsOf(devices[6]) {
			require.ErrorIs(t, err, switchbox.ErrLost, call)
		}
	}
}

// A device of which a call says that it is of no use is not called sound, whatever its handle.
func TestDeviceThatNVMLRefuses(t *testing.T) {
	for ret, want := range map[nvml.Return]string{
		nvml.ERROR_RESET_REQUIRED: "GPU 3 cannot be used: ECC: the driver refuses the device: ERROR_RESET_REQUIRED",
		nvml.ERROR_UNKNOWN:        "GPU 3 cannot be asked for ECC: ERROR_UNKNOWN",
	} {
		b := newBox()
		b.gpus[3].GetTotalEccErrorsFunc = func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) {
			return 0, ret
		}
		findings := switchbox.Judge(switchbox.Read(b.open(t), nil))
		require.Len(t, findings, 1)
		require.Equal(t, switchbox.Fatal, findings[0].Severity)
		require.Equal(t, want, findings[0].Text)
	}
}

// What another container has is none of this one's devices.
func TestDeviceOfOthers(t *testing.T) {
	b := newBox()
	handle := b.DeviceGetHandleByIndexFunc
	b.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		if i == 6 {
			return nil, nvml.ERROR_NO_PERMISSION
		}
		return handle(i)
	}
	b.gpus[2].GetMinorNumberFunc = func() (int, nvml.Return) { return 9, nvml.SUCCESS }
	b.gpus[3].GetMinorNumberFunc = func() (int, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
	l, err := open(b)
	require.NoError(t, err)
	require.Len(t, l.Devices(), 7)
	require.Equal(t, []int{0, 1, 9, -1, 4, 5, -1, 7}, l.Files())
}

// A P2P status that is refused does not say which of the two is lost.
func TestLostPeer(t *testing.T) {
	b := newBox()
	for i := range 2 {
		b.gpus[i].GetP2PStatusFunc = func(nvml.Device, nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
			return 0, nvml.ERROR_GPU_IS_LOST
		}
	}
	_, err := b.open(t)[0].Peer(1)
	require.ErrorContains(t, err, "one of devices 0 and 1: ")
	require.NotErrorIs(t, err, switchbox.ErrLost)
}

// errorsOf calls everything.
func errorsOf(d switchbox.Device) map[string]error {
	all := map[string]error{}
	note := func(call string, err error) { all[call] = err }
	_, err := d.Mode()
	note("Mode", err)
	_, err = d.Links()
	note("Links", err)
	_, err = d.Link(0)
	note("Link", err)
	_, err = d.LinkErrors(0)
	note("LinkErrors", err)
	_, err = d.Traffic()
	note("Traffic", err)
	_, err = d.Fabric()
	note("Fabric", err)
	_, err = d.Peer(0)
	note("Peer", err)
	_, err = d.Memory()
	note("Memory", err)
	_, err = d.ECC()
	note("ECC", err)
	_, err = d.Remap()
	note("Remap", err)
	_, err = d.PCIe()
	note("PCIe", err)
	_, err = d.Clocks()
	note("Clocks", err)
	_, err = d.Recovery()
	note("Recovery", err)
	_, err = d.Xids()
	note("Xids", err)
	return all
}

// A driver without any of the functions that came later: nothing is called that is not there, nothing panics.
func TestAncientDriver(t *testing.T) {
	b := newBox()
	b.LookupSymbolFunc = func(symbol string) error { return errors.New("undefined symbol: " + symbol) }
	b.Devices = []nvml.Device{&mock.Device{}} // panics at every call
	b.DeviceGetCountFunc = func() (int, nvml.Return) { return 1, nvml.SUCCESS }
	l, err := open(b)
	require.NoError(t, err)
	d := l.devices[0]
	d.handle.(*mock.Device).GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) {
		return nvml.PciInfo{}, nvml.ERROR_UNKNOWN
	}
	require.Equal(t, switchbox.Identity{}, d.Identity())
	for call, err := range errorsOf(d) {
		if call != "Mode" {
			require.ErrorIs(t, err, switchbox.ErrNotSupported, call)
		}
	}
	l.Close()
}

func TestOpenErrors(t *testing.T) {
	for _, c := range []struct {
		ret      nvml.Return
		noDriver bool
		want     string
	}{
		{nvml.ERROR_LIBRARY_NOT_FOUND, true, "libnvidia-ml.so.1 cannot be loaded"},
		{nvml.ERROR_DRIVER_NOT_LOADED, true, "the kernel module is not loaded"},
		{nvml.ERROR_NO_PERMISSION, true, "this process may not use it"},
		{nvml.ERROR_LIB_RM_VERSION_MISMATCH, false, "of different versions"},
		{nvml.ERROR_UNKNOWN, false, "NVML cannot be initialised: ERROR_UNKNOWN"},
	} {
		b := newBox()
		b.InitFunc = func() nvml.Return { return c.ret }
		_, err := open(b)
		require.ErrorContains(t, err, c.want)
		require.Equal(t, c.noDriver, errors.Is(err, ErrNoDriver), err)
	}
	b := newBox()
	b.DeviceGetCountFunc = func() (int, nvml.Return) { return 0, nvml.ERROR_GPU_IS_LOST }
	_, err := open(b)
	require.ErrorContains(t, err, "cannot count the devices")
}

// This is what a machine without a driver says; one with a driver opens.
func TestOpenHere(t *testing.T) {
	l, err := Open()
	if err == nil {
		require.NotEmpty(t, l.Driver())
		l.Close()
		return
	}
	require.ErrorIs(t, err, ErrNoDriver)
	require.False(t, strings.Contains(err.Error(), "\n"))
}
