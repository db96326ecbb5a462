package proc

import (
	"cmp"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Strain are the kernel's sums of what slows the processes of a node. Their growth tells of the time between.
type Strain struct {
	Ticks, Stolen int64         // of all CPUs, and of these what the hypervisor has taken
	Memory, IO    time.Duration // for which some process of the own cgroup has waited for memory, and for disks
	Sent, Resent  int64         // segments of TCP
	Hot           int64         // how often a core was slowed down because of its temperature
}

// ReadStrain reads it. Unknown sums are 0. procRoot stands for /proc, cgroupRoot for /sys/fs/cgroup and sysRoot for
// /sys; "" means the real one.
func ReadStrain(procRoot, cgroupRoot, sysRoot string) (s Strain) {
	procRoot, sysRoot = cmp.Or(procRoot, "/proc"), cmp.Or(sysRoot, "/sys")
	cpu, _, _ := strings.Cut(readFile(procRoot, "stat"), "\n")
	if f := strings.Fields(cpu); len(f) > 8 && f[0] == "cpu" {
		for i, text := range f[1:9] { // the times of guests are in those of users
			n, _ := strconv.ParseInt(text, 10, 64)
			if s.Ticks += n; i == 7 {
				s.Stolen = n
			}
		}
	}
	s.Memory, s.IO = waited(procRoot, cgroupRoot, "memory"), waited(procRoot, cgroupRoot, "io")
	tcp := tcpOf(readFile(procRoot, "net/snmp"))
	s.Sent, s.Resent = tcp["OutSegs"], tcp["RetransSegs"]
	cores, _ := filepath.Glob(filepath.Join(sysRoot, "devices/system/cpu/cpu*/thermal_throttle")) // the pattern is valid
	for _, dir := range cores {
		n, _ := strconv.ParseInt(strings.TrimSpace(readFile(dir, "core_throttle_count")), 10, 64)
		s.Hot += max(n, 0)
	}
	return s
}

// waited is for how long some process has waited for a thing, in the own v2 cgroup or, without its accounts, anywhere.
func waited(procRoot, cgroupRoot, what string) time.Duration {
	text := ""
	if c, err := ownCgroups(procRoot, cgroupRoot); err == nil {
		if dirs := c.dirs(unified); len(dirs) > 0 {
			text = readFile(dirs[0], what+".pressure")
		}
	}
	if text == "" {
		text = readFile(procRoot, filepath.Join("pressure", what))
	}
	some, _, _ := strings.Cut(text, "\n")
	_, total, _ := strings.Cut(some, "total=")
	n, _ := strconv.ParseInt(strings.TrimSpace(total), 10, 64)
	return time.Duration(max(n, 0)) * time.Microsecond
}

// tcpOf reads the two lines about TCP: names, and numbers.
func tcpOf(text string) map[string]int64 {
	by := map[string]int64{}
	var names []string
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		switch {
		case len(f) == 0 || f[0] != "Tcp:":
		case names == nil:
			names = f
		default:
			for i := 1; i < min(len(f), len(names)); i++ {
				by[names[i]], _ = strconv.ParseInt(f[i], 10, 64)
			}
		}
	}
	return by
}

// Periods are those of a CPU quota, and in how many of them it was used up.
type Periods struct{ All, Spent int64 }

// Quotas are the CPU quotas that bind a process, by the directories of their cgroups.
func Quotas(procRoot, cgroupRoot string, pid int) map[string]Periods {
	by := map[string]Periods{}
	c, err := cgroupsOf(procRoot, cgroupRoot, strconv.Itoa(pid))
	if err != nil {
		return by
	}
	for _, controller := range []string{"cpu", unified} {
		for _, dir := range c.dirs(controller) {
			text := readFile(dir, "cpu.stat")
			if p := (Periods{parseKey(text, "nr_periods"), parseKey(text, "nr_throttled")}); p.All > 0 {
				by[dir] = p
			}
		}
	}
	return by
}
