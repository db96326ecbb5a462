package pystack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"syscall"
	"time"

	"dlrover-run/hang"
)

// Want selects what a Read finds in addition to the Python stacks.
type Want uint

// Values of Want.
const (
	// Native are the native frames of threads that are blocked in the kernel, Python's or not. They are found by a search
	// of the stack (hang.Thread.Approximate) and cost a few milliseconds.
	Native Want = 1 << iota
	// Tool lets eu-stack find the native frames, of running threads too, where it is installed and safe: no thread is
	// in the states D or T. It stops the process for some 10 ms. Native finds the frames that it does not find in
	// time.
	Tool
)

// readDeadline is the time limit of a Read with no deadline in its context, or a later one.
const readDeadline = 5 * time.Second

// grace is how long after its deadline a read may take that is slow, but not blocked.
const grace = 250 * time.Millisecond

// errAbandoned means that the memory of a process could not be read in time. As long as that read has not returned,
// the process is not read again.
var errAbandoned = errors.New("a read of its memory does not return")

// Reader reads stacks. It keeps its knowledge of interpreters, for the next process that runs the same one. Its
// methods may be called at the same time.
type Reader struct {
	images images
	open   func(pid int) (memoryFile, error)

	mu    sync.Mutex
	stuck map[process]int // how many reads of it are abandoned and have not returned
}

// process is one process, not another one that gets its pid.
type process struct {
	pid   int
	start uint64
}

// memoryFile is memory that is to be closed.
type memoryFile interface {
	memory
	Close() error
}

// New makes a Reader. It needs no closing.
func New() *Reader {
	return &Reader{
		open:  func(pid int) (memoryFile, error) { return openMem(pid) },
		stuck: map[process]int{},
	}
}

// Read returns the stacks of a process: of every thread with Python frames, with Native or Tool of the others, too;
// the main thread is there always, and first. An error means that nothing of the process can be read; Stacks.Error
// describes other missing parts. A process that is no Python has an empty Interpreter. Read returns when ctx ends, or
// at readDeadline, with the stacks until then, and 250 ms later at the latest (errAbandoned).
func (r *Reader) Read(ctx context.Context, pid int, want ...Want) (hang.Stacks, error) {
	start, err := startTime(pid)
	if err != nil {
		return hang.Stacks{}, explain(pid, err)
	}
	ctx, cancel := context.WithTimeout(ctx, readDeadline)
	defer cancel()
	j, ok := r.begin(process{pid: pid, start: start})
	if !ok {
		return hang.Stacks{}, explain(pid, errAbandoned)
	}
	go func() {
		j.stacks, j.err = r.read(ctx, pid, wanted(want))
		r.end(j)
	}()
	select {
	case <-j.returned:
	case <-ctx.Done():
		if !j.returnsWithin(grace) && r.abandon(j) {
			return hang.Stacks{}, explain(pid, errAbandoned)
		}
	}
	return j.stacks, explain(pid, j.err)
}

func wanted(want []Want) (all Want) {
	for _, w := range want {
		all |= w
	}
	return all
}

// job is one read. Its results are there when returned is closed.
type job struct {
	process  process
	returned chan struct{}
	stacks   hang.Stacks
	err      error

	abandoned bool // under Reader.mu
}

func (j *job) returnsWithin(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-j.returned:
		return true
	case <-t.C:
		return false
	}
}

// begin makes a job, unless one of the same process is stuck.
func (r *Reader) begin(p process) (*job, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &job{process: p, returned: make(chan struct{})}, r.stuck[p] == 0
}

func (r *Reader) end(j *job) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if j.abandoned {
		if r.stuck[j.process]--; r.stuck[j.process] == 0 {
			delete(r.stuck, j.process)
		}
	}
	close(j.returned)
}

// abandon gives a job up, unless it has just returned.
func (r *Reader) abandon(j *job) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-j.returned:
	default:
		j.abandoned = true
		r.stuck[j.process]++
	}
	return j.abandoned
}

// explain describes the meaning of an error for a user that wants stacks.
func explain(pid int, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ESRCH), errors.Is(err, errEnded):
		return fmt.Errorf("process %d: %w", pid, errEnded)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("process %d: its memory may not be read: that needs its user and group, or CAP_SYS_PTRACE; "+
			"with kernel.yama.ptrace_scope=1 an ancestor, or whom it names by PR_SET_PTRACER: %w", pid, err)
	}
	return fmt.Errorf("process %d: %w", pid, err)
}

var errEnded = errors.New("it has ended")

// read does the work, in a goroutine of its own. Its waits end with ctx, except those in the kernel.
func (r *Reader) read(ctx context.Context, pid int, want Want) (hang.Stacks, error) {
	tasks, err := readTasks(pid)
	if err != nil {
		return hang.Stacks{}, err
	}
	// When the main thread has ended, the other threads still have the memory.
	i := slices.IndexFunc(tasks, func(t task) bool { return !t.dead() })
	if i < 0 {
		return hang.Stacks{}, errEnded
	}
	tid := tasks[i].tid
	file, err := r.open(tid)
	if err != nil {
		return hang.Stacks{}, err
	}
	defer file.Close()
	maps, err := readMaps(tid)
	if err != nil {
		return hang.Stacks{}, err
	}
	s := &survey{
		reader: r, pid: pid, tid: tid, tasks: tasks, maps: maps,
		mem: &bounded{memory: file, ctx: ctx, left: readBudget}, byTID: map[int]*hang.Thread{},
	}
	s.python()
	if want&Tool != 0 {
		s.tool(ctx)
	}
	if want&(Native|Tool) != 0 {
		s.native()
	}
	return s.stacks(), nil
}
