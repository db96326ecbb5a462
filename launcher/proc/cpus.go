package proc

import (
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// CPUCount returns how many CPUs this process may use: those of its affinity
// mask, but no more than the CPU quota of its cgroup (rounded up), and at least
// 1. procRoot stands for /proc and cgroupRoot for /sys/fs/cgroup; "" means the
// real one.
func CPUCount(procRoot, cgroupRoot string) int {
	return int(math.Ceil(CPUs(procRoot, cgroupRoot)))
}

// CPUs is CPUCount without rounding: a cgroup may leave less than one.
func CPUs(procRoot, cgroupRoot string) float64 {
	n := float64(affinityCount())
	c, err := ownCgroups(procRoot, cgroupRoot)
	if err != nil {
		return n
	}
	for _, dir := range c.dirs("cpu") {
		n = limit(n, readFile(dir, "cpu.cfs_quota_us")+" "+readFile(dir, "cpu.cfs_period_us"))
	}
	for _, dir := range c.dirs(unified) {
		n = limit(n, readFile(dir, "cpu.max"))
	}
	return n
}

func affinityCount() int {
	set := unix.NewCPUSet(maxCPUs)
	if err := unix.SchedGetaffinityDynamic(0, set); err != nil {
		return runtime.NumCPU()
	}
	return max(set.Count(), 1)
}

// limit lowers n to the quota in "quota period" (microseconds). A quota of "max"
// (v2), -1 (v1) or one that cannot be read is none.
func limit(n float64, quota string) float64 {
	f := strings.Fields(quota)
	if len(f) != 2 {
		return n
	}
	q, err1 := strconv.ParseInt(f[0], 10, 64)
	p, err2 := strconv.ParseInt(f[1], 10, 64)
	if err1 != nil || err2 != nil || q <= 0 || p <= 0 {
		return n
	}
	return min(n, float64(q)/float64(p))
}

func readFile(dir, name string) string {
	text, _ := os.ReadFile(filepath.Join(dir, name))
	return string(text)
}
