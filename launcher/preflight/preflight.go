// Package preflight finds problems of a node that disturb a job: too little shared memory, devices and ports that other
// programs have.
//
// The package is pure: it must not read a file, a clock or the environment. It receives the facts as arguments.
package preflight

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/internal/text"
)

// workerMemory is the least part of /dev/shm, in bytes, that a worker's helpers need, such as those of PyTorch's
// DataLoader or of NCCL. It is also the whole /dev/shm of a container by default.
const workerMemory = 64 << 20

// SharedMemory returns one line if free bytes of /dev/shm are few for so many workers; "": they are enough.
func SharedMemory(free int64, workers int) string {
	if free >= int64(workers)*workerMemory {
		return ""
	}
	return fmt.Sprintf("/dev/shm has %d MiB left for %d workers: data loaders and NCCL put their buffers there, and end "+
		"by SIGBUS when it is full; in Docker give --shm-size=8g or more, in Kubernetes mount an emptyDir of medium Memory",
		free>>20, workers)
}

// Devices lists the device files of accelerators among the names in /dev and in /dev/dri, in the order of their
// numbers. A render device counts where there is MetaX' driver: others are displays'.
func Devices(dev, dri []string) (paths []string) {
	metax := false
	for _, name := range dev {
		metax = metax || strings.HasPrefix(name, "mxcd")
		if isDevice("/dev/" + name) {
			paths = append(paths, "/dev/"+name)
		}
	}
	for _, name := range dri {
		if metax && isDevice("/dev/dri/"+name) {
			paths = append(paths, "/dev/dri/"+name)
		}
	}
	slices.SortFunc(paths, func(a, b string) int { // nvidia10 comes after nvidia9
		return cmp.Or(strings.Compare(family(a), family(b)), cmp.Compare(len(a), len(b)), strings.Compare(a, b))
	})
	return paths
}

// families are the beginnings of device files, before a number, and the variables that choose among them by their
// positions.
func families() map[string][]string {
	return map[string][]string{
		"/dev/nvidia":      {"CUDA_VISIBLE_DEVICES"},
		"/dev/davinci":     {"ASCEND_RT_VISIBLE_DEVICES"},
		"/dev/dri/renderD": {"MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"},
	}
}

// family is a device file without its number.
func family(path string) string { return strings.TrimRight(path, "0123456789") }

func isDevice(path string) bool {
	_, known := families()[family(path)]
	return known && family(path) != path
}

// Chosen leaves the devices that this job may use; they have to be in order. A list that is not made of positions
// chooses none: its names are not known here.
func Chosen(devices []string, lookup func(string) (string, bool)) (chosen []string) {
	position := map[string]int{}
	for _, path := range devices {
		kind := family(path)
		if uses(families()[kind], position[kind], lookup) {
			chosen = append(chosen, path)
		}
		position[kind]++
	}
	return chosen
}

func uses(variables []string, position int, lookup func(string) (string, bool)) bool {
	for _, name := range variables {
		if list, ok := lookup(name); ok {
			return slices.ContainsFunc(strings.Split(list, ","), func(item string) bool {
				n, err := strconv.Atoi(strings.TrimSpace(item))
				return err == nil && n == position
			})
		}
	}
	return true
}

// Process is a process of this machine and its open files.
type Process struct {
	PID, Parent int
	Name        string // as the kernel has it: 15 bytes of the program's name
	Command     string
	Files       []string // targets of its descriptors: paths, or such as "socket:[4711]"
}

// maxTold is the most processes that one line names.
const maxTold = 3

// Busy returns one line with the devices that are in use by processes other than own and its descendants; "": none.
func Busy(devices []string, all []Process, own int) string {
	var held, by []string
	more := 0
	for _, p := range all {
		has := p.has(devices)
		if len(has) == 0 || watches(p) || below(all, p.PID, own) {
			continue
		}
		held = append(held, has...)
		if len(by) < maxTold {
			by = append(by, p.String())
		} else {
			more++
		}
	}
	if len(held) == 0 {
		return ""
	}
	slices.Sort(held)
	held = slices.Compact(held)
	who := strings.Join(by, ", ")
	if more > 0 {
		who += fmt.Sprintf(" and %d more", more)
	}
	verb := "are"
	if len(held) == 1 {
		verb = "is"
	}
	return fmt.Sprintf("%s %s in use by another program: %s; its memory and time are missing to this job",
		strings.Join(held, ", "), verb, who)
}

// String names the process for people.
func (p Process) String() string {
	command := p.Command
	if command == "" {
		command = p.Name
	}
	return fmt.Sprintf("pid %d (%s)", p.PID, text.Head(command, 80))
}

func (p Process) has(files []string) (has []string) {
	for _, f := range p.Files {
		if slices.Contains(files, f) && !slices.Contains(has, f) {
			has = append(has, f)
		}
	}
	return has
}

// watches reports whether p only looks at devices. A process that computes on NVIDIA's has the device of unified memory
// open.
func watches(p Process) bool {
	switch p.Name {
	case "nvidia-persiste", "nv-hostengine", "dcgm-exporter", "nvidia-smi", "nvtop", "npu-smi", "mx-smi", "mx-exporter",
		"Xorg", "Xwayland", "gnome-shell", "gpucheck":
		return true
	}
	return slices.ContainsFunc(p.Files, func(f string) bool { return strings.HasPrefix(f, "/dev/nvidia") }) &&
		!slices.Contains(p.Files, "/dev/nvidia-uvm")
}

// below reports whether pid is root, or one of its descendants. A table that was read while processes came and went
// may have a loop.
func below(all []Process, pid, root int) bool {
	for range all {
		if pid == root {
			return true
		}
		i := slices.IndexFunc(all, func(p Process) bool { return p.PID == pid })
		if i < 0 {
			return false
		}
		pid = all[i].Parent
	}
	return false
}

// listening is the state of a socket that accepts connections, in /proc/net/tcp.
const listening = "0A"

// Listeners lists the sockets that listen on a TCP port, as a Process has them among its files, of a table such as
// /proc/net/tcp or /proc/net/tcp6. Only those count that would block a listener on addr, which may be unspecified.
func Listeners(table string, addr netip.Addr, port int) (files []string) {
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) < 10 || f[3] != listening {
			continue
		}
		at, err := localEnd(f[1])
		if err == nil && int(at.Port()) == port && overlap(at.Addr(), addr) {
			files = append(files, "socket:["+f[9]+"]")
		}
	}
	return files
}

func overlap(a, b netip.Addr) bool { return a == b || a.IsUnspecified() || b.IsUnspecified() }

// localEnd reads the kernel's form of an address: words of 32 bits in the byte order of this machine, in hexadecimal.
func localEnd(text string) (netip.AddrPort, error) {
	ip, number, _ := strings.Cut(text, ":")
	port, err := strconv.ParseUint(number, 16, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	b, err := hex.DecodeString(ip)
	if err != nil || len(b) != 4 && len(b) != 16 {
		return netip.AddrPort{}, fmt.Errorf("%q is not an address", text)
	}
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	addr, _ := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(addr.Unmap(), uint16(port)), nil
}

// Holders lists which processes have one of the files open.
func Holders(all []Process, files []string) (names []string) {
	for _, p := range all {
		if len(p.has(files)) > 0 {
			names = append(names, p.String())
		}
	}
	return names
}
