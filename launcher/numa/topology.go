package numa

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
)

const nodeDir, cpuDir, pciDir = "sys/devices/system/node", "sys/devices/system/cpu", "sys/bus/pci/devices"

// topology is the sysfs description of CPUs and NUMA nodes, in the formats of the kernel's
// Documentation/ABI/stable/sysfs-devices-node and sysfs-devices-system-cpu.
type topology struct {
	root    fs.FS
	online  map[int][]int // node -> its online CPUs; nodes of memory only are left out
	allowed []int
}

func readTopology(root fs.FS, allowed []int) (topology, error) {
	t := topology{root: root, online: map[int][]int{}, allowed: allowed}
	for _, name := range names(root, nodeDir) {
		node, err := strconv.Atoi(strings.TrimPrefix(name, "node"))
		if err != nil {
			continue // possible, has_cpu and the like
		}
		cpus, err := t.cpus(nodeDir, name, "cpulist")
		if err != nil {
			return t, err
		}
		if len(cpus) > 0 {
			t.online[node] = cpus
		}
	}
	if len(t.online) == 0 {
		return t, errors.New("there is no NUMA node in /" + nodeDir +
			" (a kernel without NUMA, or no /sys): remove the option")
	}
	return t, nil
}

// nodeOf returns the NUMA node of a PCI device, -1 with an error. The kernel has -1 where the firmware gives no node:
// usual with one node, and with several it happens in virtual machines.
func (t topology) nodeOf(device string) (int, error) {
	node, err := t.number(pciDir, device, "numa_node")
	switch {
	case err != nil:
		return -1, err
	case node >= 0:
		return node, nil
	case len(t.online) == 1:
		return slices.Collect(maps.Keys(t.online))[0], nil
	}
	return -1, fmt.Errorf("its numa_node is %d (unknown) and the machine has %d NUMA nodes: "+
		"set its node in the firmware or in the virtual machine's definition, or remove the option", node, len(t.online))
}

// socketOf returns the CPUs of all nodes on the socket of the node. A node counts to the socket of its first CPU: where
// the firmware interleaves memory, one node spans the sockets.
func (t topology) socketOf(node int) (cpus []int, err error) {
	if t.online[node] == nil {
		return nil, nil
	}
	sockets := map[int][]int{}
	own := 0
	for n, online := range t.online {
		socket, err := t.number(cpuDir, cpuName(online[0]), "topology/physical_package_id")
		if err != nil {
			return nil, err
		}
		sockets[socket] = append(sockets[socket], online...)
		if n == node {
			own = socket
		}
	}
	return slices.Sorted(slices.Values(sockets[own])), nil
}

// usable returns the subset of the CPUs that this process may use.
func (t topology) usable(cpus []int) []int {
	return slices.DeleteFunc(slices.Clone(cpus), func(cpu int) bool { return !slices.Contains(t.allowed, cpu) })
}

// groups divides the CPUs into those that are mates. It orders them by the lowest mate, be it among cpus or not.
func groups(cpus []int, mates func(cpu int) ([]int, error)) ([][]int, error) {
	first := map[int]int{} // CPU -> its lowest mate: one file read per group
	members := map[int][]int{}
	for _, cpu := range cpus {
		if _, known := first[cpu]; !known {
			list, err := mates(cpu)
			if err != nil {
				return nil, err
			}
			lowest := slices.Min(append(list, cpu))
			first[cpu] = lowest
			for _, mate := range list {
				first[mate] = lowest
			}
		}
		members[first[cpu]] = append(members[first[cpu]], cpu)
	}
	var groups [][]int
	for _, lowest := range slices.Sorted(maps.Keys(members)) {
		groups = append(groups, members[lowest])
	}
	return groups, nil
}

func (t topology) coreMates(cpu int) ([]int, error) {
	return t.cpus(cpuDir, cpuName(cpu), "topology/thread_siblings_list")
}

// cacheMates returns the CPUs on the last-level cache: L3 on servers, a lower level where there is none.
func (t topology) cacheMates(cpu int) (mates []int, err error) {
	dir, last := path.Join(cpuDir, cpuName(cpu), "cache"), 0
	for _, name := range names(t.root, dir) {
		level, err := t.number(dir, name, "level")
		if err != nil || level <= last {
			continue // uevent and the like
		}
		if kind, _ := readText(t.root, dir, name, "type"); kind == "Instruction" {
			continue
		}
		if mates, err = t.cpus(dir, name, "shared_cpu_list"); err != nil {
			return nil, err
		}
		last = level
	}
	if last == 0 {
		return nil, fmt.Errorf("/%s describes no cache (usual in virtual machines): use --numa-binding=node or exclusive",
			dir)
	}
	return mates, nil
}

func cpuName(cpu int) string { return "cpu" + strconv.Itoa(cpu) }

func (t topology) cpus(elem ...string) ([]int, error) {
	text, err := readText(t.root, elem...)
	if err != nil {
		return nil, err
	}
	cpus, err := ParseCPUs(text)
	if err != nil {
		return nil, fmt.Errorf("parse /%s: %w", path.Join(elem...), err)
	}
	return cpus, nil
}

func (t topology) number(elem ...string) (int, error) {
	text, err := readText(t.root, elem...)
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("parse /%s: %w", path.Join(elem...), err)
	}
	return n, nil
}

func readText(root fs.FS, elem ...string) (string, error) {
	data, err := fs.ReadFile(root, path.Join(elem...))
	return strings.TrimSpace(string(data)), err
}

// names returns the names in a directory, none if there is no such directory.
func names(root fs.FS, dir string) (list []string) {
	entries, _ := fs.ReadDir(root, dir)
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}
