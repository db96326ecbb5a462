// Package binding gives each worker its CPUs and its memory.
package binding

import (
	"fmt"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/launcher/numa"
	"dlrover-run/launcher/proc"
)

// Binding is the CPUs and the memory of each worker. A nil function binds none.
type Binding struct {
	CPUs   func(localRank int) []int
	Memory func(localRank int) *proc.MemoryPolicy
}

// Assign implements torchrun's --numa-binding: it decides the CPU set of every worker now. Without the option, the
// workers get sets.
func (b *Binding) Assign(o feature.Options, root fs.FS, sets [][]int, slots int) error {
	if len(sets) > 0 {
		b.CPUs = func(localRank int) []int {
			if localRank >= len(sets) {
				return nil
			}
			return sets[localRank]
		}
	}
	text := o.String("numa-binding")
	if text == "" {
		return nil
	}
	mode, err := numa.ParseMode(text)
	if err != nil || slots == 0 {
		return err
	}
	planned, err := cpuSets(o, root, mode, slots)
	if err != nil {
		return fmt.Errorf("--numa-binding=%s: %w", mode, err)
	}
	b.CPUs = func(localRank int) []int { return planned[localRank] }
	return nil
}

func cpuSets(o feature.Options, root fs.FS, mode numa.Mode, slots int) ([][]int, error) {
	devices, allowed, err := bindable(o, root)
	if err != nil {
		return nil, err
	}
	return numa.Plan(root, mode, devices, slots, allowed)
}

// bindable are the devices and the CPUs that workers may use.
func bindable(o feature.Options, root fs.FS) (devices []string, cpus []int, err error) {
	if devices, err = visibleDevices(o, root); err != nil {
		return nil, nil, err
	}
	cpus, err = Affinity()
	return devices, cpus, err
}

// visibleDevices applies the variables by which users choose devices. ROCm's own
// filter comes before HIP's, which stands in for CUDA's.
func visibleDevices(o feature.Options, root fs.FS) ([]string, error) {
	devices, err := numa.Devices(root)
	for _, names := range [][]string{{"ROCR_VISIBLE_DEVICES"}, {"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"}} {
		i := slices.IndexFunc(names, func(name string) bool { _, set := o.LookupEnv(name); return set })
		if err == nil && i >= 0 {
			devices, err = numa.Select(devices, names[i], o.Lookup(names[i]))
		}
	}
	return devices, err
}

// Affinity lists the CPUs that this process may use.
func Affinity() ([]int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("read the CPU affinity: %w", err)
	}
	var cpus []int
	for i := range len(set) * 64 {
		if set.IsSet(i) {
			cpus = append(cpus, i)
		}
	}
	return cpus, nil
}
