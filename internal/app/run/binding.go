package run

import (
	"fmt"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"

	"dlrover-run/launcher/numa"
)

// binding implements torchrun's --numa-binding: it decides the CPU set of every worker now.
func (r *resolver) binding() error {
	if sets := r.s.called.command.CPUs; len(sets) > 0 {
		r.s.cpus = func(localRank int) []int {
			if localRank >= len(sets) {
				return nil
			}
			return sets[localRank]
		}
	}
	text := r.c.String("numa-binding")
	if text == "" {
		return nil
	}
	mode, err := numa.ParseMode(text)
	if err != nil {
		return err
	}
	if r.s.slots == 0 {
		return nil
	}
	sets, err := r.cpuSets(mode)
	if err != nil {
		return fmt.Errorf("--numa-binding=%s: %w", mode, err)
	}
	r.s.cpus = func(localRank int) []int { return sets[localRank] }
	return nil
}

func (r *resolver) cpuSets(mode numa.Mode) ([][]int, error) {
	devices, allowed, err := r.bindable()
	if err != nil {
		return nil, err
	}
	return numa.Plan(r.host.root, mode, devices, r.s.slots, allowed)
}

// bindable are the devices and the CPUs that workers may use.
func (r *resolver) bindable() (devices []string, cpus []int, err error) {
	if devices, err = r.visibleDevices(r.host.root); err != nil {
		return nil, nil, err
	}
	cpus, err = affinity()
	return devices, cpus, err
}

// visibleDevices applies the variables by which users choose devices. ROCm's own
// filter comes before HIP's, which stands in for CUDA's.
func (r *resolver) visibleDevices(root fs.FS) ([]string, error) {
	devices, err := numa.Devices(root)
	for _, names := range [][]string{{"ROCR_VISIBLE_DEVICES"}, {"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"}} {
		i := slices.IndexFunc(names, func(name string) bool { _, set := r.env(name); return set })
		if err == nil && i >= 0 {
			devices, err = numa.Select(devices, names[i], r.lookup(names[i]))
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
