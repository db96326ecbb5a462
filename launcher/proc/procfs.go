package proc

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// procStat is the part of /proc/<pid>/stat (proc_pid_stat(5)) used here.
type procStat struct {
	pid, ppid, session int
	flags              uint64
	comm               string
	state              byte
}

func (s procStat) zombie() bool { return s.state == 'Z' || s.state == 'X' }

func readStat(pid int) (procStat, error) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return procStat{}, err
	}
	return parseStat(string(text))
}

// parseStat parses "pid (comm) state ppid pgrp session tty tpgid flags …". comm is whatever the
// process chose, parentheses and line ends included; no later field has a ')'.
func parseStat(text string) (procStat, error) {
	open, end := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if open < 1 || end < open {
		return procStat{}, fmt.Errorf("parse process status %q: no command in parentheses", text)
	}
	f := strings.SplitN(strings.TrimLeft(text[end+1:], " "), " ", 8) // state ppid pgrp session tty tpgid flags …
	if len(f) < 8 || len(f[0]) != 1 {
		return procStat{}, fmt.Errorf("parse process status %q: too few fields", text)
	}
	st := procStat{comm: text[open+1 : end], state: f[0][0]}
	var errs [4]error
	st.pid, errs[0] = strconv.Atoi(strings.TrimSpace(text[:open]))
	st.ppid, errs[1] = strconv.Atoi(f[1])
	st.session, errs[2] = strconv.Atoi(f[3])
	st.flags, errs[3] = strconv.ParseUint(f[6], 10, 64)
	if err := errors.Join(errs[:]...); err != nil {
		return procStat{}, fmt.Errorf("parse process status %q: %w", text, err)
	}
	return st, nil
}

// numbersIn returns the numeric names in a directory of /proc; none on error.
func numbersIn(dir string) (ns []int) {
	f, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer f.Close()
	names, _ := f.Readdirnames(-1)
	for _, name := range names {
		if n, err := strconv.Atoi(name); err == nil {
			ns = append(ns, n)
		}
	}
	return ns
}

// directChildren returns the children of this process, zombies included.
func directChildren() []int {
	if pids, ok := listedChildren(); ok {
		return pids
	}
	return probedChildren()
}

// listedChildren reads the kernel's lists, one for each thread that forked. A
// kernel without CONFIG_PROC_CHILDREN has none.
func listedChildren() (pids []int, ok bool) {
	for _, tid := range numbersIn("/proc/self/task") {
		text, err := os.ReadFile("/proc/self/task/" + strconv.Itoa(tid) + "/children")
		if err != nil {
			continue // the thread has ended
		}
		ok = true
		for f := range strings.FieldsSeq(string(text)) {
			if pid, err := strconv.Atoi(f); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids, ok
}

// probedChildren asks of every process whether it could be waited for, which is
// ten times faster than reading its parent from /proc.
func probedChildren() (pids []int) {
	for _, pid := range numbersIn("/proc") {
		if unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil) == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// descendants returns the living processes below root, without those for which
// spared is true and what is below them.
func descendants(root int, spared func(pid int) bool) (pids []int) {
	children := map[int][]procStat{}
	for _, pid := range numbersIn("/proc") {
		if st, err := readStat(pid); err == nil {
			children[st.ppid] = append(children[st.ppid], st)
		}
	}
	var walk func(pid int)
	walk = func(pid int) {
		for _, c := range children[pid] {
			if spared(c.pid) {
				continue
			}
			if !c.zombie() {
				pids = append(pids, c.pid)
			}
			walk(c.pid)
		}
	}
	walk(root)
	return pids
}
