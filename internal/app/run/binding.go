package run

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"dlrover-run/launcher/numa"
	"dlrover-run/launcher/proc"
)

// binding is the CPUs and the memory of each worker. A nil function binds none.
type binding struct {
	cpus   func(localRank int) []int
	memory func(localRank int) *proc.MemoryPolicy
}

// assign implements torchrun's --numa-binding: it decides the CPU set of every worker now. Without the option, the
// workers get sets.
func (b *binding) assign(o *options, sets [][]int, slots int) error {
	if len(sets) > 0 {
		b.cpus = func(localRank int) []int {
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
	planned, err := cpuSets(o, mode, slots)
	if err != nil {
		return fmt.Errorf("--numa-binding=%s: %w", mode, err)
	}
	b.cpus = func(localRank int) []int { return planned[localRank] }
	return nil
}

func cpuSets(o *options, mode numa.Mode, slots int) ([][]int, error) {
	devices, allowed, err := bindable(o)
	if err != nil {
		return nil, err
	}
	return numa.Plan(o.host.root, mode, devices, slots, allowed)
}

// bindable are the devices and the CPUs that workers may use.
func bindable(o *options) (devices []string, cpus []int, err error) {
	if devices, err = visibleDevices(o); err != nil {
		return nil, nil, err
	}
	cpus, err = affinity()
	return devices, cpus, err
}

// visibleDevices applies the variables by which users choose devices. ROCm's own
// filter comes before HIP's, which stands in for CUDA's.
func visibleDevices(o *options) ([]string, error) {
	devices, err := numa.Devices(o.host.root)
	for _, names := range [][]string{{"ROCR_VISIBLE_DEVICES"}, {"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"}} {
		i := slices.IndexFunc(names, func(name string) bool { _, set := o.env(name); return set })
		if err == nil && i >= 0 {
			devices, err = numa.Select(devices, names[i], o.Lookup(names[i]))
		}
	}
	return devices, err
}

// affinity lists the CPUs that this process may use.
func affinity() ([]int, error) {
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
