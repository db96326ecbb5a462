package pystack

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// mapping is one line of /proc/PID/maps.
type mapping struct {
	start, end, offset uint64
	inode              uint64
	exec               bool
	path               string // as the process sees it; "" is not a file, [stack] and the like are none either
}

// maxMappings bounds the lines that are read of a process's maps; the kernel's own default is 65,530.
const maxMappings = 1 << 17

func readMaps(pid int) ([]mapping, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []mapping
	for s := bufio.NewScanner(f); s.Scan() && len(all) < maxMappings; {
		if m, ok := parseMapping(s.Text()); ok {
			all = append(all, m)
		}
	}
	return all, nil
}

// parseMapping reads a line: 7f00-7f01 r-xp 0000 08:01 42    /lib/libc.so.6.
func parseMapping(line string) (m mapping, ok bool) {
	var fields [5]string
	for i := range fields {
		fields[i], line, _ = strings.Cut(line, " ")
	}
	from, to, _ := strings.Cut(fields[0], "-")
	for _, n := range []struct {
		text string
		base int
		to   *uint64
	}{{from, 16, &m.start}, {to, 16, &m.end}, {fields[2], 16, &m.offset}, {fields[4], 10, &m.inode}} {
		v, err := strconv.ParseUint(n.text, n.base, 64)
		if err != nil {
			return mapping{}, false
		}
		*n.to = v
	}
	m.exec = len(fields[1]) > 2 && fields[1][2] == 'x'
	m.path = strings.ReplaceAll(strings.TrimLeft(line, " "), `\012`, "\n")
	return m, m.start < m.end
}

// module is a file that a process has mapped.
type module struct {
	path string
	maps []mapping // by address
}

// modules groups mappings by their files, in the order of their addresses.
func modules(maps []mapping) []*module {
	var all []*module
	byPath := map[string]*module{}
	for _, m := range maps {
		if m.path == "" {
			continue
		}
		mod := byPath[m.path]
		if mod == nil {
			mod = &module{path: m.path}
			byPath[m.path] = mod
			all = append(all, mod)
		}
		mod.maps = append(mod.maps, m)
	}
	return all
}
