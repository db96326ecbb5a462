package family

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Stat is the part of /proc/<pid>/stat (proc_pid_stat(5)) used here.
type Stat struct {
	PID, Parent, Session int
	Threads              int
	Flags                uint64
	Comm                 string
	State                byte
}

// Ended reports a zombie. /proc also shows a process as one when its first thread has ended while others run; that
// process lives.
func (s Stat) Ended() bool { return (s.State == 'Z' || s.State == 'X') && s.Threads <= 1 }

// ReadStat reads the status of a process.
func ReadStat(pid int) (Stat, error) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return Stat{}, err
	}
	return parseStat(string(text))
}

// Fields of stat, counted from the state, which follows the command.
const (
	fieldParent  = 1
	fieldSession = 3
	fieldFlags   = 6
	fieldThreads = 17
)

// parseStat parses "pid (comm) state ppid pgrp session tty tpgid flags …". The process chooses comm freely, including
// parentheses and line ends; no later field has a ')'.
func parseStat(text string) (Stat, error) {
	open, end := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if open < 1 || end < open {
		return Stat{}, fmt.Errorf("parse process status %q: no command in parentheses", text)
	}
	f := strings.Fields(text[end+1:])
	if len(f) <= fieldThreads || len(f[0]) != 1 {
		return Stat{}, fmt.Errorf("parse process status %q: too few fields", text)
	}
	st := Stat{Comm: text[open+1 : end], State: f[0][0]}
	var errs [5]error
	st.PID, errs[0] = strconv.Atoi(strings.TrimSpace(text[:open]))
	st.Parent, errs[1] = strconv.Atoi(f[fieldParent])
	st.Session, errs[2] = strconv.Atoi(f[fieldSession])
	st.Flags, errs[3] = strconv.ParseUint(f[fieldFlags], 10, 64)
	st.Threads, errs[4] = strconv.Atoi(f[fieldThreads])
	if err := errors.Join(errs[:]...); err != nil {
		return Stat{}, fmt.Errorf("parse process status %q: %w", text, err)
	}
	return st, nil
}

// Numbers returns the numeric names in a directory of /proc; none on error.
func Numbers(dir string) (ns []int) {
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

// Children returns the children of this process, zombies included.
func Children() []int {
	if pids, ok := listedChildren(); ok {
		return pids
	}
	return probedChildren(candidates())
}

// listedChildren reads the kernel's lists, one for each thread that forked. They
// have children that /proc hides. A kernel without CONFIG_PROC_CHILDREN has none.
func listedChildren() (pids []int, ok bool) {
	for _, tid := range Numbers("/proc/self/task") {
		text, err := os.ReadFile("/proc/self/task/" + strconv.Itoa(tid) + "/children")
		if err != nil {
			continue // the thread has ended
		}
		ok = true
		pids = append(pids, numbers(string(text))...)
	}
	return pids, ok
}

func numbers(text string) (ns []int) {
	for f := range strings.FieldsSeq(text) {
		if n, err := strconv.Atoi(f); err == nil {
			ns = append(ns, n)
		}
	}
	return ns
}

// maxPIDs is the kernel's own limit (pid_max).
const maxPIDs = 1 << 22

// candidates are the pids that a child may have. With hidepid= or without /proc, where
// process 1 does not show, that is every number: half a second for four million.
func candidates() []int {
	if _, err := os.Stat("/proc/1"); err == nil {
		return Numbers("/proc")
	}
	text, _ := os.ReadFile("/proc/sys/kernel/pid_max")
	limit, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		limit = maxPIDs
	}
	all := make([]int, limit)
	for i := range all {
		all[i] = i + 1
	}
	return all
}

// probedChildren asks of every candidate whether it could be waited for, which is ten
// times faster than reading its parent from /proc.
func probedChildren(candidates []int) (pids []int) {
	for _, pid := range candidates {
		if unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil) == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// below returns the living processes below root that /proc shows, without those for which spared is true and their
// descendants.
func below(root int, spared func(pid int) bool) (pids []int) {
	children := map[int][]Stat{}
	for _, pid := range Numbers("/proc") {
		if st, err := ReadStat(pid); err == nil {
			children[st.Parent] = append(children[st.Parent], st)
		}
	}
	var walk func(pid int)
	walk = func(pid int) {
		for _, c := range children[pid] {
			if spared(c.PID) {
				continue
			}
			if !c.Ended() {
				pids = append(pids, c.PID)
			}
			walk(c.PID)
		}
	}
	walk(root)
	return pids
}
