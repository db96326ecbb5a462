package watch

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"dlrover-run/hang"
	"dlrover-run/internal/text"
)

// fileCalls are system calls whose first argument is a descriptor. Where that is of a file, a thread that sleeps in one
// waits for the file system, be it a disk, NFS or FUSE.
var fileCalls = [...]int{unix.SYS_READ, unix.SYS_PREAD64, unix.SYS_READV, unix.SYS_PREADV, unix.SYS_PREADV2,
	unix.SYS_GETDENTS64, unix.SYS_FSTAT, unix.SYS_WRITE, unix.SYS_PWRITE64, unix.SYS_WRITEV, unix.SYS_FSYNC,
	unix.SYS_FDATASYNC, unix.SYS_COPY_FILE_RANGE}

// maxName is how many bytes of a file's name are told.
const maxName = 100

// inMemory are where no file system is waited for.
var inMemory = [...]string{"/dev/", "/proc/", "/sys/", "/memfd:"}

// waitedFor names the file that a thread waits for; "": none, or the kernel does not tell.
func (p *procfs) waitedFor(pid, tid int) string {
	b, err := p.file(pid, task(pid, tid)+"syscall")
	if err != nil {
		return ""
	}
	call, fd, ok := parseCall(b)
	if !ok || !slices.Contains(fileCalls[:], call) {
		return ""
	}
	name, err := os.Readlink(fmt.Sprintf("%s/%d/fd/%d", p.root, pid, fd))
	if err != nil || !strings.HasPrefix(name, "/") ||
		slices.ContainsFunc(inMemory[:], func(dir string) bool { return strings.HasPrefix(name, dir) }) {
		return ""
	}
	return name
}

// parseCall reads the number and the first argument of a system call: "0 0x3 ..."; a thread that runs has none.
func parseCall(b []byte) (call, first int, ok bool) {
	number, rest, _ := bytes.Cut(b, []byte(" "))
	argument, _, _ := bytes.Cut(rest, []byte(" "))
	n, err := strconv.ParseUint(string(number), 10, 31)
	if err != nil {
		return 0, 0, false
	}
	a, err := strconv.ParseUint(string(argument), 0, 31)
	return int(n), int(a), err == nil
}

// fileWaits counts the looks at which a worker waited for a file.
type fileWaits struct {
	pid   int   // the process that trains
	below []int // those that the worker has started: they load its data
	looks int
	waits int
	last  string // file
}

func (l *looker) fileWaits() []fileWaits {
	all := make([]fileWaits, len(l.state))
	for i := range l.state {
		t := &l.state[i]
		below := l.sampler.descendants(t.pid, true)
		all[i] = fileWaits{pid: cmp.Or(t.trainer, t.pid), below: below[:min(len(below), maxChildren)]}
	}
	return all
}

func (w *fileWaits) look(fs *procfs, s *hang.Sample) {
	name := fs.waitedFor(w.pid, cmp.Or(s.Proc.Thread, w.pid))
	for _, pid := range w.below {
		if name == "" {
			name = fs.waitedFor(pid, pid)
		}
	}
	w.looks++
	if name != "" {
		w.waits++
		w.last = name
	}
}

func (w *fileWaits) fact(rank int) hang.Fact {
	f := hang.Fact{Kind: "storage.files", Of: fmt.Sprintf("rank %d waited for files", rank)}
	if w.waits > 0 {
		f.Of += " such as " + text.Line(w.last, maxName)
		f.Value = 100 * float64(w.waits) / float64(w.looks)
	}
	return f
}
