package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// adoptOrphans makes this process the parent of all processes that a launcher leaves behind, so that the look for
// leftovers finds them all.
func adoptOrphans() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the reaper of orphans: %w", err)
	}
	return nil
}

type process struct {
	pid, parent int
	name        string
}

// parseStat reads /proc/PID/stat (proc_pid_stat(5)); the name may hold spaces and
// parentheses. Zombies have ended and are not ok.
func parseStat(data []byte) (p process, ok bool) {
	open, end := bytes.IndexByte(data, '('), bytes.LastIndexByte(data, ')')
	if open < 0 || end < open {
		return p, false
	}
	fields := strings.Fields(string(data[end+1:]))
	if len(fields) < 2 || fields[0] == "Z" || fields[0] == "X" {
		return p, false
	}
	pid, err1 := strconv.Atoi(strings.TrimSpace(string(data[:open])))
	parent, err2 := strconv.Atoi(fields[1])
	return process{pid, parent, string(data[open+1 : end])}, err1 == nil && err2 == nil
}

func processes() []process {
	entries, _ := os.ReadDir("/proc")
	var ps []process
	for _, e := range entries {
		if e.Name()[0] < '0' || e.Name()[0] > '9' {
			continue
		}
		data, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue // it has ended
		}
		if p, ok := parseStat(data); ok {
			ps = append(ps, p)
		}
	}
	return ps
}

// descendants returns the processes below root.
func descendants(all []process, root int) []process {
	children := map[int][]process{}
	for _, p := range all {
		children[p.parent] = append(children[p.parent], p)
	}
	var out []process
	for queue := children[root]; len(queue) > 0; queue = queue[1:] {
		out = append(out, queue[0])
		queue = append(queue, children[queue[0].pid]...)
	}
	return out
}

// leftovers waits for every descendant of this process to end, and returns those that have not. With
// kill it ends them.
func leftovers(limit time.Duration, kill bool) []process {
	for end := time.Now().Add(limit); ; time.Sleep(10 * time.Millisecond) {
		ps := descendants(processes(), os.Getpid())
		if len(ps) == 0 || time.Now().After(end) {
			return ps
		}
		for _, p := range ps {
			if kill {
				_ = unix.Kill(p.pid, unix.SIGKILL) // it may have ended meanwhile
			}
		}
	}
}
