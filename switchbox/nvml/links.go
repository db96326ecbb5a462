//go:build cgo && linux

package nvml

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"dlrover-run/switchbox"
)

func isLost(err error) bool { return errors.Is(err, switchbox.ErrLost) }

// Links counts the links up to the first that the device does not know: the header's maximum is that of any GPU.
func (d *device) Links() (int, error) {
	if err := d.usable("nvmlDeviceGetNvLinkState"); err != nil {
		return 0, err
	}
	for n := range nvml.NVLINK_MAX_LINKS {
		_, ret := d.handle.GetNvLinkState(n)
		switch err := absent(ret); {
		case errors.Is(err, switchbox.ErrNotSupported):
			return n, nil
		case err != nil:
			return 0, err
		}
	}
	return nvml.NVLINK_MAX_LINKS, nil
}

// Link fails only when the state cannot be read. Other values that the driver does not return stay unknown.
func (d *device) Link(link int) (switchbox.Link, error) {
	if err := d.usable("nvmlDeviceGetNvLinkState"); err != nil {
		return switchbox.Link{}, err
	}
	state, ret := d.handle.GetNvLinkState(link)
	if err := absent(ret); err != nil {
		return switchbox.Link{}, err
	}
	if state != nvml.FEATURE_ENABLED {
		return switchbox.Link{}, nil
	}
	l := switchbox.Link{Active: true, Remote: d.remote(link)}
	if d.usable("nvmlDeviceGetNvLinkVersion") == nil {
		if v, ret := d.handle.GetNvLinkVersion(link); ret == nvml.SUCCESS {
			l.Version = int(v)
		}
	}
	if pci, ret := d.handle.GetNvLinkRemotePciInfo(link); ret == nvml.SUCCESS {
		l.PCI = pciAddress(pci)
	}
	speed, err := d.speed(link)
	l.MBps = speed
	return l, err
}

// remote is the kind of device at the other end. On boards with NVSwitches that is the switch, never a GPU.
func (d *device) remote(link int) switchbox.Remote {
	if d.usable("nvmlDeviceGetNvLinkRemoteDeviceType") != nil {
		return switchbox.RemoteUnknown
	}
	kind, ret := d.handle.GetNvLinkRemoteDeviceType(link)
	if ret != nvml.SUCCESS {
		return switchbox.RemoteUnknown
	}
	switch nvml.IntNvLinkDeviceType(kind) {
	case nvml.NVLINK_DEVICE_TYPE_GPU:
		return switchbox.RemoteGPU
	case nvml.NVLINK_DEVICE_TYPE_SWITCH:
		return switchbox.RemoteSwitch
	case nvml.NVLINK_DEVICE_TYPE_IBMNPU:
		return switchbox.RemoteCPU
	default:
		return switchbox.RemoteUnknown
	}
}

// speed is the nominal speed of a link, or 0.
func (d *device) speed(link int) (int, error) {
	values, err := d.fields(uint32(link), nvml.FI_DEV_NVLINK_GET_SPEED, nvml.FI_DEV_NVLINK_SPEED_MBPS_COMMON)
	if err != nil {
		return 0, onlyLost(err)
	}
	if mbps := values[nvml.FI_DEV_NVLINK_GET_SPEED]; mbps > 0 {
		return int(mbps), nil
	}
	return int(values[nvml.FI_DEV_NVLINK_SPEED_MBPS_COMMON]), nil
}

func onlyLost(err error) error {
	if isLost(err) {
		return err
	}
	return nil
}

// LinkErrors reads the counters of NVLink 1 to 4, and those that NVLink 5 has instead.
func (d *device) LinkErrors(link int) (switchbox.LinkErrors, error) {
	e := switchbox.LinkErrors{Replay: -1, Recovery: -1, RecoveryFailed: -1, CRC: -1}
	values, err := d.fields(uint32(link), nvml.FI_DEV_NVLINK_ERROR_DL_REPLAY, nvml.FI_DEV_NVLINK_ERROR_DL_RECOVERY,
		nvml.FI_DEV_NVLINK_ERROR_DL_CRC, nvml.FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS,
		nvml.FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS, nvml.FI_DEV_NVLINK_COUNT_RCV_ERRORS)
	if isLost(err) {
		return e, err
	}
	for _, c := range []struct {
		to      *int64
		fields  []uint32
		counter nvml.NvLinkErrorCounter
	}{
		{&e.Replay, []uint32{nvml.FI_DEV_NVLINK_ERROR_DL_REPLAY}, nvml.NVLINK_ERROR_DL_REPLAY},
		{&e.Recovery, []uint32{nvml.FI_DEV_NVLINK_ERROR_DL_RECOVERY,
			nvml.FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS}, nvml.NVLINK_ERROR_DL_RECOVERY},
		{&e.CRC, []uint32{nvml.FI_DEV_NVLINK_ERROR_DL_CRC, nvml.FI_DEV_NVLINK_COUNT_RCV_ERRORS},
			nvml.NVLINK_ERROR_DL_CRC_FLIT},
	} {
		*c.to = firstOf(values, c.fields)
		if *c.to < 0 {
			*c.to = d.counter(link, c.counter)
		}
	}
	e.RecoveryFailed = firstOf(values, []uint32{nvml.FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS})
	if e == (switchbox.LinkErrors{Replay: -1, Recovery: -1, RecoveryFailed: -1, CRC: -1}) {
		return e, fmt.Errorf("%w: link %d has no error counters", switchbox.ErrNotSupported, link)
	}
	return e, nil
}

// firstOf is the first of the fields that the device has, or -1.
func firstOf(values map[uint32]uint64, fields []uint32) int64 {
	for _, f := range fields {
		if n, ok := values[f]; ok {
			return int64(n)
		}
	}
	return -1
}

// counter is an error counter through the call that drivers had before the fields, or -1.
func (d *device) counter(link int, c nvml.NvLinkErrorCounter) int64 {
	if d.usable("nvmlDeviceGetNvLinkErrorCounter") != nil {
		return -1
	}
	n, ret := d.handle.GetNvLinkErrorCounter(link, c)
	if ret != nvml.SUCCESS || n > 1<<62 {
		return -1
	}
	return int64(n)
}

// Traffic is in KiB for all links up to NVLink 4, and in bytes by link for NVLink 5.
func (d *device) Traffic() (switchbox.Traffic, error) {
	values, err := d.fields(allLinks, nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
	if err != nil && !errors.Is(err, switchbox.ErrNotSupported) {
		return switchbox.Traffic{}, err
	}
	if len(values) == 2 {
		return switchbox.Traffic{
			Sent:     values[nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX] << 10,
			Received: values[nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX] << 10,
		}, nil
	}
	return d.trafficByLink()
}

func (d *device) trafficByLink() (switchbox.Traffic, error) {
	var sum switchbox.Traffic
	n, err := d.Links()
	if err == nil && n == 0 {
		err = fmt.Errorf("%w: there are no links", switchbox.ErrNotSupported)
	}
	for link := 0; link < n && err == nil; link++ {
		var values map[uint32]uint64
		values, err = d.fields(uint32(link), nvml.FI_DEV_NVLINK_COUNT_XMIT_BYTES, nvml.FI_DEV_NVLINK_COUNT_RCV_BYTES)
		if err == nil && len(values) < 2 {
			err = fmt.Errorf("%w: link %d does not count bytes", switchbox.ErrNotSupported, link)
		}
		sum.Sent += values[nvml.FI_DEV_NVLINK_COUNT_XMIT_BYTES]
		sum.Received += values[nvml.FI_DEV_NVLINK_COUNT_RCV_BYTES]
	}
	return sum, err
}

// Peer asks for reading, writing and the way over NVLink.
func (d *device) Peer(other int) (switchbox.Peer, error) {
	var p switchbox.Peer
	if err := d.usable("nvmlDeviceGetP2PStatus"); err != nil {
		return p, err
	}
	if other < 0 || other >= len(d.lib.devices) {
		return p, fmt.Errorf("there is no device %d", other)
	}
	peer := d.lib.devices[other]
	if peer.broken != nil {
		return p, fmt.Errorf("%w: device %d: %v", switchbox.ErrNotSupported, other, peer.broken)
	}
	for _, c := range []struct {
		to  *switchbox.P2P
		cap nvml.GpuP2PCapsIndex
	}{
		{&p.Read, nvml.P2P_CAPS_INDEX_READ}, {&p.Write, nvml.P2P_CAPS_INDEX_WRITE}, {&p.NVLink, nvml.P2P_CAPS_INDEX_NVLINK},
	} {
		status, ret := d.handle.GetP2PStatus(peer.handle, c.cap)
		if err := absent(ret); isLost(err) {
			return p, fmt.Errorf("one of devices %d and %d: %v", d.index, other, err) // it does not say which
		} else if err != nil {
			return p, err
		}
		*c.to = p2p(status)
	}
	return p, nil
}

func p2p(s nvml.GpuP2PStatus) switchbox.P2P {
	switch s {
	case nvml.P2P_STATUS_OK:
		return switchbox.P2POK
	case nvml.P2P_STATUS_CHIPSET_NOT_SUPPORTED:
		return switchbox.P2PChipset
	case nvml.P2P_STATUS_GPU_NOT_SUPPORTED:
		return switchbox.P2PGPU
	case nvml.P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED:
		return switchbox.P2PTopology
	case nvml.P2P_STATUS_DISABLED_BY_REGKEY:
		return switchbox.P2PDisabled
	case nvml.P2P_STATUS_NOT_SUPPORTED:
		return switchbox.P2PNone
	default:
		return switchbox.P2PUnknown
	}
}
