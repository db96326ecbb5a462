// Package numa chooses the CPUs of each worker by the NUMA node of its accelerator: torchrun's --numa-binding without
// the numactl program. Devices lists the accelerators, Select applies CUDA_VISIBLE_DEVICES and its kin, and Plan
// returns the CPU sets; as in torchrun memory follows by the kernel's first-touch rule. Near is for DLRover's
// --numa-affinity, which continues without a binding where the node is not known.
//
// Everything is read through an fs.FS that stands for "/" (os.DirFS("/") in production). sysfs shows a container all
// accelerators of the machine; only /dev and /proc show its own ones.
//
// The package must not set an affinity, read the environment or start a goroutine.
package numa

import (
	"fmt"
	"io/fs"
	"slices"

	"dlrover-run/internal/stable"
)

// Mode selects the CPUs near its accelerator that a worker gets.
type Mode string

// The modes of --numa-binding.
const (
	// modeNode is all CPUs of the accelerator's NUMA node.
	modeNode Mode = "node"
	// modeSocket is all CPUs of all NUMA nodes of the accelerator's socket.
	modeSocket Mode = "socket"
	// modeExclusive is an even share of the node's physical cores among the accelerators of that node. The hyperthreads of
	// a core stay together.
	modeExclusive Mode = "exclusive"
	// modeCoreComplex is the CPUs of the node that share one last-level cache (an AMD CCX, say). The accelerators of one
	// node take the caches in turn, those with the most usable CPUs first.
	modeCoreComplex Mode = "core-complex"
)

// ParseMode reads the value of --numa-binding.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case modeNode, modeSocket, modeExclusive, modeCoreComplex:
		return m, nil
	}
	return "", fmt.Errorf("NUMA binding %q is unknown: use %s, %s, %s or %s", s,
		modeNode, modeSocket, modeExclusive, modeCoreComplex)
}

// Plan returns the CPU set of each worker, ascending. The worker with local rank i uses devices[i]; devices without a
// worker still count as sharers of their node. allowed is the affinity mask of this process: every set is a part of it.
func Plan(root fs.FS, mode Mode, devices []string, workers int, allowed []int) ([][]int, error) {
	if _, err := ParseMode(string(mode)); err != nil {
		return nil, err
	}
	if workers > len(devices) {
		return nil, fmt.Errorf("NUMA binding needs an accelerator for each of the %d workers, and %d are visible %v: "+
			"lower --nproc-per-node, or remove the option", workers, len(devices), devices)
	}
	t, err := readTopology(root, allowed)
	if err != nil {
		return nil, err
	}
	nodes := make([]int, len(devices))
	plan := make([][]int, workers)
	for i, device := range devices {
		if nodes[i], err = t.nodeOf(device); err != nil && i < workers {
			return nil, fmt.Errorf("bind local rank %d to the CPUs near its accelerator %s: %w", i, device, err)
		}
	}
	for i := range plan {
		if plan[i], err = t.bind(mode, nodes[i], count(nodes[:i], nodes[i]), count(nodes, nodes[i])); err != nil {
			return nil, fmt.Errorf("bind local rank %d to the CPUs near its accelerator %s: %w", i, devices[i], err)
		}
	}
	return plan, nil
}

// bind returns the CPUs of the accelerator that is number i of the n on its node.
func (t topology) bind(mode Mode, node, i, n int) ([]int, error) {
	near := t.online[node]
	if mode == modeSocket {
		var err error
		if near, err = t.socketOf(node); err != nil {
			return nil, err
		}
	}
	cpus := t.usable(near)
	if len(cpus) == 0 {
		return nil, fmt.Errorf("the CPUs there (NUMA node %d, mode %s) are [%s], and this process may use only [%s]: "+
			"give the container some of them, or remove the option", node, mode, Format(near), Format(t.allowed))
	}
	switch mode {
	case modeExclusive:
		return t.coreShare(cpus, node, i, n)
	case modeCoreComplex:
		return t.cacheShare(cpus, i)
	}
	return cpus, nil
}

func (t topology) coreShare(cpus []int, node, i, n int) ([]int, error) {
	cores, err := groups(cpus, t.coreMates)
	if err != nil {
		return nil, err
	}
	size, rest := len(cores)/n, len(cores)%n
	if size == 0 {
		return nil, fmt.Errorf("NUMA node %d has %d usable physical cores (CPUs %s) for %d accelerators, "+
			"and exclusive needs one each: give the container more CPUs of that node, or use --numa-binding=node",
			node, len(cores), Format(cpus), n)
	}
	start := i*size + min(i, rest) // the first ones take the rest
	if i < rest {
		size++
	}
	return slices.Sorted(slices.Values(slices.Concat(cores[start : start+size]...))), nil
}

func (t topology) cacheShare(cpus []int, i int) ([]int, error) {
	caches, err := groups(cpus, t.cacheMates)
	if err != nil {
		return nil, err
	}
	// The smallest cache after the affinity mask is last.
	stable.Sort(caches, func(a, b []int) int { return len(b) - len(a) })
	return caches[i%len(caches)], nil
}

func count(list []int, v int) (n int) {
	for _, e := range list {
		if e == v {
			n++
		}
	}
	return n
}
