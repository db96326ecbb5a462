package pystack

import (
	"fmt"
	"maps"
	"os"
	"strconv"
	"strings"

	"dlrover-run/internal/stable"
)

// task is a thread as the kernel has it.
type task struct {
	tid   int
	inner int // its id in the process's own PID namespace
	name  string
	state byte
}

func (t task) dead() bool { return t.state == 'Z' || t.state == 'X' }

// maxTasks bounds the threads of a process that are looked at.
const maxTasks = 8192

// readTasks lists the threads of a process, the main one first.
func readTasks(pid int) ([]task, error) {
	dir, err := os.Open(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(maxTasks)
	if err != nil {
		return nil, err
	}
	nested := innerID(pid) != pid
	var all []task
	for _, name := range names {
		tid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/stat", pid, tid))
		if err != nil {
			continue // it has ended
		}
		t := task{tid: tid, inner: tid}
		t.name, t.state = parseStat(string(stat))
		if nested {
			t.inner = innerID(tid)
		}
		all = append(all, t)
	}
	stable.Sort(all, func(a, b task) int {
		if (a.tid == pid) != (b.tid == pid) {
			return map[bool]int{true: -1, false: 1}[a.tid == pid]
		}
		return a.tid - b.tid
	})
	return all, nil
}

// parseStat takes name and state from a stat file: 42 (name) S ...; a name may have parentheses and spaces.
func parseStat(s string) (name string, state byte) {
	from, to := strings.IndexByte(s, '('), strings.LastIndexByte(s, ')')
	if from < 0 || to < from {
		return "", 0
	}
	if rest := s[to+1:]; len(rest) > 1 {
		state = rest[1]
	}
	return s[from+1 : to], state
}

// startTime is field 22 of a process's stat, in clock ticks since the boot.
func startTime(pid int) (uint64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	const behindName = 22 - 2 // it is preceded by pid and name
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(fields) < behindName {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	return strconv.ParseUint(fields[behindName-1], 10, 64)
}

// innerID is a thread's id in the innermost PID namespace that it is in, as it calls itself.
func innerID(tid int) int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return tid
	}
	_, rest, _ := strings.Cut(string(b), "\nNSpid:")
	line, _, _ := strings.Cut(rest, "\n")
	ids := strings.Fields(line)
	if len(ids) == 0 {
		return tid
	}
	inner, err := strconv.Atoi(ids[len(ids)-1])
	if err != nil {
		return tid
	}
	return inner
}

// identifyThreads finds the tasks of thread states; states without one are absent. Before 3.11 an interpreter keeps
// only pthread_t, the address of the C library's own struct, which has the kernel's id somewhere.
func identifyThreads(m memory, threads []pyThread, tasks []task, mainThread uint64) map[uint64]task {
	byInner := map[int]task{}
	for _, t := range tasks {
		byInner[t.inner] = t
	}
	found := map[uint64]task{}
	var rest []pyThread
	for _, t := range threads {
		if task, ok := byInner[t.native]; ok && t.native != 0 {
			found[t.addr] = task
		} else {
			rest = append(rest, t)
		}
	}
	if len(rest) > 0 && len(tasks) > 0 {
		identifyPthreads(m, rest, byInner, tasks[0], mainThread, found)
	}
	return found
}

// pthreadSize is how much of a struct pthread is searched for the thread's id.
const pthreadSize = 1024

// pthreadID are the places to look at first: glibc on x86 and on ARM, musl.
var pthreadID = [...]int{720, 208, 48, 56}

// identifyPthreads takes the place that makes most of the threads tasks, each another one.
func identifyPthreads(m memory, threads []pyThread, byInner map[int]task, main task, mainThread uint64,
	found map[uint64]task) {
	structs := map[uint64]block{}
	for _, t := range threads {
		if b, err := read(m, t.id, pthreadSize); err == nil {
			structs[t.addr] = b
		}
	}
	var best map[uint64]task
	for i := range len(pthreadID) + pthreadSize/4 {
		off := 4 * (i - len(pthreadID))
		if i < len(pthreadID) {
			off = pthreadID[i]
		}
		if these := tasksAt(structs, uint64(off), byInner); len(these) > len(best) {
			best = these
		}
	}
	maps.Copy(found, best)
	for _, t := range threads {
		if _, ok := found[t.addr]; !ok && t.id == mainThread && mainThread != 0 {
			found[t.addr] = main
		}
	}
}

// tasksAt takes the value at off for the id of a task.
func tasksAt(structs map[uint64]block, off uint64, byInner map[int]task) map[uint64]task {
	these, taken := map[uint64]task{}, map[int]bool{}
	for addr, b := range structs {
		t, ok := byInner[int(b.half(off))]
		if ok && !taken[t.tid] {
			these[addr], taken[t.tid] = t, true
		}
	}
	return these
}
