package proc

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// MemoryState is the memory controller's record of a cgroup. Sizes are in bytes; 0 means unlimited or unknown.
type MemoryState struct {
	OOMKills int64 // members killed for lack of memory since the cgroup exists
	Limit    int64 // the smallest of the cgroup and its visible ancestors
	Peak     int64 // highest use of the cgroup that has the limit
}

// memoryCgroup is the memory cgroup of this process. Workers are in the same
// one: the launcher's own directory for them has no memory controller.
type memoryCgroup struct {
	v2   bool
	dirs []string // own first, then ancestors
}

// memory finds the memory cgroup of this process.
func (c cgroups) memory() (*memoryCgroup, error) {
	if dirs := c.dirs("memory"); len(dirs) > 0 {
		return &memoryCgroup{dirs: dirs}, nil
	}
	dirs := c.dirs(unified)
	for len(dirs) > 0 && !exists(filepath.Join(dirs[0], "memory.events")) {
		dirs = dirs[1:] // the controller is on further up only
	}
	if len(dirs) == 0 {
		return nil, errors.New("no memory cgroup: this process is in the root cgroup, or no memory controller is mounted")
	}
	return &memoryCgroup{v2: true, dirs: dirs}, nil
}

// Path returns the directory of the cgroup.
func (m *memoryCgroup) Path() string { return m.dirs[0] }

// Read returns the state now.
func (m *memoryCgroup) Read() (MemoryState, error) {
	events, limit, peak := "memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes"
	if m.v2 {
		events, limit, peak = "memory.events", "memory.max", "memory.peak"
	}
	text, err := os.ReadFile(filepath.Join(m.dirs[0], events))
	if err != nil {
		return MemoryState{}, fmt.Errorf("read memory cgroup: %w", err)
	}
	st := MemoryState{OOMKills: parseKey(string(text), "oom_kill")}
	at := m.dirs[0]
	for _, dir := range m.dirs {
		if n := readBytes(filepath.Join(dir, limit)); n > 0 && (st.Limit == 0 || n < st.Limit) {
			st.Limit, at = n, dir
		}
	}
	st.Peak = readBytes(filepath.Join(at, peak))
	return st, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// parseKey returns the number in the line "key number"; 0 if there is none.
func parseKey(text, key string) int64 {
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == key {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			return max(n, 0)
		}
	}
	return 0
}

// readBytes reads a file with one number of bytes. "max" (v2), the page-rounded
// largest integer (v1) and a missing file (memory.peak before Linux 5.19) give 0.
func readBytes(path string) int64 {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil || n < 0 || n >= 1<<62 {
		return 0
	}
	return n
}
