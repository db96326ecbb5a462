package shm

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Free returns how many bytes of shared memory below base this process may still take. It is the least of the room in
// the file system, the machine's available memory, and the limits of its control groups. Clean file cache does not
// count as taken, because the kernel drops it first.
func Free(base string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(base, &st); err != nil {
		return 0, fmt.Errorf("free space of %s: %w", base, err)
	}
	free := int64(min(st.Bavail, math.MaxInt64/uint64(st.Bsize))) * st.Bsize
	memory, err := freeMemory(os.DirFS("/"))
	if err != nil {
		return 0, fmt.Errorf("free memory: %w", err)
	}
	return max(0, min(free, memory)), nil
}

// freeMemory skips values that the system does not have: there may be no control groups, or not all files.
func freeMemory(root fs.FS) (int64, error) {
	free := int64(math.MaxInt64)
	if kib, ok := field(root, "proc/meminfo", "MemAvailable:"); ok {
		free = kib << 10
	}
	groups, errG := fs.ReadFile(root, "proc/self/cgroup")
	mounts, errM := fs.ReadFile(root, "proc/self/mountinfo")
	if err := errors.Join(errG, errM); errors.Is(err, fs.ErrNotExist) {
		return free, nil
	} else if err != nil {
		return 0, err
	}
	for _, g := range memoryGroups(string(groups), string(mounts)) {
		free = min(free, g.free(root))
	}
	return free, nil
}

// memoryGroup is the control group of this process in one hierarchy.
type memoryGroup struct {
	mount string // where the hierarchy is mounted, without the first slash
	dir   string // the group, mount or below
	v1    bool
}

// memoryGroups finds the groups that limit memory, from /proc/self/cgroup and /proc/self/mountinfo.
func memoryGroups(groups, mounts string) []memoryGroup {
	var found []memoryGroup
	for line := range strings.Lines(mounts) {
		// 31 25 0:28 <root> <mount point> <options> <optional>... - <type> <source> <super options>
		before, after, ok := strings.Cut(strings.TrimSpace(line), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !ok || len(left) < 5 || len(right) < 3 {
			continue
		}
		v1 := right[0] == "cgroup" && hasItem(right[2], "memory")
		if !v1 && right[0] != "cgroup2" {
			continue
		}
		own, ok := ownGroup(groups, v1)
		if !ok {
			continue
		}
		mount := strings.TrimPrefix(left[4], "/")
		found = append(found, memoryGroup{mount: mount, dir: path.Join(mount, below(left[3], own)), v1: v1})
	}
	return found
}

func hasItem(list, item string) bool { return strings.Contains(","+list+",", ","+item+",") }

// ownGroup finds the path of this process in a hierarchy.
func ownGroup(groups string, v1 bool) (string, bool) {
	for line := range strings.Lines(groups) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3) // id:controllers:path
		if len(parts) == 3 && (v1 && hasItem(parts[1], "memory") || !v1 && parts[0] == "0" && parts[1] == "") {
			return parts[2], true
		}
	}
	return "", false
}

// below returns the path of a group relative to the root of a mount. It is "" when the group is not visible there, as
// in a container: then the mount itself is the nearest visible group.
func below(root, group string) string {
	rest, ok := strings.CutPrefix(group+"/", strings.TrimSuffix(root, "/")+"/")
	if !ok || strings.Contains("/"+rest, "/../") {
		return ""
	}
	return rest
}

// free is the least that the group and those above it leave.
func (g memoryGroup) free(root fs.FS) int64 {
	limitFile, usedFile, cache := "memory.max", "memory.current", "inactive_file"
	if g.v1 {
		limitFile, usedFile, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
	}
	least := int64(math.MaxInt64)
	for dir := g.dir; ; dir = path.Dir(dir) {
		limit, okL := field(root, path.Join(dir, limitFile), "") // "max" is not a number, and no limit
		used, okU := field(root, path.Join(dir, usedFile), "")
		if okL && okU {
			reclaimable, _ := field(root, path.Join(dir, "memory.stat"), cache)
			least = min(least, limit-max(0, used-reclaimable))
		}
		if len(dir) <= len(g.mount) || dir == "." {
			return least
		}
	}
}

// field reads a number from a file: the one behind the name at the start of a line, or the first one.
func field(root fs.FS, file, name string) (int64, bool) {
	b, err := fs.ReadFile(root, file)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(b)) {
		words := strings.Fields(line)
		if name != "" {
			if len(words) < 2 || words[0] != name {
				continue
			}
			words = words[1:]
		}
		if len(words) == 0 {
			return 0, false
		}
		n, err := strconv.ParseInt(words[0], 10, 64)
		return n, err == nil && n >= 0
	}
	return 0, false
}
