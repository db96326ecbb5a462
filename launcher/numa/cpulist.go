package numa

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// maxCPU bounds the memory that a damaged list can make us allocate; Linux is built for 8192 CPUs at most.
const maxCPU = 1 << 16

// ParseCPUs reads the kernel's list format, as in "0-3,8"; the list of a node without CPUs is empty.
func ParseCPUs(list string) ([]int, error) {
	var cpus []int
	if list = strings.TrimSpace(list); list == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		first, err1 := strconv.ParseUint(from, 10, 32)
		last, err2 := strconv.ParseUint(to, 10, 32)
		if err1 != nil || err2 != nil || first > last || last >= maxCPU {
			return nil, fmt.Errorf("CPU list %q: %q is not a number or an ascending range below %d", list, part, maxCPU)
		}
		for cpu := first; cpu <= last; cpu++ {
			cpus = append(cpus, int(cpu))
		}
	}
	slices.Sort(cpus)
	return slices.Compact(cpus), nil
}

// Format returns CPUs in the kernel's list format, as in "0-3,8".
func Format(cpus []int) string {
	sorted := slices.Compact(slices.Sorted(slices.Values(cpus)))
	var parts []string
	for i := 0; i < len(sorted); {
		last := i
		for last+1 < len(sorted) && sorted[last+1] == sorted[last]+1 {
			last++
		}
		part := strconv.Itoa(sorted[i])
		if last > i {
			part += "-" + strconv.Itoa(sorted[last])
		}
		parts, i = append(parts, part), last+1
	}
	return strings.Join(parts, ",")
}
