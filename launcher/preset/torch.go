package preset

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// torch is the environment that the torchrun of the workers' torch gives to them. The two PYTHON variables are ours:
// output is not lost with the process that buffered it, and a crash leaves a stack.
func torch() Preset { return Preset{Name: "torch", vars: torchVars()} }

func torchVars() []variable { return slices.Concat(ranks(), meeting(), process()) }

// ranks hold the worker's ranks and the number of workers. They mean something to many libraries and disturb none.
func ranks() []variable {
	return []variable{
		number("LOCAL_RANK", torchLocalRank),
		number("RANK", func(v Vars) int { return v.Rank }),
		number("GROUP_RANK", func(v Vars) int { return v.GroupRank }),
		number("ROLE_RANK", func(v Vars) int { return v.RoleRank }),
		text("ROLE_NAME", func(v Vars) string { return v.Role }),
		number("LOCAL_WORLD_SIZE", func(v Vars) int { return v.LocalWorldSize }),
		number("WORLD_SIZE", func(v Vars) int { return v.WorldSize }),
		number("GROUP_WORLD_SIZE", func(v Vars) int { return v.GroupWorldSize }),
		number("ROLE_WORLD_SIZE", func(v Vars) int { return v.RoleWorldSize }),
	}
}

// meeting is the address that torch.distributed needs as well.
func meeting() []variable {
	return []variable{
		text("MASTER_ADDR", func(v Vars) string { return v.MasterAddr }),
		number("MASTER_PORT", func(v Vars) int { return v.MasterPort }),

		// torch.distributed.is_torchelastic_launched() looks for the run id.
		text("TORCHELASTIC_RUN_ID", func(v Vars) string { return v.RunID }),
		number("TORCHELASTIC_RESTART_COUNT", func(v Vars) int { return v.RestartCount }),
		number("TORCHELASTIC_MAX_RESTARTS", func(v Vars) int { return v.MaxRestarts }),
		text("TORCHELASTIC_USE_AGENT_STORE", torchAgentStore),
		text("TORCHELASTIC_ERROR_FILE", func(v Vars) string { return v.ErrorFile }),
		text("TORCHELASTIC_SIGNALS_TO_HANDLE", func(v Vars) string { return v.Signals }),

		// The present name is harmless in every torch; the old one makes each rank of a newer torch warn.
		only(func(v Vars) bool { return v.OldTorch }, inherited("NCCL_ASYNC_ERROR_HANDLING", "1")),
		only(func(v Vars) bool { return !v.OldTorch }, inherited("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")),
	}
}

// process is about the worker's Python, threads and devices.
func process() []variable {
	return []variable{
		inherited("PYTHONUNBUFFERED", "1"),
		inherited("PYTHONFAULTHANDLER", "1"),
		{"OMP_NUM_THREADS", func(v Vars) (string, bool, error) { return "1", ompDefaulted(v.LocalWorldSize, v.Parent), nil }},

		{"CUDA_VISIBLE_DEVICES", virtualDevice},
		{"HIP_VISIBLE_DEVICES", virtualHIPDevice},
	}
}

func torchLocalRank(v Vars) int {
	if v.VirtualLocalRank {
		return 0
	}
	return v.LocalRank
}

// torchAgentStore writes Python's booleans: torch compares the text.
func torchAgentStore(v Vars) string {
	if v.AgentStore {
		return "True"
	}
	return "False"
}

// OMPWarning is the message for the user, once for a launch, when the torch preset sets OMP_NUM_THREADS=1: "" if it
// does not.
func OMPWarning(localWorldSize int, parent LookupEnv) string {
	if !ompDefaulted(localWorldSize, parent) {
		return ""
	}
	return fmt.Sprintf("OMP_NUM_THREADS is not set: every one of the %d workers gets OMP_NUM_THREADS=1 "+
		"so that they do not compete for the CPUs; set it to the number of cores per worker for more speed", localWorldSize)
}

func ompDefaulted(localWorldSize int, parent LookupEnv) bool {
	_, found := parent.lookup("OMP_NUM_THREADS")
	return localWorldSize > 1 && !found
}

// virtualDevice is the one device that a worker sees under --virtual-local-rank: the entry of its local rank in the
// inherited list, or its local rank if there is no list.
func virtualDevice(v Vars) (string, bool, error) {
	if !v.VirtualLocalRank {
		return "", false, nil
	}
	name, list, found := visibleDevices(v.Parent)
	if !found {
		return strconv.Itoa(v.LocalRank), true, nil
	}
	devices := strings.Split(list, ",")
	if v.LocalRank >= len(devices) {
		return "", false, fmt.Errorf("--virtual-local-rank needs a device for each of %d workers, but %s=%q has %d: "+
			"list more devices or lower --nproc-per-node", v.LocalWorldSize, name, list, len(devices))
	}
	return strings.TrimSpace(devices[v.LocalRank]), true, nil
}

// visibleDevices prefers HIP_VISIBLE_DEVICES, unless it is empty: on ROCm it overrides CUDA_VISIBLE_DEVICES.
func visibleDevices(parent LookupEnv) (name, list string, found bool) {
	if list, _ := parent.lookup("HIP_VISIBLE_DEVICES"); list != "" {
		return "HIP_VISIBLE_DEVICES", list, true
	}
	list, found = parent.lookup("CUDA_VISIBLE_DEVICES")
	return "CUDA_VISIBLE_DEVICES", list, found
}

// virtualHIPDevice keeps an inherited HIP_VISIBLE_DEVICES, which would override CUDA_VISIBLE_DEVICES, in step.
func virtualHIPDevice(v Vars) (string, bool, error) {
	if name, _, _ := visibleDevices(v.Parent); name != "HIP_VISIBLE_DEVICES" {
		return "", false, nil
	}
	return virtualDevice(v)
}
