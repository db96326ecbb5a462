package proc

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// DeviceFiles names the files that GPUCount looks for, for messages.
const DeviceFiles = "/dev/nvidia0 and so on, /dev/kfd, /dev/davinci0 and so on, and /dev/mxcd"

// GPUCount returns how many accelerators a worker of this process would see and
// their kind: "cuda", "rocm", "ascend", "metax", or "" and 0. It counts device
// files below root ("" = /) and applies the variables that the vendor's runtime
// applies, read through lookup (os.LookupEnv), without loading a driver library.
//
// NVIDIA_VISIBLE_DEVICES is not among them: the container runtime has applied
// it when it made the device files, and CUDA itself ignores it.
func GPUCount(root string, lookup func(string) (string, bool)) (int, string) {
	dev := filepath.Join("/", root, "dev")
	if n := countNumbered(dev, "nvidia"); n > 0 {
		return visible(n, lookup, "CUDA_VISIBLE_DEVICES"), "cuda"
	}
	render := countNumbered(filepath.Join(dev, "dri"), "renderD")
	if n := min(countKFD(root, render), render); n > 0 && exists(filepath.Join(dev, "kfd")) {
		// ROCR selects first and HIP selects among the rest. HIP takes CUDA's variable if its own is not set.
		n = visible(n, lookup, "ROCR_VISIBLE_DEVICES")
		return visible(n, lookup, "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), "rocm"
	}
	if n := countNumbered(dev, "davinci"); n > 0 {
		return visible(n, lookup, "ASCEND_RT_VISIBLE_DEVICES"), "ascend"
	}
	if n := min(countMetaX(sysfs(root, lookup), render), render); n > 0 && exists(filepath.Join(dev, "mxcd")) {
		return visible(n, lookup, "MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), "metax"
	}
	return 0, ""
}

// countNumbered counts the names prefix0, prefix1, … in dir; nvidiactl and
// nvidia-uvm are none.
func countNumbered(dir, prefix string) (n int) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if num, ok := strings.CutPrefix(e.Name(), prefix); ok && isNumber(num) {
			n++
		}
	}
	return n
}

func isNumber(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

// countKFD counts the GPU nodes of AMD's kernel driver with a render device (a container sees the nodes of all GPUs,
// but only its own devices). Other makers' display adapters have a renderD as well. Without the driver's directory
// every render device counts.
func countKFD(root string, render int) (n int) {
	nodes, _ := filepath.Glob(filepath.Join("/", root, "sys/class/kfd/kfd/topology/nodes/*/properties"))
	if len(nodes) == 0 {
		return render
	}
	for _, node := range nodes {
		text, _ := os.ReadFile(node)
		minor := parseKey(string(text), "drm_render_minor") // 0 on a CPU node
		if minor > 0 && exists(filepath.Join("/", root, "dev/dri", "renderD"+strconv.FormatInt(minor, 10))) {
			n++
		}
	}
	return n
}

// sysfs is where the kernel lists its devices; in a container the host's may lie elsewhere.
func sysfs(root string, lookup func(string) (string, bool)) string {
	if dir, ok := lookup("DLROVER_SYSFS_ROOT"); ok && dir != "" {
		return dir
	}
	return filepath.Join("/", root, "sys")
}

// countMetaX counts the devices in the layout of MetaX's kernel driver; a container may have only some of them. Display
// adapters are not in it. Without a layout every render device counts.
func countMetaX(sysfs string, render int) (n int) {
	for _, driver := range []string{"mxcd", "metax"} {
		nodes, _ := filepath.Glob(filepath.Join(sysfs, "class", driver, "mxcd/layout/nodes/*/properties"))
		for _, node := range nodes {
			if text, _ := os.ReadFile(node); strings.Contains("\n"+string(text), "\nmgpu_id ") {
				n++
			}
		}
		if len(nodes) > 0 {
			return n
		}
	}
	return render
}

// visible applies the first of the variables that is set to n devices.
func visible(n int, lookup func(string) (string, bool), names ...string) int {
	for _, name := range names {
		if list, ok := lookup(name); ok {
			return selected(list, n)
		}
	}
	return n
}

// selected returns how many of n devices a list selects, by CUDA's rules as in torch.cuda.device_count: the list ends
// at the first entry that is not a device, and a list with a device twice selects none. UUIDs cannot be checked here,
// and count as valid. Of several MIG instances CUDA takes one.
func selected(list string, n int) int {
	switch {
	case strings.HasPrefix(list, "MIG-"):
		return min(len(selectedUUIDs(list, "MIG-")), 1)
	case strings.HasPrefix(list, "GPU-"):
		return min(len(selectedUUIDs(list, "GPU-")), n)
	}
	ids := selectedOrdinals(list)
	if i := slices.IndexFunc(ids, func(id int) bool { return id >= n }); i >= 0 {
		return i
	}
	return len(ids)
}

func selectedUUIDs(list, prefix string) (ids []string) {
	for e := range strings.SplitSeq(list, ",") {
		if slices.Contains(ids, e) {
			return nil
		}
		if !strings.HasPrefix(e, prefix) {
			break
		}
		ids = append(ids, e)
	}
	return ids
}

func selectedOrdinals(list string) (ids []int) {
	for e := range strings.SplitSeq(list, ",") {
		id := leadingInt(strings.TrimSpace(e))
		if id < 0 {
			break
		}
		if slices.Contains(ids, id) {
			return nil
		}
		ids = append(ids, id)
	}
	return ids
}

// leadingInt reads as much of s as is a number ("1gpu" is 1, as for strtoul);
// -1 if nothing is.
func leadingInt(s string) int {
	end := 0
	for end < len(s) && (s[end] >= '0' && s[end] <= '9' || end == 0 && (s[0] == '+' || s[0] == '-')) {
		end++
	}
	n, err := strconv.Atoi(s[:end])
	if err != nil {
		return -1
	}
	return n
}
