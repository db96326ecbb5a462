package python

import (
	"bytes"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// environ is the environment of the workers, and the interface of the address of this node for the collectives.
func (c *Config) environ() []string {
	env := append([]string{}, c.Env...)
	add := func(name, value string) {
		for _, kv := range env {
			if strings.HasPrefix(kv, name+"=") {
				return
			}
		}
		env = append(env, name+"="+value)
	}
	if nic := interfaceOf(c.Addr); nic != "" {
		add("GLOO_SOCKET_IFNAME", nic)
		add("NCCL_SOCKET_IFNAME", "="+nic) // this one, and none with a longer name
	}
	add("CUDA_MODULE_LOADING", "LAZY") // a fraction of the time until the first kernel
	return env
}

// interfaceOf names the interface that has the address; "" if none has.
func interfaceOf(addr string) string {
	want, err := netip.ParseAddr(addr)
	if err != nil {
		return ""
	}
	nics, _ := net.Interfaces() // none is as good as an error
	for _, nic := range nics {
		addrs, _ := nic.Addrs()
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Unmap() == want.Unmap().WithZone("") {
				return nic.Name
			}
		}
	}
	return ""
}

// descendants are the processes below pid.
func descendants(pid int) (below []int) {
	children := map[int][]int{}
	files, _ := filepath.Glob("/proc/[0-9]*/stat") // only a bad pattern is an error
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil {
			child, parent := family(text)
			children[parent] = append(children[parent], child)
		}
	}
	for next := []int{pid}; len(next) > 0; next = next[1:] {
		below = append(below, children[next[0]]...)
		next = append(next, children[next[0]]...)
	}
	return below
}

// family reads "pid (comm) state ppid ..." of https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html; comm is any
// text that the process chose.
func family(stat []byte) (pid, parent int) {
	first, _, _ := bytes.Cut(stat, []byte(" "))
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 2 {
		return 0, -1
	}
	pid, errPID := strconv.Atoi(string(first))
	parent, errParent := strconv.Atoi(string(fields[1]))
	if errPID != nil || errParent != nil {
		return 0, -1
	}
	return pid, parent
}
