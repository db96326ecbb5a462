//go:build cgo && linux

package nvml

import (
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"dlrover-run/switchbox"
)

// fabricInfo is the newest of NVML's structures; older ones leave the end at zero, which means "not supported" there.
type fabricInfo = nvml.GpuFabricInfo_v3

// Fabric takes the newest structure that driver and device support: an H100 refuses the third one.
func (d *device) Fabric() (switchbox.Fabric, error) {
	err := fmt.Errorf("%w: the driver knows no fabric", switchbox.ErrNotSupported)
	for _, v := range []struct {
		symbol string
		get    func() (fabricInfo, nvml.Return)
	}{
		{"nvmlDeviceGetGpuFabricInfoV", d.fabricV3}, {"nvmlDeviceGetGpuFabricInfoV", d.fabricV2},
		{"nvmlDeviceGetGpuFabricInfo", d.fabricV1},
	} {
		if unusable := d.usable(v.symbol); unusable != nil {
			if d.broken != nil {
				return switchbox.Fabric{}, unusable
			}
			continue
		}
		info, ret := v.get()
		if err = absent(ret); err == nil {
			return fabric(info), nil
		}
		if !errors.Is(err, switchbox.ErrNotSupported) {
			return switchbox.Fabric{}, err
		}
	}
	return switchbox.Fabric{}, err
}

func (d *device) fabricV3() (fabricInfo, nvml.Return) { return d.handle.GetGpuFabricInfoV().V3() }

func (d *device) fabricV2() (fabricInfo, nvml.Return) {
	i, ret := d.handle.GetGpuFabricInfoV().V2()
	return fabricInfo{ClusterUuid: i.ClusterUuid, Status: i.Status, CliqueId: i.CliqueId, State: i.State,
		HealthMask: i.HealthMask}, ret
}

func (d *device) fabricV1() (fabricInfo, nvml.Return) {
	i, ret := d.handle.GetGpuFabricInfo()
	return fabricInfo{ClusterUuid: i.ClusterUuid, Status: i.Status, CliqueId: i.CliqueId, State: i.State}, ret
}

// fabric puts NVML's words into switchbox's.
func fabric(i fabricInfo) switchbox.Fabric {
	f := switchbox.Fabric{State: fabricState(i.State)}
	if f.State != switchbox.FabricCompleted {
		return f // the rest means nothing yet
	}
	if status := nvml.Return(i.Status); status != nvml.SUCCESS {
		f.Status = status.Error()
		return f
	}
	f.Cluster, f.Clique = clusterID(i.ClusterUuid), int(i.CliqueId)
	health(&f, i)
	return f
}

func fabricState(state uint8) switchbox.FabricState {
	switch state {
	case nvml.GPU_FABRIC_STATE_NOT_SUPPORTED:
		return switchbox.FabricNotSupported
	case nvml.GPU_FABRIC_STATE_NOT_STARTED:
		return switchbox.FabricNotStarted
	case nvml.GPU_FABRIC_STATE_IN_PROGRESS:
		return switchbox.FabricInProgress
	case nvml.GPU_FABRIC_STATE_COMPLETED:
		return switchbox.FabricCompleted
	default:
		return switchbox.FabricState(fmt.Sprintf("state %d", state))
	}
}

// part is a field of the health mask, which says 0 where it is not supported.
type part struct{ shift, width uint32 }

var (
	degraded   = part{nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW, nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_DEGRADED_BW}
	recovering = part{
		nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY, nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_ROUTE_RECOVERY,
	}
	unhealthy = part{
		nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY, nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_ROUTE_UNHEALTHY,
	}
	timeouts = part{
		nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY, nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_ACCESS_TIMEOUT_RECOVERY,
	}
	configuration = part{
		nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION, nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION,
	}
	partition = part{
		nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_PARTITION_ASSIGNED, nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_PARTITION_ASSIGNED,
	}
)

func (p part) of(mask uint32) uint32 { return mask >> p.shift & p.width }

// health reads the mask, and the summary that sums it up for newer GPUs.
func health(f *switchbox.Fabric, i fabricInfo) {
	m := i.HealthMask
	f.Degraded = degraded.of(m) == nvml.GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE ||
		i.HealthSummary == nvml.GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY
	f.Recovering = recovering.of(m) == nvml.GPU_FABRIC_HEALTH_MASK_ROUTE_RECOVERY_TRUE
	f.Unhealthy = unhealthy.of(m) == nvml.GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_TRUE ||
		i.HealthSummary == nvml.GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY
	f.Timeouts = timeouts.of(m) == nvml.GPU_FABRIC_HEALTH_MASK_ACCESS_TIMEOUT_RECOVERY_TRUE
	f.Misconfigured = configuration.of(m) > nvml.GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE ||
		partition.of(m) == nvml.GPU_FABRIC_HEALTH_MASK_PARTITION_ASSIGNED_FALSE
}

// clusterID is the UUID of the NVLink domain, or "" where there is only one machine in it and NVML leaves it at zero.
func clusterID(u [16]uint8) string {
	if u == [16]uint8{} {
		return ""
	}
	h := hex.EncodeToString(u[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}
