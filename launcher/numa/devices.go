package numa

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Devices returns the PCI addresses of the accelerators that this process can open, in the order in which the framework
// numbers them: NVIDIA's, else AMD's, else MetaX's.
//
// CUDA numbers faster GPUs first and uses the PCI bus only among equals. On a machine with GPUs of several kinds the
// order is right under CUDA_DEVICE_ORDER=PCI_BUS_ID only.
func Devices(root fs.FS) ([]string, error) {
	for _, find := range []func(fs.FS) []string{nvidia, amd, metax} {
		if found := find(root); len(found) > 0 {
			return found, nil
		}
	}
	return nil, errors.New("NUMA binding goes by the accelerator of each worker, " +
		"and no NVIDIA, AMD or MetaX device is visible: " +
		"remove the option, or give the container its accelerators")
}

// nvidia reads the driver's own list. A container may see all of it, but has the device files of its own GPUs only.
func nvidia(root fs.FS) []string {
	const dir = "proc/driver/nvidia/gpus"
	return busOrder(slices.DeleteFunc(names(root, dir), func(address string) bool {
		info, _ := readText(root, dir, address, "information")
		return field(info, "GPU Excluded:") == "Yes" || !exists(root, "dev/nvidia"+field(info, "Device Minor:"))
	}))
}

// amd uses the node numbers of the compute driver, which are ROCm's order. A container cannot read the nodes that its
// device cgroup denies.
func amd(root fs.FS) (found []string) {
	const dir = "sys/class/kfd/kfd/topology/nodes"
	for _, node := range busOrder(names(root, dir)) {
		properties, _ := readText(root, dir, node, "properties")
		location, err := strconv.ParseUint(field(properties, "location_id "), 10, 32)
		domain, err2 := strconv.ParseUint(field(properties, "domain "), 10, 32)
		// CPU nodes have the minor 0.
		if err == nil && err2 == nil && exists(root, "dev/dri/renderD"+field(properties, "drm_render_minor ")) {
			// The low three bits are the function or, on a partitioned GPU, the partition, which has no address of its own.
			found = append(found, fmt.Sprintf("%04x:%02x:%02x.0", domain, location>>8&0xff, location>>3&0x1f))
		}
	}
	return found
}

// metax looks for MetaX's PCI vendor number; only a GPU has DRM nodes.
func metax(root fs.FS) []string {
	return busOrder(slices.DeleteFunc(names(root, pciDir), func(address string) bool {
		vendor, _ := readText(root, pciDir, address, "vendor")
		renders := func(node string) bool {
			return strings.HasPrefix(node, "renderD") && exists(root, "dev/dri/"+node)
		}
		return vendor != "0x9999" || !slices.ContainsFunc(names(root, path.Join(pciDir, address, "drm")), renders)
	}))
}

// Select returns the devices that a list of numbers such as CUDA_VISIBLE_DEVICES selects, in its order; variable is its
// name for errors. As in CUDA the list ends at the first entry that is not a device.
func Select(devices []string, variable, list string) ([]string, error) {
	var numbers []int
	var selected []string
	for entry := range strings.SplitSeq(list, ",") {
		entry = strings.TrimSpace(entry)
		if strings.HasPrefix(entry, "GPU-") || strings.HasPrefix(entry, "MIG-") {
			return nil, fmt.Errorf("%s=%s selects by UUID, which NUMA binding cannot resolve: use numbers, "+
				"or remove the option", variable, list)
		}
		n, err := strconv.Atoi(entry)
		if err != nil || n < 0 || n >= len(devices) {
			break
		}
		if slices.Contains(numbers, n) {
			return nil, fmt.Errorf("%s=%s names accelerator %d twice, so that the framework sees none: name it once",
				variable, list, n)
		}
		numbers, selected = append(numbers, n), append(selected, devices[n])
	}
	if len(selected) == 0 {
		return nil, fmt.Errorf("%s=%s selects none of the %d accelerators: correct it, or remove the option",
			variable, list, len(devices))
	}
	return selected, nil
}

// busOrder sorts PCI addresses or plain numbers; the longer is the greater (domains may have more than four digits).
func busOrder(list []string) []string {
	slices.SortFunc(list, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	return list
}

// field returns the text behind key on its line.
func field(text, key string) string {
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, key); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

func exists(root fs.FS, name string) bool {
	_, err := fs.Stat(root, name)
	return err == nil
}
