package proc

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// unified is the controller name under which this package keeps the v2
// hierarchy, as /proc/<pid>/cgroup does.
const unified = ""

// cgroupMount is one mounted cgroup hierarchy (proc_pid_mountinfo(5)).
type cgroupMount struct {
	root        string   // the cgroup that is visible at point
	point       string   // mount point
	controllers []string // v1 controllers, or {unified}
}

// parseMountinfo returns the cgroup mounts among the lines
// "id parent major:minor root point options [tags…] - type source superoptions".
func parseMountinfo(text string) (ms []cgroupMount) {
	for line := range strings.Lines(text) {
		before, after, ok := strings.Cut(strings.TrimSpace(line), " - ")
		place, fs := strings.Fields(before), strings.Fields(after)
		if !ok || len(place) < 6 || len(fs) < 1 {
			continue
		}
		m := cgroupMount{root: unescape(place[3]), point: unescape(place[4])}
		switch {
		case fs[0] == "cgroup2":
			m.controllers = []string{unified}
		case fs[0] == "cgroup" && len(fs) > 2:
			m.controllers = strings.Split(fs[2], ",")
		default:
			continue
		}
		ms = append(ms, m)
	}
	return ms
}

// unescape decodes the octal escapes (\040) of mountinfo.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if c, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(c))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// parseOwnCgroups maps controllers to paths from the lines
// "id:controller,controller:path"; the v2 line has no controller.
func parseOwnCgroups(text string) map[string]string {
	own := map[string]string{}
	for line := range strings.Lines(text) {
		f := strings.SplitN(strings.TrimRight(line, "\n"), ":", 3)
		if len(f) < 3 {
			continue
		}
		for c := range strings.SplitSeq(f[1], ",") {
			own[c] = f[2]
		}
	}
	return own
}

// cgroups is this process's place in all hierarchies.
type cgroups struct {
	mounts []cgroupMount
	own    map[string]string
	root   string // stands for /sys/fs/cgroup
}

// ownCgroups reads the place of this process. procRoot stands for /proc and
// cgroupRoot for /sys/fs/cgroup; "" means the real one.
func ownCgroups(procRoot, cgroupRoot string) (cgroups, error) {
	return cgroupsOf(procRoot, cgroupRoot, "self")
}

// cgroupsOf reads the place of a process, as this one sees it.
func cgroupsOf(procRoot, cgroupRoot, process string) (cgroups, error) {
	if procRoot == "" {
		procRoot = "/proc"
	}
	mounts, err := os.ReadFile(filepath.Join(procRoot, "self/mountinfo"))
	if err != nil {
		return cgroups{}, fmt.Errorf("find cgroup mounts: %w", err)
	}
	own, err := os.ReadFile(filepath.Join(procRoot, process, "cgroup"))
	if err != nil {
		return cgroups{}, fmt.Errorf("find the cgroup of a process: %w", err)
	}
	return cgroups{parseMountinfo(string(mounts)), parseOwnCgroups(string(own)), cgroupRoot}, nil
}

// dirs returns the directories of this process's cgroup for a controller, its own first, then each ancestor up to the
// mount point. None: not mounted, or the own cgroup lies outside of the mounted part.
func (c cgroups) dirs(controller string) (dirs []string) {
	path, ok := c.own[controller]
	if !ok || strings.HasPrefix(path, "/..") { // "/../x" is outside of the cgroup namespace
		return nil
	}
	for _, m := range c.mounts {
		rel, err := filepath.Rel(m.root, path)
		if !slices.Contains(m.controllers, controller) || err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
			continue
		}
		point := c.place(m.point)
		for rel != "." {
			dirs = append(dirs, filepath.Join(point, rel))
			rel = filepath.Dir(rel)
		}
		return append(dirs, point)
	}
	return nil
}

func (c cgroups) place(point string) string {
	if rest, ok := strings.CutPrefix(point, "/sys/fs/cgroup"); ok && c.root != "" {
		return filepath.Join(c.root, rest)
	}
	return point
}
