package watch

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// tick is the unit of times in /proc/PID/stat: USER_HZ is 100 on all that Go supports.
const tick = 10 * time.Millisecond

// Bounds of a look.
const (
	maxThreads   = 1024 // of a process
	maxDepth     = 8    // generations below a worker
	maxProcesses = 256  // below a worker
	maxText      = 64 << 10
)

// procfs reads the kernel's data about processes. It is for one goroutine.
type procfs struct {
	root string // "/proc"
	buf  []byte // of the last read
	path []byte
}

func newProcfs(root string) *procfs { return &procfs{root: root, buf: make([]byte, 4096)} }

// stat is the part of /proc/PID/stat that is of interest.
type stat struct {
	state   byte
	cpu     time.Duration // of all its threads, user and system
	reaped  time.Duration // of the descendants that it has waited for
	threads int
	start   uint64
	parent  int
}

var errGone = errors.New("there is no such process")

// file reads <root>/<pid>/<name>, 64 KiB at most. Its result is valid until the next call.
func (p *procfs) file(pid int, name string) ([]byte, error) {
	p.path = append(p.path[:0], p.root...)
	p.path = append(p.path, '/')
	p.path = strconv.AppendInt(p.path, int64(pid), 10)
	p.path = append(p.path, '/')
	p.path = append(p.path, name...)
	return p.read(string(p.path))
}

// read uses system calls directly: the runtime's poller costs more than the reading.
func (p *procfs) read(path string) ([]byte, error) {
	fd, err := uninterrupted(func() (int, error) { return unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	for n := 0; ; {
		m, err := uninterrupted(func() (int, error) { return unix.Read(fd, p.buf[n:]) })
		if err != nil {
			return nil, err
		}
		if n += m; m == 0 || n >= maxText {
			return p.buf[:n], nil
		}
		if n == len(p.buf) {
			p.buf = append(p.buf, make([]byte, len(p.buf))...)
		}
	}
}

// task is the path of a thread's files below its process's: the main thread's are the process's own.
func task(pid, tid int) string {
	if tid == pid {
		return ""
	}
	return "task/" + strconv.Itoa(tid) + "/"
}

func uninterrupted(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

func (p *procfs) stat(pid int) (stat, error) {
	b, err := p.file(pid, "stat")
	if err != nil {
		return stat{}, errGone
	}
	s, ok := parseStat(b)
	if !ok {
		return stat{}, io.ErrUnexpectedEOF
	}
	return s, nil
}

// parseStat reads the line of a process or a thread. Its name may contain anything, parentheses and line feeds, too.
func parseStat(b []byte) (s stat, ok bool) {
	end := bytes.LastIndexByte(b, ')')
	if end < 0 {
		return s, false
	}
	var n [19]uint64 // fields 4 to 22
	i := -1
	for f := range bytes.FieldsSeq(b[end+1:]) {
		switch {
		case i < 0 && len(f) == 1:
			s.state = f[0]
		case i < 0:
			return s, false
		case i < len(n):
			n[i], _ = number(f) // some may be negative, none of those below
		}
		i++
	}
	s.cpu, s.reaped = ofTicks(n[10], n[11]), ofTicks(n[12], n[13])
	s.parent, s.threads, s.start = int(min(n[0], 1<<30)), int(min(n[16], 1<<30)), n[18]
	return s, i >= len(n) && s.start > 0
}

// ofTicks holds for 290 years of CPU time.
func ofTicks(a, b uint64) time.Duration {
	return time.Duration(min(min(a, 1<<61)+min(b, 1<<61), 1<<62/uint64(tick))) * tick
}

// number reads a decimal number.
func number(b []byte) (n uint64, ok bool) {
	if len(b) == 0 || len(b) > 19 {
		return 0, false
	}
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + uint64(c-'0')
	}
	return n, true
}

// thread is the CPU time of a thread, how long it has waited for a CPU, and how often it was switched to, or off.
// Kernels without CONFIG_SCHED_INFO count the first in ticks, do not have the second, and have the third in a longer
// file.
func (p *procfs) thread(pid, tid int) (cpu, wait time.Duration, switches uint64) {
	if b, err := p.file(pid, task(pid, tid)+"schedstat"); err == nil {
		if cpu, wait, switches, ok := parseSchedstat(b); ok {
			return cpu, wait, switches
		}
	}
	dir := "task/" + strconv.Itoa(tid)
	if b, err := p.file(pid, dir+"/stat"); err == nil {
		s, _ := parseStat(b)
		cpu = s.cpu
	}
	if b, err := p.file(pid, dir+"/status"); err == nil {
		switches = fieldOf(b, "voluntary_ctxt_switches:") + fieldOf(b, "nonvoluntary_ctxt_switches:")
	}
	return cpu, 0, switches
}

// parseSchedstat reads nanoseconds on a CPU, nanoseconds of waiting for one, and how often one was got.
func parseSchedstat(b []byte) (cpu, wait time.Duration, switches uint64, ok bool) {
	var n [3]uint64
	i := 0
	for f := range bytes.FieldsSeq(b) {
		if i < len(n) {
			if n[i], ok = number(f); !ok {
				return 0, 0, 0, false
			}
		}
		i++
	}
	return time.Duration(min(n[0], 1<<62)), time.Duration(min(n[1], 1<<62)), n[2], i >= len(n) && n[0]+n[2] > 0
}

// io is how much the process has read and written, sockets and pipes included. The kernel hides it for processes of
// other users.
func (p *procfs) io(pid int) uint64 {
	b, err := p.file(pid, "io")
	if err != nil {
		return 0
	}
	return fieldOf(b, "rchar:") + fieldOf(b, "wchar:")
}

// fieldOf is the number after a name at the begin of a line, 0 if there is none.
func fieldOf(b []byte, name string) uint64 {
	for line := range bytes.Lines(b) {
		if rest, ok := bytes.CutPrefix(line, []byte(name)); ok {
			n, _ := number(bytes.TrimSpace(rest))
			return n
		}
	}
	return 0
}

// wchan is where the kernel has put a thread to sleep.
func (p *procfs) wchan(pid, tid int) string {
	b, err := p.file(pid, task(pid, tid)+"wchan")
	if err != nil || len(b) > 64 || len(b) == 1 && b[0] == '0' {
		return ""
	}
	return string(b)
}

// children are the children of the main thread, or of all.
func (p *procfs) children(pid int, all bool) (pids []int) {
	if !all {
		return p.childrenOf(pid, pid, nil)
	}
	for _, tid := range p.threads(pid) {
		pids = p.childrenOf(pid, tid, pids)
	}
	return pids
}

func (p *procfs) childrenOf(pid, tid int, to []int) []int {
	b, err := p.file(pid, "task/"+strconv.Itoa(tid)+"/children")
	if err != nil {
		return to
	}
	for f := range bytes.FieldsSeq(b) {
		if n, ok := number(f); ok && len(to) < maxProcesses {
			to = append(to, int(n))
		}
	}
	return to
}
